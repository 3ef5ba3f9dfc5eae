"""What decoupling is worth with every part real: `python -m benchmarks.efficiency_real`.

Runs the ladder of `benchmarks.efficiency` with `dart train`: real Chromium, vLLM, trainer and weight sync, on this
machine. One thing is artificial: environments sleep after each reset and action (`environment.delay` in
configs/efficiency_real.yaml), because a MiniWoB page answers in milliseconds and a desktop does not. A run takes
four minutes (the config's `stop`); the script can be stopped and started again (`benchmarks.trials.sweep`), but a run
that was interrupted has the utilisation and the throughput of its last piece alone: the report names it. Writes
results/efficiency_real.json.

On a GPU machine, give --config a config of your own: the schedules are applied to it, and the results carry its name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks import report
from benchmarks.efficiency import LADDER, file_name
from benchmarks.simulation.full_hd.pages import RATIOS
from benchmarks.trials import findings, sweep
from benchmarks.trials.inference import estimate
from benchmarks.trials.protocol import config_digest
from benchmarks.trials.records import Record
from benchmarks.trials.sweep import Plan
from dart.errors import UserError

CONFIG = Path("configs/efficiency_real.yaml")
Shown = Literal[
    "env_utilisation", "rollout_utilisation", "trainer_utilisation", "trained_actions_per_minute",
    "sampled_actions_per_minute",
]  # fmt: skip
SHOWN: tuple[Shown, ...] = get_args(Shown)
COLUMNS = ("env_utilisation", "rollout_utilisation", "trainer_utilisation", "trained_actions_per_minute", "success")
"""Of the table that the command prints."""


def rungs() -> dict[str, tuple[str, ...]]:
    """Overrides of each rung of the ladder, by a name that files can have."""
    return {
        file_name(rung): (
            f"schedule.sampling={schedule.sampling}",
            f"schedule.training={schedule.training}",
            f"schedule.sync={schedule.sync}",
        )
        for rung, schedule in LADDER.items()
    }


def last_success(run: Record) -> float:
    """Success in training at the end."""
    return run["curve"][-1].success


def last_update_seconds(run: Record) -> float:
    """Seconds of training until the last update; all of them, if there was none."""
    return run.get("last_update_seconds", run["train_seconds"])


def actions_trained_on(run: Record) -> float:
    """Per minute until the last update. A batch that is not complete when the clock stops counts for nothing, and the
    time that it took would make the schedule with the larger share of unfinished work look slower than it is."""
    return run["trained_actions_per_minute"] * run["train_seconds"] / last_update_seconds(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each rung")
    parser.add_argument("--rungs", default="coupled,decoupled", help="names, separated by commas; all: all of them")
    parser.add_argument("--report", action="store_true", help="run nothing; write the table of the finished runs")
    options = parser.parse_args()
    results, known = options.config.stem, rungs()
    wanted = list(known) if options.rungs == "all" else options.rungs.split(",")
    if unknown := set(wanted) - set(known):
        parser.error(f"--rungs {', '.join(sorted(unknown))}: known are all, {', '.join(known)}")
    seeds, marks = range(options.seeds), {"config_sha256": config_digest(options.config)}
    try:
        if not options.report:
            sweep.run_missing(Plan(results, options.config, {name: known[name] for name in wanted}, seeds, marks))
        runs = sweep.finished(Plan(results, options.config, known, seeds, marks))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    if not runs:
        parser.error("no run is finished yet: leave --report out")
    rows = [_row(name, list(made.values())) for name, made in runs.items()]
    if base := next((row for row in rows if row["rung"] == "coupled"), None):
        for row in rows:
            row["over_coupled"] = {field: round(row[field] / base[field], 2) for field in RATIOS if base[field]}
    slept = f"{sweep.REAL}; environments sleep after resets and actions (environment.delay in {options.config.name})"
    notes = findings.notes(runs)
    print(sweep.write(results, options.config, {"runs": rows, "notes": notes}, slept))
    show(rows)
    for note in notes:
        print(f"NOTE: {note}")


def _row(rung: str, runs: Sequence[Record]) -> dict[str, Any]:
    """Means over an arm's runs; `half_width`: of their 95 % t-intervals, empty with a single run. `time`: of the first
    run."""
    each = {field: estimate([run[field] for run in runs]) for field in SHOWN} | {
        "trained_actions_per_minute": estimate([actions_trained_on(run) for run in runs]),
        "success": estimate([last_success(run) for run in runs]),
    }
    half_widths = {field: one.half_width for field, one in each.items()}
    return {
        "rung": rung,
        "runs": len(runs),
        **{field: round(one.mean, 4) for field, one in each.items()},
        "half_width": {field: round(half, 4) for field, half in half_widths.items() if half is not None},
        "time": runs[0]["time"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("schedule", "runs", "environments", "replicas", "trainer", "actions/min", "success", "over coupled")
    for row in rows:
        over = row.get("over_coupled", {})
        table.add_row(
            row["rung"], str(row["runs"]), *(report.with_interval(row, field) for field in COLUMNS),
            " ".join(f"{over[name]:.1f}×" for name in RATIOS if name in over),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
