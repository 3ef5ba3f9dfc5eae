"""A training run on GPUs, started as a user would start it, and what its events say of it.

The tiny policy learns the example's coloured boxes (examples/python/own_world.py), from pixels and without a browser.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.trials.pieces import ENDING_SECONDS, as_sets, tied

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "miniwob_cpu.yaml"
WORLD = ROOT / "examples" / "python"
"""The folder in which `own_world` is found."""
LONGEST_SECONDS = 900.0
"""Of one run; one that hangs is ended then, which is a failure."""
LOOK_SECONDS = 0.05
"""Shorter than a transfer, within which a replica is to be killed."""
KILLED_AFTER, KILLED_BY = 2, 12
"""Updates before a replica is killed: within a transfer after the first number, at any moment after the second."""
MOST_DIFFERENCE = 0.05
"""Mean |log π_trainer − log π_engine| of a token at the same version, in nats [ours: bfloat16 puts each by about 0.01
off]."""
TOLD = ("env_steps", "train_seconds", "env_utilisation", "trainer_utilisation")
"""Of summary.json, for the result file."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    events: Sequence[Event]
    summary: Mapping[str, Any]
    """summary.json; empty if there is none."""
    code: int | None
    """The run's exit code; None if it had to be ended."""
    killed: tuple[str, int] | None
    """The replica that was killed, and the number of events before that."""
    seconds: float

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def overrides(updates: int, episodes: int) -> list[str]:
    """What every run changes in `CONFIG`. `episodes`: of each evaluation; 0: there is none."""
    return [
        "model.dtype=bfloat16", "environment.kind=own_world:Boxes", "environment.tasks.names=[boxes]",
        "environment.slots=32", "rollout.slots=32", "trainer.threads=null", f"stop.updates={updates}",
        "stop.train_seconds=null", "stop.success_rate=null", f"evaluation.episodes={episodes}", "server.port=0",
        "dashboard.enabled=false",
    ]  # fmt: skip


def tried(changes: Sequence[str], judge: Callable[[Trial], list[str]], *, kill: bool = False) -> dict[str, object]:
    """A run with what `judge` finds wrong with it; its folder is kept if that is anything.

    `changes`: of `CONFIG`. `kill`: one replica gets SIGKILL.
    """
    folder = Path(tempfile.mkdtemp(prefix="dart-gpu-"))
    trial = train([*changes, f"run.directory={folder}"], folder, kill=kill)
    wrong = judge(trial)
    if wrong:
        print(f"{folder} is kept, with the logs of its workers", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return {"ok": not wrong, "findings": wrong} | _told(trial)


def train(changes: Sequence[str], folder: Path, *, kill: bool = False) -> Trial:
    """`dart train` to its end, with the run's directory in `folder`."""
    began = time.monotonic()
    command = tied([sys.executable, "-m", "dart", "train", str(CONFIG), "--quiet", *as_sets(changes)])
    killed: tuple[str, int] | None = None
    with subprocess.Popen(command, cwd=WORLD) as process:
        while (code := process.poll()) is None and time.monotonic() - began < LONGEST_SECONDS:
            time.sleep(LOOK_SECONDS)
            if kill and killed is None and _is_time(seen := events_of(folder)) and (name := _kill(process.pid)):
                killed = name, len(seen)
        if code is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            process.kill()
    written = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/summary.json")]
    return Trial(events_of(folder), written[0] if written else {}, code, killed, time.monotonic() - began)


def events_of(folder: Path) -> list[Event]:
    """The lines of the run's metrics.jsonl that are complete."""
    found = sorted(folder.glob("*/metrics.jsonl"))
    if not found:
        return []
    lines = found[0].read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _is_time(events: Sequence[Event]) -> bool:
    """To kill a replica."""
    updates = sum(event["event"] == "update" for event in events)
    syncs = [event["event"] for event in events if event["event"].startswith("sync")]
    return updates >= KILLED_BY or (updates >= KILLED_AFTER and syncs[-1:] == ["sync_started"])


def _kill(parent: int) -> str | None:
    """Send SIGKILL to one of the run's roll-out workers; its name, or None if there is none."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(parent).children(recursive=True):
            words = child.cmdline()
            if "--role" in words and words[words.index("--role") + 1] == "rollout":
                child.kill()
                return words[words.index("--id") + 1]
    return None


def findings(trial: Trial, *, updates: int, most_difference: float = MOST_DIFFERENCE) -> list[str]:
    """What is not as it should be of any run: its end, its updates, its transfers and its parity."""
    wrong = []
    if trial.code != 0:
        wrong.append("the run did not end by itself" if trial.code is None else f"the exit code is {trial.code}")
    if (made := len(trial.of("update"))) < updates:
        wrong.append(f"{made} of {updates} updates were made")
    if not trial.of("sync"):
        wrong.append("no weights arrived")
    for number, event in enumerate(trial.events):
        may_fail = trial.killed is not None and event.get("replica") == trial.killed[0] and number >= trial.killed[1]
        if event["event"] == "sync_failed" and not may_fail:
            wrong.append(f"a transfer failed: {event['why']}")
    difference, tokens = parity(trial.of("update"))
    if tokens == 0:
        wrong.append("no token was trained on at the version that sampled it, so nothing is known of parity")
    elif difference > most_difference:
        wrong.append(f"log-probabilities differ by {difference:.4f} on average, more than {most_difference}")
    return wrong


def parity(updates: Sequence[Event]) -> tuple[float, float]:
    """(mean difference, tokens) over all updates' tokens of the trainer's own version."""
    told = [event.get("trainer", {}) for event in updates]
    tokens = sum(one.get("same_version_tokens", 0.0) for one in told)
    weighted = sum(one.get("same_version_tokens", 0.0) * one.get("same_version_difference", 0.0) for one in told)
    return (weighted / tokens if tokens else 0.0), tokens


def _told(trial: Trial) -> dict[str, object]:
    """What a result file says of any run."""
    syncs = trial.of("sync")
    difference, tokens = parity(trial.of("update"))
    return {
        "seconds": round(trial.seconds, 1), "updates": len(trial.of("update")), "syncs": len(syncs),
        "sync_seconds": [event["seconds"] for event in syncs],
        "sync_bytes": syncs[-1]["bytes"] if syncs else 0, "same_version_difference": difference,
        "same_version_tokens": tokens, "killed": trial.killed[0] if trial.killed else None,
        "syncs_failed": [event["why"] for event in trial.of("sync_failed")],
        "success_before": _rates(trial.summary.get("success_before")),
        "success_after": _rates(trial.summary.get("success_after")),
    } | {name: trial.summary.get(name) for name in TOLD}  # fmt: skip


def _rates(success: Mapping[str, Mapping[str, object]] | None) -> dict[str, dict[str, object]]:
    """By decoding (greedy, sampled): the rate with its 95 % interval."""
    kept = ("mean", "low", "high", "episodes", "temperature")
    return {decoding: {name: one[name] for name in kept} for decoding, one in (success or {}).items()}
