"""Controls for the ablation: `python -m benchmarks.learning.controls`.

1. The controls of protocols/ablation.yaml, with the same base policy, seeds and evaluation as the ablation's arms: at
   the same environment steps imitation of the policy's own successes (best-of-n, rejection sampling fine-tuning), the
   whole algorithm with a pool that begins empty, and with GiGPO's advantages per step; and without any environment
   imitation of the successes that the pool begins with. Compared, paired by seed, with the ablation's `full` and `none`
   as far as those have run, and the algorithm without a gift (`own-pool`) with `without-pool` and with imitation of the
   policy's own successes, too.
2. The base policy on the held-out instances at temperatures 0, 0.2, 0.5 and 1: what lower temperatures give for
   nothing, which no training should be credited with.

Everything is real: Chromium, vLLM, trainer and weight sync on this machine. Twenty runs in pieces, some six hours on
two cores, and four evaluations of some minutes each; resumable as the ablation is. --report makes the tables of what is
there, which is incomplete as long as runs of `full` and `none` are missing, too. Writes
results/learning/controls.json.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import fmean

from benchmarks.trials import base, command, findings, pages, showing, sweep
from benchmarks.trials.findings import Finding, Runs
from benchmarks.trials.protocol import FOLDER, Protocol, load
from benchmarks.trials.sweep import Patience, Plan
from dart.core.evaluation.documents import Success
from dart.errors import UserError

PROTOCOL = FOLDER / "ablation.yaml"
TEMPERATURES = (0.0, 0.2, 0.5, 1.0)
FULL, NONE, WITHOUT_POOL = "full", "none", "without-pool"
"""The ablation's arms that the controls are compared with."""
OWN, OWN_AGAINST = "own-pool", (NONE, WITHOUT_POOL, "imitation")
"""What the algorithm does without the oracle's successes is `OWN` minus these. `OWN` minus `WITHOUT_POOL`, what a pool
of its own successes is worth, is not in the protocol: it was added when imitation of the oracle's had turned out better
than `FULL`."""


def main() -> None:
    options = command.arguments(__doc__)
    try:
        protocol = load(PROTOCOL, Protocol)
        controls = command.plan_of(PROTOCOL, protocol, options.jobs, options.piece_minutes, controls=True)
        if not options.report:
            patience = Patience(options.minutes)
            command.prepare(PROTOCOL, controls, protocol)
            for temperature in TEMPERATURES:
                base.held_out(controls, protocol, temperature)
            command.run(PROTOCOL, command.chosen(controls, options.arms), protocol, patience)
        report(command.plan_of(PROTOCOL, protocol), controls, protocol)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def report(arms: Plan, controls: Plan, protocol: Protocol) -> None:
    """Tables and results file of what is there. `arms`: the ablation's. Raises UserError if there is nothing."""
    evaluated = [one for one in TEMPERATURES if base.has_held_out(controls, one)]
    at = {one: by_level(base.held_out(controls, protocol, one), protocol) for one in evaluated}
    runs: Runs = {**sweep.finished(controls), **sweep.finished(arms)}
    if not at and not any(arm in runs for arm in protocol.controls):
        raise UserError("nothing is finished yet: leave --report out")
    names = (*protocol.controls, NONE, WITHOUT_POOL, FULL)
    runs = {arm: runs[arm] for arm in names if arm in runs}
    missing = [*sweep.missing(controls), *((arm, seed) for arm, seed in sweep.missing(arms) if arm in names)]
    results = {
        "complete": not missing and len(at) == len(TEMPERATURES),
        "missing": [f"{arm}-{seed}" for arm, seed in missing],
        "notes": findings.notes(runs),
        "temperatures": {f"{temperature:g}": levels for temperature, levels in at.items()},
        "base": None,
        "arms": [asdict(row) for row in findings.arm_rows(runs, protocol)],
        "comparisons": [asdict(one) for one in comparisons(runs, protocol)],
    }
    for table in (pages.temperatures, pages.arms, pages.comparisons):
        showing.show(table(json.loads(json.dumps(results))))
    print(sweep.write("learning/controls", controls.config, {**controls.marks, **results}))


def by_level(success: Success, protocol: Protocol) -> dict[str, float]:
    """Level → the mean over its tasks; and over all tasks."""
    rates = success["per_task"]
    levels = {
        level: fmean(rates[task]["mean"] for task in protocol.tasks_of(level, tuple(rates)))
        for level in protocol.levels
    }
    return {**levels, "all": success["mean"]}


def comparisons(runs: Runs, protocol: Protocol) -> list[Finding]:
    """`full` and `none` minus each control, and the algorithm without a gift minus `none` and minus imitation of the
    policy's own successes; at every endpoint, without correction."""
    against = {
        FULL: tuple(protocol.controls),
        NONE: tuple(control for control in protocol.controls if control != OWN),  # the other way round below
        OWN: OWN_AGAINST,
    }
    return [
        one
        for reference, arms in against.items()
        for one in findings.findings(runs, protocol.model_copy(update={"reference": reference}), arms)
    ]


if __name__ == "__main__":
    main()
