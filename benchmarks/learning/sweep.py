"""Short real training runs under several settings, kept one by one: the basis of `ablation` and `sensitivity`.

Everything is real (`dart train` in a process of its own: Chromium, vLLM, the trainer, weight sync). A finished run is a
JSON file under results/NAME/; existing runs are not repeated, so a sweep can be stopped at any moment and later
continues with the missing ones. Seeds are the outer loop: whenever it stops, all settings have about as many runs.
The config's `stop` ends a run: with `stop.env_steps`, a busy machine makes runs longer but no worse.

Success over a run is the mean over tasks of the success of each task's last roll-outs, so that settings which sample
tasks or roll-outs in other proportions stay comparable; before and after are held-out episodes, the same for all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning.inference import estimate
from dart.coordinator.summary import machine, software

RESULTS = Path(__file__).parents[1] / "results"
HARD = 0.1


@dataclass(frozen=True, slots=True)
class Setting:
    """One arm: overrides of the config's fields."""

    name: str
    overrides: tuple[str, ...]


def run_missing(
    name: str,
    config: Path,
    settings: Sequence[Setting],
    seeds: Sequence[int],
    common: tuple[str, ...] = (),
    jobs: int = 1,
) -> None:
    """Make the missing runs of `settings` × `seeds`, `jobs` at a time; failed ones are reported, and tried next time.

    `common`: overrides for all settings, followed by each setting's own.
    """
    missing = []
    for seed in seeds:
        for setting in settings:
            path = RESULTS / name / f"{setting.name}-{seed}.json"
            if path.exists():
                check_same(path, config)
            else:
                missing.append((setting, seed, path))

    def make(setting: Setting, seed: int, path: Path) -> None:
        began = time.monotonic()
        run = _train(config, setting, seed, common)
        if run is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run) + "\n", encoding="utf-8")
        success = run["after"]["mean"] if run["after"] else run["curve"][-1][2]
        took = time.monotonic() - began
        print(f"{name}: {setting.name}, seed {seed}: success {success:.1%}, {run['updates']} updates, "
              f"{run['env_steps']} steps, {took:.0f} s", flush=True)  # fmt: skip

    print(f"{name}: {len(missing)} runs to make, {jobs} at a time", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for one in [pool.submit(make, *arguments) for arguments in missing]:
                one.result()
        finally:
            # After Ctrl-C nothing new begins; the running ones have received it, too, and end by themselves.
            pool.shutdown(wait=False, cancel_futures=True)


def evaluate_base(name: str, config: Path, episodes: int) -> dict[str, Any]:
    """Held-out success of the model that all runs start from: measured once, kept in results/NAME/base.json."""
    path = RESULTS / name / "base.json"
    if path.exists():
        check_same(path, config)
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["success"]
        return known
    folder = Path(tempfile.mkdtemp(prefix="dart-sweep-"))
    overrides = (f"run.directory={folder}", f"evaluation.episodes={episodes}")
    command = [sys.executable, "-m", "dart", "eval", str(config), "--quiet"]
    subprocess.run([*command, *_set(overrides)], check=True, stdout=subprocess.DEVNULL)
    (run,) = folder.iterdir()
    success: dict[str, Any] = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["success"]
    shutil.rmtree(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"config_sha256": digest(config), "success": success}) + "\n", encoding="utf-8")
    return success


def _set(overrides: Sequence[str]) -> list[str]:
    return [part for one in overrides for part in ("--set", one)]


def check_same(path: Path, config: Path) -> None:
    """End the program with a message if another config made these results: they would be mistaken for this one's."""
    made = json.loads(path.read_text(encoding="utf-8"))
    if made["config_sha256"] != digest(config):
        raise SystemExit(
            f"{path} was made with another {config.name}: move {path.parent} away to start afresh, or restore the "
            "config that it was made with"
        )


def digest(config: Path) -> str:
    """A digest of the config's content, without comments and order."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _train(config: Path, setting: Setting, seed: int, common: tuple[str, ...]) -> dict[str, Any] | None:
    folder = Path(tempfile.mkdtemp(prefix="dart-sweep-"))
    overrides = (*common, *setting.overrides, f"run.seed={seed}", f"run.directory={folder}")
    command = [sys.executable, "-m", "dart", "train", str(config), "--quiet"]
    done = subprocess.run([*command, *_set(overrides)], check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        print(f"{setting.name}, seed {seed}: exit code {done.returncode}; its run directory is kept: {folder}",
              flush=True)  # fmt: skip
        return None
    (run,) = folder.iterdir()
    read = _read(run)
    shutil.rmtree(folder)
    if not read["curve"]:
        print(f"{setting.name}, seed {seed}: ended without an update: its stop is too early to count", flush=True)
        return None
    made = {"setting": setting.name, "overrides": setting.overrides, "seed": seed}
    return made | {"config_sha256": digest(config)} | read


def _read(run: Path) -> dict[str, Any]:
    """The results to keep from a run directory."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    curve, selected = [], []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] != "update":
            continue
        tasks = event["success_by_task"]
        curve.append(
            [
                event["env_steps"],
                event["train_seconds"],
                round(sum(tasks.values()) / len(tasks), 4),
                event["trajectories"],
            ]
        )
        selected.append(event["trainer"].get("entropy", 0.0))
    same = ("env_steps", "trajectories", "updates", "staleness", "dropped", "trained", "pooled", "unparsable",
            "infrastructure_failures", "train_seconds", "machine", "versions", "env_utilisation", "rollout_utilisation",
            "trainer_utilisation", "trained_actions_per_minute", "sampled_actions_per_minute", "time")  # fmt: skip
    return {
        "after": summary["success_after"],
        "curve": curve,
        "entropy": [round(value, 4) for value in selected],
        **{name: summary[name] for name in same if name in summary},
    }


