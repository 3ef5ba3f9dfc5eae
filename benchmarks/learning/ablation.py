"""What each piece of adaptive data curation is worth on the ladder: `python -m benchmarks.learning.ablation`.

Runs protocols/ablation.yaml: the whole algorithm, none of it, and the algorithm without the dynamic number, the dynamic
length or the experience pool, five seeds each, 12,000 environment steps a run. Everything is real: Chromium, vLLM,
trainer and weight sync on this machine. First the base policy is evaluated on the held-out instances, and the
protocol's gates are checked on training seeds; nothing runs if they fail.

Two runs at a time, in pieces of six minutes; on two cores about a quarter of an hour of training per run and as long
again for its two evaluations, so five to seven hours for all 25. It can be stopped at any moment (Ctrl-C, kill -9) and
started again; --minutes ends it by itself. --report makes the table and the picture of what is there. Writes
results/learning/ablation.json and ablation.png.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.trials import findings, showing, sweep
from benchmarks.trials.base import base_row, base_success, check_gates, has_base
from benchmarks.trials.protocol import FOLDER, Protocol, check_committed, load, marks
from benchmarks.trials.sweep import Patience, Plan
from dart.errors import UserError

PROTOCOL = FOLDER / "ablation.yaml"


def main(path: Path = PROTOCOL, doc: str | None = __doc__) -> None:
    options = arguments(doc)
    try:
        _run(path, options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def arguments(doc: str | None) -> argparse.Namespace:
    """The options that all experiments have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="begin no piece of a run after this long")
    parser.add_argument("--jobs", type=int, help="runs at a time [default: the protocol's]")
    parser.add_argument("--report", action="store_true", help="run nothing; table and picture of the finished runs")
    return parser.parse_args()


def plan_of(path: Path, protocol: Protocol, jobs: int | None = None, *, controls: bool = False) -> Plan:
    """The protocol's arms as a plan; with `controls`, its controls instead."""
    arms = protocol.controls if controls else protocol.arms
    return Plan(
        f"learning/{protocol.name}",
        protocol.config,
        {arm: protocol.overrides(arm) for arm in arms},
        protocol.seeds,
        marks(path, protocol),
        60 * protocol.piece_minutes if protocol.piece_minutes else None,
        jobs or protocol.jobs,
    )


def with_pool(plan: Plan, protocol: Protocol) -> Plan:
    """The plan with the oracle's successes in the pool, which are collected first if they are not there."""
    if not protocol.pool_successes:
        return plan
    pool = sweep.oracle_pool(plan, protocol.pool_successes)
    arms = {arm: (*overrides, pool) for arm, overrides in plan.arms.items()}
    return replace(plan, arms=arms)


def _run(path: Path, options: argparse.Namespace) -> None:
    protocol = load(path, Protocol)
    plan = plan_of(path, protocol, options.jobs)
    if not options.report:
        check_committed(path)
        patience = Patience(options.minutes)
        check_gates(plan, protocol)
        base_success(plan, protocol)
        sweep.run_missing(with_pool(plan, protocol), patience)
    report(plan, protocol)


def report(plan: Plan, protocol: Protocol) -> None:
    """Table, results file and picture of the runs that have finished. Raises UserError if none has."""
    runs, missing = sweep.finished(plan), sweep.missing(plan)
    if not runs:
        raise UserError("no run is finished yet: leave --report out")
    rows = findings.arm_rows(runs, protocol)
    base = [base_row(base_success(plan, protocol), protocol)] if has_base(plan) else []
    showing.show_arms([*base, *rows], protocol.name)
    showing.show_findings(findings.findings(runs, protocol), protocol.reference)
    showing.say_if_incomplete(missing, len(plan.arms) * len(plan.seeds))
    results = {**findings.as_json(runs, protocol, missing), "base": asdict(base[0])["endpoints"] if base else None}
    print(sweep.write(plan.name, plan.config, {**plan.marks, **results}))
    picture = sweep.RESULTS / f"{plan.name}.png"
    print(showing.draw(picture, runs, protocol, lambda point: point.env_steps, "environment steps"))


if __name__ == "__main__":
    main()
