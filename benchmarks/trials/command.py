"""The command of all experiments: run what is missing, then report. An experiment adds what only it measures."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic

from benchmarks.trials import findings, once, pages, showing, sweep
from benchmarks.trials.base import base_success, check_gates, endpoints, has_base
from benchmarks.trials.findings import Runs
from benchmarks.trials.protocol import FOLDER, P, Protocol, check_committed, load, marks
from benchmarks.trials.records import Point, Progress
from benchmarks.trials.sweep import Patience, Plan
from dart.core.json_text import JSON
from dart.errors import UserError

PIECE_MINUTES = 30.0


def env_steps(point: Point) -> float:
    return point.env_steps


def nothing(runs: Runs, protocol: Protocol) -> dict[str, JSON]:
    return {}


@dataclass(frozen=True, slots=True)
class Experiment(Generic[P]):
    """`by`, `label`: the axis that learning curves are drawn over. `measure`: further results; `tables`: of all of it.

    `path`: the protocol, unless --protocol names another.
    """

    path: Path
    kind: type[P]
    doc: str | None
    by: Callable[[Point], float] = env_steps
    label: str = "environment steps"
    measure: Callable[[Runs, P], Mapping[str, JSON]] = nothing
    tables: Sequence[Callable[[pages.Results], pages.Table]] = (pages.arms, pages.comparisons)
    over: Callable[[Progress, P], bool] | None = None
    """Whether a run has what is wanted of it, and need not go on."""


def main(experiment: Experiment[P]) -> None:
    options = arguments(experiment.doc, experiment.path)
    path: Path = options.protocol
    try:
        protocol = load(path, experiment.kind)
        plan = plan_of(path, protocol, options.jobs, options.piece_minutes)
        if (over := experiment.over) is not None:
            plan = replace(plan, over=lambda run: over(run, protocol))
        if not options.report:
            run(path, chosen(plan, options.arms), protocol, Patience(options.minutes))
        report(experiment, plan, protocol)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def arguments(doc: str | None, protocol: Path | None = None) -> argparse.Namespace:
    """The command's options. `protocol`: the experiment's own, which --protocol replaces; None: without that option."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if protocol is not None:
        parser.add_argument(
            "--protocol", type=named_protocol, default=protocol, metavar="NAME",
            help=f"another protocol for this experiment, of those in learning/protocols [default: {protocol.stem}]",
        )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="begin no piece of a run after this long")
    parser.add_argument("--jobs", type=int, help="runs at a time [default: the protocol's]")
    parser.add_argument(
        "--piece-minutes", type=_above_0, help=f"interrupt and resume a run after this long [default: {PIECE_MINUTES}]"
    )
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="make the runs of these arms alone [default: of all]")
    parser.add_argument("--report", action="store_true", help="run nothing; table and picture of the finished runs")
    return parser.parse_args()


def named_protocol(name: str) -> Path:
    """Raises ArgumentTypeError, which argparse reports."""
    if not (path := FOLDER / f"{name}.yaml").is_file():
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.yaml")))
        raise argparse.ArgumentTypeError(f"{name} is no protocol: write one of {known}")
    return path


def _above_0(text: str) -> float:
    """Raises ArgumentTypeError, which argparse reports."""
    with contextlib.suppress(ValueError):
        if 0 < (minutes := float(text)) < math.inf:
            return minutes
    raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")


def plan_of(
    path: Path,
    protocol: Protocol,
    jobs: int | None = None,
    piece_minutes: float | None = None,
    *,
    controls: bool = False,
) -> Plan:
    """The protocol's arms as a plan; with `controls`, its controls instead. `piece_minutes`: none: as by default.

    Raises UserError for a length of pieces, or a number of jobs, that would bias the runs.
    """
    if protocol.piece_minutes is None and piece_minutes is not None:
        raise UserError(
            f"--piece-minutes {piece_minutes:g}: a restart would bias runs of {protocol.name}, so they are not made in "
            "pieces: leave it out"
        )
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs {jobs}: at least one run is made at a time, so give 1 or more")
    if protocol.piece_minutes is None and jobs not in (None, protocol.jobs):
        raise UserError(
            f"--jobs {jobs}: runs of {protocol.name} are made {protocol.jobs} at a time, because others beside them "
            "would slow them down, and no result would say so: leave it out"
        )
    arms = protocol.controls if controls else protocol.arms
    return Plan(
        f"learning/{protocol.name}",
        protocol.config,
        {arm: protocol.overrides(arm) for arm in arms},
        protocol.seeds,
        marks(path, protocol),
        None if protocol.piece_minutes is None else 60 * (piece_minutes or PIECE_MINUTES),
        jobs or protocol.jobs,
    )


def chosen(plan: Plan, arms: Sequence[str] | None) -> Plan:
    """The plan with these arms alone; None: with all. Raises UserError for an arm that it does not have."""
    if arms is None:
        return plan
    if unknown := sorted(set(arms) - plan.arms.keys()):
        raise UserError(
            f"--arms {' '.join(unknown)}: {plan.name} has no such arm: write some of {', '.join(plan.arms)}"
        )
    return replace(plan, arms={arm: plan.arms[arm] for arm in plan.arms if arm in arms})


def run(path: Path, plan: Plan, protocol: Protocol, patience: Patience) -> None:
    """Check the gates, evaluate the base policy, fill the pool, and make the missing runs, as far as patience goes."""
    prepare(path, plan, protocol)
    if protocol.pool_successes:
        pool = once.oracle_pool(plan, protocol)
        plan = replace(plan, arms={arm: with_pool(overrides, pool) for arm, overrides in plan.arms.items()})
    with once.alone(plan.half_made / "sweep"):  # a second one would slow timed runs down, and make runs twice
        sweep.run_missing(plan, patience)


def with_pool(overrides: Sequence[str], pool: Path) -> tuple[str, ...]:
    """An arm's overrides, with the oracle's successes in its experience pool unless it names sources itself."""
    return (f"curation.pool.sources=[{pool}]", *(one.replace("{pool}", str(pool)) for one in overrides))


def prepare(path: Path, plan: Plan, protocol: Protocol) -> None:
    """What has to hold before the first run. Raises UserError."""
    check_committed(path)
    check_gates(plan, protocol)
    if protocol.primary:
        base_success(plan, protocol)


def report(experiment: Experiment[P], plan: Plan, protocol: P) -> None:
    """Table, results file and picture of the runs that have finished. Raises UserError if none has."""
    runs, missing = sweep.finished(plan), sweep.missing(plan)
    if not runs:
        raise UserError("no run is finished yet: leave --report out")
    base = endpoints(base_success(plan, protocol), protocol) if has_base(plan, protocol) else None
    results = {
        **findings.as_json(runs, protocol, missing),
        "base": None if base is None else {name: asdict(one) for name, one in base.items()},
        **experiment.measure(runs, protocol),
    }
    for table in experiment.tables:
        showing.show(table(json.loads(json.dumps(results))))
    print(sweep.write(plan.name, plan.config, {**plan.marks, **results}))
    picture = sweep.RESULTS / f"{plan.name}.png"
    print(showing.draw(picture, runs, protocol, experiment.by, experiment.label))