def finished(name: str, settings: Sequence[Setting]) -> dict[str, list[dict[str, Any]]]:
    """Setting → its finished runs, for those settings that have any."""
    found = {}
    for setting in settings:
        paths = sorted((RESULTS / name).glob(f"{setting.name}-[0-9]*.json"))
        if paths:
            found[setting.name] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return found


def hard_tasks(base: Mapping[str, Any]) -> list[str]:
    """The tasks that the base policy solves in at most HARD of its episodes."""
    return [task for task, rate in base["per_task"].items() if rate["mean"] <= HARD]


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]], base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per setting: means over runs with 95 % intervals."""
    hard = hard_tasks(base)
    return [
        {
            "setting": name,
            "runs": len(made),
            "after": _mean([run["after"]["mean"] for run in made]),
            "after_hard": _mean(
                [statistics.fmean(run["after"]["per_task"][task]["mean"] for task in hard) for run in made]
            ),
            "per_task_after": {
                task: statistics.fmean(run["after"]["per_task"][task]["mean"] for run in made)
                for task in made[0]["after"]["per_task"]
            },
            "env_steps": _mean([run["env_steps"] for run in made]),
            "trajectories": _mean([run["trajectories"] for run in made]),
            "updates": _mean([run["updates"] for run in made]),
            "steps_per_update": _mean([run["env_steps"] / run["updates"] for run in made]),
            "seconds": _mean([run["train_seconds"] for run in made]),
            "trajectories_failed": _mean([run["dropped"].get("all failed", 0) for run in made]),
            "trajectories_succeeded": _mean([run["dropped"].get("all succeeded", 0) for run in made]),
            "staleness": _mean([run["staleness"]["mean"] for run in made]),
            "steps_per_trajectory": _mean([run["env_steps"] / run["trajectories"] for run in made]),
            "pooled": _mean([run["pooled"] for run in made]),
        }
        for name, made in runs.items()
    ]


def steps_to(run: Mapping[str, Any], success: float) -> int | None:
    """Environment steps until the smoothed curve first reaches `success`; None if it never does."""
    values = [point[2] for point in run["curve"]]
    for index in range(len(values)):
        if statistics.fmean(values[max(0, index - 2) : index + 1]) >= success:
            return int(run["curve"][index][0])
    return None


REAL = "real: Chromium, vLLM, trainer and weight sync on this machine"


def write(
    name: str,
    config: Path,
    results: Mapping[str, Any],
    what: str = REAL,
) -> Path:
    """Write results/NAME.json. `what`: what was real and what was not."""
    path = RESULTS / f"{name}.json"
    content = {
        "name": name,
        "real_or_simulated": what,
        "machine": machine(),
        "versions": software(),
        "date": time.strftime("%Y-%m-%d"),
        "config": config.name,
        "results": dict(results),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def plot(name: str, runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Path:
    """Draw results/NAME.png: success against environment steps and wall time; a band from lowest to highest run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axis, column, label in ((axes[0], 0, "environment steps"), (axes[1], 1, "seconds of training")):
        for setting, made in runs.items():
            end = min(run["curve"][-1][column] for run in made)
            grid = np.linspace(0, end, 60)
            curves = np.array(
                [np.interp(grid, [p[column] for p in run["curve"]], [p[2] for p in run["curve"]]) for run in made]
            )
            (line,) = axis.plot(grid, curves.mean(0), label=f"{setting} ({len(made)})")
            if len(made) > 1:
                axis.fill_between(grid, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.12)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success, mean over tasks")
    axes[1].legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def show(rows: Sequence[Mapping[str, Any]], base: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    hard = hard_tasks(base)
    rate = statistics.fmean(base["per_task"][task]["mean"] for task in hard) if hard else 0.0
    print(f"base policy: {base['mean']:.1%} held out in {base['episodes']} episodes; {', '.join(hard)} {rate:.1%}")
    shown = Table("setting", "runs", "held-out success", "hard tasks", "updates", "env steps/update",
                  "steps/trajectory", "staleness", "pooled", "seconds")  # fmt: skip
    for row in rows:
        shown.add_row(row["setting"], str(row["runs"]), _percent(row["after"]), _percent(row["after_hard"]),
                      f"{row['updates']['mean']:.0f}", f"{row['steps_per_update']['mean']:.0f}",
                      f"{row['steps_per_trajectory']['mean']:.2f}", f"{row['staleness']['mean']:.1f}",
                      f"{row['pooled']['mean']:.0f}", f"{row['seconds']['mean']:.0f}")  # fmt: skip
    Console().print(shown)


def _mean(values: Sequence[float]) -> dict[str, Any]:
    """Mean over runs, with its t-interval if there is more than one run."""
    found = estimate(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def _percent(interval: Mapping[str, Any]) -> str:
    if interval["low"] is None:
        return f"{interval['mean']:.1%}"
    return f"{interval['mean']:.1%} ({interval['low']:.1%} to {interval['high']:.1%})"
