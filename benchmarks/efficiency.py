"""What decoupling is worth, in simulated time: `python -m benchmarks.efficiency`.

The real coordinator, scheduler, curation and protocol messages, on a virtual clock; environments, replicas and the
trainer are timing models (`benchmarks.simulation.timings` has every number with its source). "Coupled" is batch-wise
sampling, synchronous training and all replicas updated at once; "decoupled" is DART's schedule. Between the two, each
of the three is changed alone, on the paper's two set-ups. Further runs have adaptive data curation; a coupled baseline
with a batch as large as the cluster, which keeps more environments busy and makes fewer and larger updates; smaller
and larger trainers; and 1,000 environments. The set-ups with "honest" in their names have timings derived
for full-HD screenshots (`benchmarks.simulation.full_hd`), and `--only honest` runs these alone. For two of these
timings there are other divisions of the same 16 GPUs: all of them sample and train in turn, or more than half of them
train. Finished runs are kept, so it can be stopped and started again; --anew discards them, with --only those of its
set-ups. Runs with other timings or of another length are not continued. Writes results/efficiency.json, whose date and
machine are those of the newest run.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.simulation.cluster import COUPLED, DECOUPLED, Schedule, SetUp, simulate
from benchmarks.simulation.full_hd.derived import NAMED
from benchmarks.simulation.full_hd.pages import RATIOS, SAME_GPUS
from benchmarks.simulation.timings import Timings
from dart.errors import UserError

RESULT = Path(__file__).parent / "results" / "efficiency.json"
KEPT = (
    "env_utilisation", "rollout_utilisation", "trainer_utilisation", "trained_actions_per_minute",
    "sampled_actions_per_minute", "trajectories", "env_steps", "updates", "trained", "dropped", "staleness",
    "infrastructure_failures", "train_seconds", "time", "real_seconds", "cpu_seconds",
)  # fmt: skip
IDENTITY = ("set_up", "rung", "hours")
LARGE_HOURS = {1000: 1.0}
"""Environments → hours at most: six episodes each. The first batch comes after a quarter of an episode."""

SYNC_FIGURE = SetUp("80 environments, 4 replicas", 80, 4)
FULL_RUN = SetUp("180 environments, 8 replicas", 180, 8)
"""180 environments are the paper's; 8 replicas of one GPU each, and the batch of 64 roll-outs, are ours."""
LARGER_TRAINERS = (12, 16, 18, 20, 24)
"""Numbers of training GPUs; the paper has 8."""
BALANCED = 18
"""About as many as 180 environments need."""
LARGE_STALENESS = 8
"""180 environments have three batches in flight, and three more wait while the trainer works on one."""
SPLITS = (10, 11, 12)
"""How many of `SAME_GPUS` train in the other divisions; the paper's 8 are half."""
CONTROLLED = ("honest-sliding", "honest-stride3-lora")
"""The timings with the dearest and the cheapest step that the other divisions are run with."""
FILLED = "coupled, with a batch that fills the environments"
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


def file_name(rung: str) -> str:
    """The rung's name in files and options of `efficiency_real`."""
    return rung.replace(", ", "-").replace(" ", "-")


