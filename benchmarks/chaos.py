"""Seeded faults in simulated runs: `python -m benchmarks.chaos --faults 20000`.

Each run is the real coordinator with its real store on a virtual clock: forty environments, four replicas, a trainer,
and a fault about every twenty seconds, of any class in `benchmarks.simulation.faults.plan`. What must hold: a run ends
only through a fault that ends its coordinator; after the last of them `--resume` makes an update within an hour;
nothing that was stored is lost, doubled or trained on twice, whichever process looks; a run that stalls reports it, and
names a worker at fault; no worker takes a live one's place; what is healthy gets its share of the work done (both
rules: `benchmarks.simulation.faults.harm`). One seed is run twice, and must make the same decisions. Writes
results/chaos.json: the faults by class, and the seconds from a fault's end to the next update (none where a restart cut
the fault short).

Exits with 1 if anything was wrong, and prints the command that replays each seed concerned.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.simulation.faults.chaos import Outcome, chaos, undisturbed
from benchmarks.simulation.faults.harm import Curve
from benchmarks.simulation.faults.plan import Fault, plan
from benchmarks.simulation.timings import Timings
from dart.coordinator.summary import machine, write_json

RESULT = Path(__file__).parent / "results" / "chaos.json"


CURVE_HOURS = 0.5


def one(seed: int, hours: float, gap_seconds: float, curve: Curve) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return chaos(seed, plan(seed, hours, gap_seconds), hours, Path(folder), Timings(), curve=curve)


def replays(wrong: Iterable[int], hours: float, gap_seconds: float) -> list[str]:
    """The commands that run these seeds again, each alone."""
    rest = f"--faults 1 --hours {hours:g} --gap-seconds {gap_seconds:g}"
    return [f"replay with: python -m benchmarks.chaos --seed {seed} {rest}" for seed in wrong]


def table(outcomes: list[Outcome]) -> dict[str, object]:
    """Fault class → number of faults, and the time to recover."""
    counts: Counter[Fault] = Counter()
    recoveries: dict[Fault, list[float]] = defaultdict(list)
    for outcome in outcomes:
        counts.update(outcome.faults)
        for fault, seconds in outcome.recoveries.items():
            recoveries[fault] += seconds
    made: dict[str, object] = {}
    for fault in Fault:
        times = sorted(recoveries[fault])
        row: dict[str, object] = {"faults": counts[fault]}
        if times:
            row |= {"recovered": len(times), "p50_seconds": round(times[len(times) // 2], 1),
                    "p99_seconds": round(times[int(len(times) * 0.99)], 1)}  # fmt: skip
        made[str(fault)] = row
    return made


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20_000, help="minimum number of faults over all runs")
    parser.add_argument("--hours", type=float, default=2.0, help="virtual hours of each run")
    parser.add_argument("--gap-seconds", type=float, default=20.0, help="average time between two faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run; each further run adds 1")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcomes: list[Outcome] = []
    began = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        curve = undisturbed(CURVE_HOURS, Path(folder), Timings())
    while sum(outcome.faults.total() for outcome in outcomes) < choices.faults:
        outcome = one(choices.seed + len(outcomes), choices.hours, choices.gap_seconds, curve)
        outcomes.append(outcome)
        print(
            f"seed {outcome.seed}: {outcome.faults.total()} faults, {outcome.resumes} resumes, "
            f"{outcome.trajectories} trajectories (the healthy time is worth {outcome.worth:.0f}), "
            f"{outcome.updates} updates; wrong: {outcome.wrong or 'nothing'}",
            flush=True,
        )
    again = one(choices.seed, choices.hours, choices.gap_seconds, curve)
    result = {
        "machine": machine(),
        "simulated": "environments, replicas, trainer and network; the coordinator, its store and sessions are real",
        "runs": len(outcomes),
        "seeds": [choices.seed, choices.seed + len(outcomes) - 1],
        "virtual_hours": choices.hours * len(outcomes),
        "real_seconds": round(time.perf_counter() - began[0], 1),
        "cpu_seconds": round(time.process_time() - began[1], 1),
        "faults": sum(outcome.faults.total() for outcome in outcomes),
        "resumes": sum(outcome.resumes for outcome in outcomes),
        "trajectories": sum(outcome.trajectories for outcome in outcomes),
        "updates": sum(outcome.updates for outcome in outcomes),
        "worth_of_the_healthy_time": round(sum(outcome.worth for outcome in outcomes)),
        "stalls": sum(len(outcome.stalls) for outcome in outcomes),
        "replayed_to_the_same_decisions": again.decisions == outcomes[0].decisions,
        "wrong": {str(outcome.seed): outcome.wrong for outcome in outcomes if outcome.wrong},
        "by_class": table(outcomes),
    }
    write_json(choices.out, result)
    print(json.dumps(result, indent=2))
    wrong = {outcome.seed for outcome in outcomes if outcome.wrong}
    if again.decisions != outcomes[0].decisions:
        print(f"seed {choices.seed} made other decisions when it was replayed")
        wrong.add(choices.seed)
    print("\n".join(replays(sorted(wrong), choices.hours, choices.gap_seconds)) or "nothing was wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
