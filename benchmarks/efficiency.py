"""What decoupling is worth, in simulated time: `python -m benchmarks.efficiency`.

The real coordinator, scheduler, curation and protocol messages, on a virtual clock; environments, replicas and the
trainer are timing models (`benchmarks.simulation.timings` has every number with its source). Coupled is batch-wise
sampling, synchronous training and all replicas updated at once; decoupled is DART's. Between them each of the three is
changed alone, on the paper's two set-ups. Then the same at 1,000 and 10,000 environments, with adaptive data curation,
and with a coupled baseline whose batch is as large as the cluster: it keeps more environments busy, and makes fewer and
larger updates. Writes results/efficiency.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.simulation.cluster import COUPLED, DECOUPLED, Schedule, SetUp, simulate
from benchmarks.simulation.timings import Timings
from dart.coordinator.summary import machine, software, write_json

RESULT = Path(__file__).parent / "results" / "efficiency.json"
KEPT = (
    "env_utilisation", "rollout_utilisation", "trainer_utilisation", "trained_actions_per_minute",
    "sampled_actions_per_minute", "trajectories", "env_steps", "updates", "trained", "dropped", "staleness",
    "infrastructure_failures", "train_seconds", "time", "real_seconds",
)  # fmt: skip
LARGE_HOURS = 2.0
"""Of 1,000 and more environments: a dozen episodes each."""
RATIOS = ("env_utilisation", "rollout_utilisation", "trained_actions_per_minute")
PAPER = {"env_utilisation": 5.5, "rollout_utilisation": 1.6, "trained_actions_per_minute": 1.9}

SYNC_FIGURE = SetUp("80 environments, 4 replicas", 80, 4)
FULL_RUN = SetUp("180 environments, 8 replicas", 180, 8)
LARGER_TRAINER = replace(FULL_RUN, name="180 environments, 8 replicas, 16 training GPUs")
TRAINING_GPUS = {LARGER_TRAINER.name: 16}
"""Where it is not the paper's 8."""
LADDER = {
    "coupled": COUPLED,
    "coupled, but task-wise sampling": replace(COUPLED, sampling="task"),
    "coupled, but roll-out-wise sampling": replace(COUPLED, sampling="rollout"),
    "coupled, but asynchronous training": replace(COUPLED, training="asynchronous"),
    "coupled, but rolling sync": replace(COUPLED, sync="rolling"),
    "decoupled, but batch-wise sampling": replace(DECOUPLED, sampling="batch"),
    "decoupled, but synchronous training": replace(DECOUPLED, training="synchronous"),
    "decoupled, but all-replica sync": replace(DECOUPLED, sync="all"),
    "decoupled": DECOUPLED,
}


def filled(set_up: SetUp) -> SetUp:
    """A batch of at least as many roll-outs as there are environments."""
    groups = -(-set_up.environments // set_up.rollouts)
    return replace(set_up, trajectories_per_update=groups * set_up.rollouts)


def scaled(environments: int) -> tuple[SetUp, Timings]:
    """The larger trainer's set-up with so many environments, and replicas, trainer and batch grown with them."""
    times = environments / FULL_RUN.environments
    return (
        replace(
            FULL_RUN,
            name=f"{environments:,} environments",
            environments=environments,
            replicas=round(FULL_RUN.replicas * times),
            trajectories_per_update=round(FULL_RUN.trajectories_per_update * times / 8) * 8,
            tasks=max(FULL_RUN.tasks, 1000),
        ),
        _timings(16 * times),
    )


def _timings(training_gpus: float) -> Timings:
    """`timings` is of 8 training GPUs; more share an update's steps."""
    timings = Timings()
    seconds = timings.trainer.seconds_per_step * 8 / training_gpus
    return replace(timings, trainer=replace(timings.trainer, seconds_per_step=seconds))


def runs(hours: float) -> Iterator[tuple[str, SetUp, Schedule, Timings, float]]:
    """(rung, set-up, schedule, timings, hours)."""
    for set_up in (SYNC_FIGURE, FULL_RUN, LARGER_TRAINER):
        timings = _timings(TRAINING_GPUS.get(set_up.name, 8))
        for rung, schedule in LADDER.items():
            yield rung, set_up, schedule, timings, hours
        yield "coupled, with a batch that fills the environments", filled(set_up), COUPLED, timings, hours
        for rung in ("coupled", "decoupled"):
            curated = replace(set_up, curation=True)
            yield f"{rung}, with curation", curated, LADDER[rung], timings, hours
    for environments in (1000, 10_000):
        set_up, timings = scaled(environments)
        for rung in ("coupled", "decoupled"):
            yield rung, set_up, LADDER[rung], timings, min(hours, LARGE_HOURS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=6.0, help="of cluster time in each run")
    parser.add_argument("--only", default="", help="set-ups whose name contains this")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # every desktop that fails would be told
    results: list[dict[str, Any]] = []
    for rung, set_up, schedule, timings, hours in runs(options.hours):
        if options.only not in set_up.name:
            continue
        summary = simulate(set_up, schedule, timings, hours)
        row = {"set_up": set_up.name, "rung": rung, "hours": hours} | {name: summary[name] for name in KEPT}
        results.append(row)
        print(json.dumps({name: row[name] for name in ("set_up", "rung", *RATIOS, "real_seconds")}), flush=True)
    for row in results:
        like = "coupled, with curation" if row["rung"].endswith("with curation") else "coupled"
        if base := next((one for one in results if one["set_up"] == row["set_up"] and one["rung"] == like), None):
            row["over_coupled"] = {name: round(row[name] / base[name], 2) for name in RATIOS if base[name]}
    write_json(
        RESULT,
        {
            "name": "efficiency",
            "real_or_simulated": "simulated time: the real coordinator; environments, replicas, trainer are models",
            "machine": machine(),
            "versions": software(),
            "date": time.strftime("%Y-%m-%d"),
            "results": {"paper": PAPER, "timings": asdict(Timings()), "runs": results},
        },
    )
    show(results)
    print(RESULT)


def show(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("set-up", "schedule", "environments", "replicas", "trainer", "actions/min trained", "over coupled")
    for row in results:
        over = row.get("over_coupled", {})
        table.add_row(
            row["set_up"], row["rung"], f"{row['env_utilisation']:.1%}", f"{row['rollout_utilisation']:.1%}",
            f"{row['trainer_utilisation']:.1%}", f"{row['trained_actions_per_minute']:.1f}",
            " ".join(f"{over[name]:.1f}×" for name in RATIOS if name in over),
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