def filled(set_up: SetUp) -> SetUp:
    """A batch of at least as many roll-outs as there are environments."""
    groups = -(-set_up.environments // set_up.rollouts)
    return replace(set_up, trajectories_per_update=groups * set_up.rollouts)


def with_trainer(gpus: int, named: str = "") -> SetUp:
    """The full run's environments and replicas, with a trainer of `gpus` GPUs. `named`: timings of `NAMED`."""
    name = f"180 environments, {gpus} training GPUs" + (f", {named}" if named else "")
    return replace(FULL_RUN, name=name, max_staleness=LARGE_STALENESS)


def in_turn(named: str) -> SetUp:
    """GPUs that sample and train in turn, the usual synchronous loop: each is a replica, and all of them train. Beside
    the weights' transfer, switching (loading and offloading weights, optimiser and caches) takes no time."""
    name = f"{SAME_GPUS} GPUs that sample and train in turn, {named}"
    return replace(with_trainer(SAME_GPUS, named), name=name, replicas=SAME_GPUS)


def divided(gpus: int, named: str) -> SetUp:
    """The same GPUs, of which so many train."""
    sample = SAME_GPUS - gpus
    return replace(
        with_trainer(gpus, named),
        name=f"{SAME_GPUS} GPUs, {sample} sample and {gpus} train, {named}",
        replicas=sample,
    )


def scaled(environments: int) -> tuple[SetUp, Timings]:
    """The balanced cluster with this many environments: replicas, trainer and batch grow with them."""
    times = environments / FULL_RUN.environments
    return (
        replace(
            with_trainer(BALANCED),
            name=f"{environments:,} environments",
            environments=environments,
            replicas=round(FULL_RUN.replicas * times),
            trajectories_per_update=round(FULL_RUN.trajectories_per_update * times / 8) * 8,
            tasks=max(FULL_RUN.tasks, 1000),
        ),
        timings_for(BALANCED * times),
    )


def timings_for(training_gpus: float, named: str = "") -> Timings:
    """The timings for this many training GPUs, which share an update's steps; the model is for 8."""
    timings = NAMED[named] if named else Timings()
    seconds = timings.trainer.seconds_per_step * 8 / training_gpus
    return replace(
        timings,
        trainer=replace(timings.trainer, seconds_per_step=seconds),
        sync=replace(timings.sync, at_once=max(timings.sync.at_once, round(training_gpus))),
    )


Planned = tuple[str, SetUp, Schedule, Timings, float]
"""(rung, set-up, schedule, timings, hours)."""


def _pair(set_up: SetUp, timings: Timings, hours: float) -> Iterator[Planned]:
    for rung in ("coupled", "decoupled"):
        curated = ", with curation" if set_up.curation else ""
        yield rung + curated, set_up, LADDER[rung], timings, hours


def runs(hours: float) -> Iterator[Planned]:
    """All runs, in the order of the table."""
    yield "decoupled, a day", SYNC_FIGURE, DECOUPLED, timings_for(8), 24.0
    for set_up, gpus in ((SYNC_FIGURE, 8), (with_trainer(BALANCED), BALANCED)):
        timings = timings_for(gpus)
        for rung, schedule in LADDER.items():
            yield rung, set_up, schedule, timings, hours
        yield FILLED, filled(set_up), COUPLED, timings, hours
        yield from _pair(replace(set_up, curation=True), timings, hours)
    for gpus in (8, *(gpus for gpus in LARGER_TRAINERS if gpus != BALANCED)):
        yield from _pair(with_trainer(gpus), timings_for(gpus), hours)
    for environments, longest in LARGE_HOURS.items():
        set_up, timings = scaled(environments)
        yield from _pair(set_up, timings, min(hours, longest))
    yield from _full_hd(hours)


def _full_hd(hours: float) -> Iterator[Planned]:
    """The part of `runs` with the timings of `NAMED`, and its controls."""
    for named in NAMED:
        for gpus in (8, BALANCED):
            set_up, timings = with_trainer(gpus, named), timings_for(gpus, named)
            yield from _pair(set_up, timings, hours)
            yield FILLED, filled(set_up), COUPLED, timings, hours
            if gpus == 8:
                fresher = replace(set_up, max_staleness=FULL_RUN.max_staleness)
                yield f"decoupled, at most {fresher.max_staleness} versions behind", fresher, DECOUPLED, timings, hours
            if gpus == 8 and named in CONTROLLED:
                yield from _pair(replace(set_up, curation=True), timings, hours)
    for named in CONTROLLED:
        set_up, timings = in_turn(named), timings_for(SAME_GPUS, named)
        yield "coupled", set_up, COUPLED, timings, hours
        yield FILLED, filled(set_up), COUPLED, timings, hours
        for gpus in SPLITS:
            yield "decoupled", divided(gpus, named), DECOUPLED, timings_for(gpus, named), hours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=6.0, help="cluster time of each run")
    parser.add_argument("--anew", action="store_true", help="discard the runs of earlier calls that this one makes")
    parser.add_argument("--only", default="", help="run only set-ups whose name contains this")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # otherwise every failing desktop is logged
    planned = list(runs(options.hours))
    places = [(set_up.name, rung, hours) for rung, set_up, _, _, hours in planned]
    try:
        rows = _known(places, options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    for place, (_, set_up, schedule, timings, hours) in zip(places, planned, strict=True):
        if place in rows or options.only not in set_up.name:
            continue
        summary = simulate(set_up, schedule, timings, hours)
        rows[place] = dict(zip(IDENTITY, place, strict=True)) | {name: summary[name] for name in KEPT}
        print(json.dumps({name: rows[place][name] for name in (*IDENTITY, *RATIOS, "real_seconds")}), flush=True)
        _write([rows[place] for place in places if place in rows])
    show([rows[place] for place in places if place in rows])
    print(RESULT)


def _known(places: list[tuple[str, str, float]], options: argparse.Namespace) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The runs of earlier calls that stay, by place. Raises UserError for those that this call would silently lose."""
    if options.anew and not options.only:
        return {}
    known = earlier(RESULT, _assumed(), tables=("named_timings",))
    known = [row for row in known if not (options.anew and options.only in row["set_up"])]
    rows = {_identity(row): row for row in known}
    if lost := [place for place in rows if place not in places]:
        set_up, rung, hours = lost[0]
        raise UserError(
            f"{RESULT} has {len(lost)} runs that --hours {options.hours:g} does not make (the first: {set_up}, {rung}, "
            f"{hours:g} h), and they would be lost: give the --hours that they were made with, or move the file away, "
            "or discard it with --anew alone"
        )
    return rows


def earlier(path: Path, assumed: Mapping[str, Any], tables: Collection[str] = ()) -> list[dict[str, Any]]:
    """The runs in a results file, none without one. `assumed`: what the file says of all of them, under `results`.
    `tables`: the names of what has an entry for each of several kinds of runs. The file may lack entries, because it
    has no run of a kind that is new.

    Raises UserError if they were made with something else: runs that differ in it must not stand in one table.
    """
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["results"]
    now = json.loads(json.dumps(assumed))

    def same(name: str) -> bool:
        was = found.get(name, {})
        return was == now[name] or (name in tables and was.items() <= now[name].items())

    if other := [name for name in now if not same(name)]:
        raise UserError(
            f"the runs in {path} were made with other {', '.join(other)}: restore what they were made with, or move "
            "the file away, or discard it with --anew alone"
        )
    made: list[dict[str, Any]] = found["runs"]
    return made


def _assumed() -> dict[str, Any]:
    return {
        "timings": asdict(Timings()),
        "named_timings": {name: asdict(timings) for name, timings in NAMED.items()},
    }


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in IDENTITY)


def _write(results: list[dict[str, Any]]) -> None:
    for row in results:
        like = "coupled, with curation" if row["rung"].endswith("with curation") else "coupled"
        if base := next((one for one in results if one["set_up"] == row["set_up"] and one["rung"] == like), None):
            row["over_coupled"] = {name: round(row[name] / base[name], 2) for name in RATIOS if base[name]}
    write(
        RESULT,
        "efficiency",
        "simulated time: the real coordinator; environments, replicas, trainer are models",
        _assumed() | {"runs": results},
    )


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
