"""Mutated messages of workers against the real coordinator: `python -m benchmarks.fuzz --mutations 200000`.

Each seed is a run that trains, its resumption, and a run that collects from a scripted oracle: the coordinator with its
real store and session machines on a virtual clock, beside two honest env workers, two honest replicas, and mutants of
each that say something else than they should in four messages of ten; the trainer does in three of ten. What must
hold: no run ends; no honest worker is lost, nor an attempt on it; what is stored keeps the rules; the event loop is
never held for a second; memory stays within 100 MB; every kind of message was mutated.
Writes results/fuzz.json: seeds, figures, and what is exempt and why. Ends with exit code 1 if anything does not hold,
and says what. A seed that fails is run again with `--seed SEED --mutations 1`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TypedDict

from benchmarks.results import write
from benchmarks.simulation.fuzzing import RUNS_OF_A_SEED, Outcome, fuzz
from benchmarks.simulation.memory import resident_mb
from benchmarks.simulation.mutants import EXEMPT, SAYS, missing

RESULT = Path(__file__).parent / "results" / "fuzz.json"
MUTATIONS_OF_A_RUN = 2_000
MOST_STALL_SECONDS, MOST_GROWTH_MB = 1.0, 100.0
REACHES_ALL = 20_000
"""So many mutations must have been of every kind of message; fewer may by chance have missed one."""


def one(seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(seed, MUTATIONS_OF_A_RUN, Path(folder))


class Results(TypedDict):
    seeds: list[int]
    mutations: int
    mutations_by_message: dict[str, dict[str, int]]
    """Role of the worker → kind of the message → how many were mutated."""
    never_mutated: list[str]
    exempt: dict[str, str]
    """Message → why it is not mutated."""
    runs: int
    runs_ended: int
    seeds_that_failed: dict[str, list[str]]
    stalls_over_a_second: int
    longest_hold_seconds: float
    memory_growth_mb: float
    most_mb_of_one_message: float
    violations: int
    quarantines: int
    honest_trajectories: int
    updates: int
    seconds: float
    processor_seconds: float
    mutations_per_processor_second: float


def what_failed(results: Results) -> list[str]:
    """What does not hold, a line each; empty if all is well."""
    failed = [f"seed {seed}: {wrong[0]}" for seed, wrong in results["seeds_that_failed"].items()]
    if results["stalls_over_a_second"]:
        failed.append(f"one message held the coordinator for {results['longest_hold_seconds']} s")
    for name in ("memory_growth_mb", "most_mb_of_one_message"):
        if results[name] > MOST_GROWTH_MB:
            failed.append(f"{name} is {results[name]}, and must be at most {MOST_GROWTH_MB:.0f}")
    if results["never_mutated"] and results["mutations"] >= REACHES_ALL:
        failed.append(f"never mutated: {', '.join(results['never_mutated'])}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=200_000, help="At least so many, over all runs.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first run; the next has the next.")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every broken rule would be told
    results = measure(choices.seed, choices.mutations)
    write(
        choices.out,
        "fuzz",
        "real coordinator, store, boundary and session machines; simulated time, workers and "
        "streams; a hold is the processor's time that one message took",
        results,
    )
    for name, value in results.items():
        print(f"{name}: {value}")
    if failed := what_failed(results):
        sys.exit("\n".join(failed))


def measure(seed: int, mutations: int) -> Results:
    """Seed after seed, until there are enough mutations."""
    began, processor, outcomes = time.perf_counter(), time.process_time(), [one(seed)]
    _tell(outcomes[0])
    base = resident_mb()  # with everything loaded, and one run behind it
    while (done := sum(outcome.mutations.total() for outcome in outcomes)) < mutations:
        outcomes.append(one(seed + len(outcomes)))
        _tell(outcomes[-1])
        if len(outcomes) % 10 == 0:
            print(f"{done:,} mutations in {time.perf_counter() - began:.0f} s", flush=True)
    total = Counter[tuple[str, str]]()
    for outcome in outcomes:
        total.update(outcome.mutations)
    stalls, spent = [outcome.longest_seconds for outcome in outcomes], time.process_time() - processor
    return {
        "seeds": [seed, seed + len(outcomes) - 1],
        "mutations": total.total(),
        "mutations_by_message": {
            role: {kind: total[role, kind] for kind in sorted(kinds) if (role, kind) not in EXEMPT}
            for role, kinds in SAYS.items()
        },
        "never_mutated": missing(total),
        "exempt": {f"{role} {kind}": why for (role, kind), why in EXEMPT.items()},
        "runs": RUNS_OF_A_SEED * len(outcomes),
        "runs_ended": sum("the run ended" in wrong for outcome in outcomes for wrong in outcome.wrong),
        "seeds_that_failed": {str(outcome.seed): outcome.wrong for outcome in outcomes if outcome.wrong},
        "stalls_over_a_second": sum(seconds > MOST_STALL_SECONDS for seconds in stalls),
        "longest_hold_seconds": round(max(stalls), 3),
        "memory_growth_mb": round(resident_mb() - base, 1),
        "most_mb_of_one_message": round(max(outcome.most_mb for outcome in outcomes), 1),
        "violations": sum(outcome.violations for outcome in outcomes),
        "quarantines": sum(outcome.quarantines for outcome in outcomes),
        "honest_trajectories": sum(outcome.honest_trajectories for outcome in outcomes),
        "updates": sum(outcome.updates for outcome in outcomes),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(spent, 1),
        "mutations_per_processor_second": round(total.total() / spent, 1),
    }


def _tell(outcome: Outcome) -> None:
    for wrong in outcome.wrong:
        print(f"seed {outcome.seed}: {wrong}", flush=True)


if __name__ == "__main__":
    main()
