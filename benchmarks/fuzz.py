"""What if a worker says anything at all? `python -m benchmarks.fuzz --mutations 200000`.

Simulated training runs with the real coordinator, where eight env workers and eight replicas have one message after
another changed (`benchmarks.simulation.mutations`): every field of every reply and of Ready, at its bounds and
beyond. What must hold: the run goes on, no other worker is lost or put in quarantine, every other worker goes on
working, the event loop is never held for a second, and memory stays within 100 MB. Writes results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.simulation.fuzzing import Fuzzed, fuzz
from dart.coordinator.summary import machine, write_json

RESULT = Path(__file__).parent / "results" / "fuzz.json"
PER_RUN = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=200_000, help="At least so many, over all runs.")
    parser.add_argument("--seed", type=int, default=0, help="Of the first run; the next has the next.")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    logging.disable(logging.CRITICAL)
    runs: list[Fuzzed] = []
    began, process, memory = time.perf_counter(), psutil.Process(), 0
    while sum(run.mutations for run in runs) < choices.mutations:
        runs.append(fuzz(choices.seed + len(runs), PER_RUN))
        memory = memory or process.memory_info().rss  # after the first run: imports and caches are there
        print(f"seed {runs[-1].seed}: {runs[-1].mutations} mutations, wrong: {runs[-1].wrong or 'nothing'}", flush=True)
    fields: Counter[str] = Counter()
    for run in runs:
        fields.update(run.fields)
    result = {
        "machine": machine(),
        "simulated": "workers and network, on a virtual clock; the coordinator is real, its database keeps nothing",
        "runs": len(runs),
        "seeds": [choices.seed, choices.seed + len(runs) - 1],
        "real_seconds": round(time.perf_counter() - began, 1),
        "mutations": sum(run.mutations for run in runs),
        "fields_mutated": len(fields),
        "violations": sum(run.violations for run in runs),
        "runs_ended": sum(run.ended for run in runs),
        "longest_hold_of_the_loop_seconds": round(max(run.longest_hold for run in runs), 3),
        "memory_growth_mb": round((process.memory_info().rss - memory) / 1e6, 1),
        "wrong": {str(run.seed): run.wrong for run in runs if run.wrong},
    }
    write_json(choices.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
