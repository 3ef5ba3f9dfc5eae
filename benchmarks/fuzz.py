"""Mutated messages of workers against the real coordinator: `python -m benchmarks.fuzz --mutations 200000`.

Each run is the coordinator with its real store and session machines on a virtual clock, beside two honest env workers,
two honest replicas, and mutants of each that say something else than they should in four messages of ten; the trainer
does in two of ten. Every run is interrupted and resumed. What must hold: no run ends; no honest worker is lost, nor an
attempt on it; what is stored keeps the rules; the event loop is never held for a second; memory stays within 100 MB.
Writes results/fuzz.json: seeds and figures. A seed that fails is run again with `--seed SEED --mutations 1`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.simulation.fuzzing import Outcome, fuzz
from dart.coordinator.summary import machine, write_json

RESULT = Path(__file__).parent / "results" / "fuzz.json"
MUTATIONS_OF_A_RUN = 2_000
MOST_STALL_SECONDS, MOST_GROWTH_MB = 1.0, 100.0


def one(seed: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(seed, MUTATIONS_OF_A_RUN, Path(folder))


def resident_mb() -> float:
    """Memory that this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=200_000, help="At least so many, over all runs.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first run; the next has the next.")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every broken rule would be told
    began, outcomes, total = time.perf_counter(), [one(choices.seed)], Counter[str]()
    base, peak = resident_mb(), peak_mb()  # with everything loaded, and one run behind it
    while (done := sum(outcome.mutations.total() for outcome in outcomes)) < choices.mutations:
        outcome = one(choices.seed + len(outcomes))
        outcomes.append(outcome)
        for wrong in outcome.wrong:
            print(f"seed {outcome.seed}: {wrong}", flush=True)
        if len(outcomes) % 10 == 0:
            print(f"{done:,} mutations in {time.perf_counter() - began:.0f} s", flush=True)
    for outcome in outcomes:
        total.update(outcome.mutations)
    stalls = [outcome.longest_seconds for outcome in outcomes]
    results = {
        "seeds": [choices.seed, choices.seed + len(outcomes) - 1],
        "mutations": total.total(),
        "mutations_by_message": dict(total.most_common()),
        "runs": 2 * len(outcomes),
        "runs_ended": sum("the run ended" in wrong for outcome in outcomes for wrong in outcome.wrong),
        "seeds_that_failed": {str(outcome.seed): outcome.wrong for outcome in outcomes if outcome.wrong},
        "stalls_over_a_second": sum(seconds > MOST_STALL_SECONDS for seconds in stalls),
        "longest_hold_seconds": round(max(stalls), 3),
        "memory_growth_mb": round(resident_mb() - base, 1),
        "memory_peak_growth_mb": round(peak_mb() - peak, 1),
        "violations": sum(outcome.violations for outcome in outcomes),
        "quarantines": sum(outcome.quarantines for outcome in outcomes),
        "honest_trajectories": sum(outcome.honest_trajectories for outcome in outcomes),
        "updates": sum(outcome.updates for outcome in outcomes),
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_json(
        choices.out,
        {
            "name": "fuzz",
            "real_or_simulated": "real coordinator, store, boundary and session machines; simulated time, workers and "
            "streams; a hold is the processor's time that one message took",
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
            "results": results,
        },
    )
    for name, value in results.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
