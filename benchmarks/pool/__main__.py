"""What a managed pool of VMs gains: `python -m benchmarks.pool`, in simulated time.

180 VMs of desktops on 18 env workers boot in the background and are offered when they are ready, or each Reset boots
its own, as a worker without a pool would do it; a third arm has one spare VM for each worker. 1 % of the episodes hang
and 5 % of the set-ups fail. `benchmarks.pool.arms` says what is real. Runs of the same seed share the order of tasks.
Finished runs of the same length are kept, so it can be stopped and started again; --anew discards them. Writes
results/pool.json.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict
from typing import Any

from benchmarks.pool import arms, results
from benchmarks.simulation.desktops import Desktops, Options
from benchmarks.simulation.timings import Timings
from dart.coordinator.summary import machine, software, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="cluster time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5), help="a run of each arm for each")
    parser.add_argument("--trainer", type=int, choices=arms.PLAN, help="only with so many training GPUs")
    parser.add_argument("--anew", action="store_true", help="discard the runs of earlier calls")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # otherwise every failed set-up is logged
    known = [] if options.anew else [row for row in results.runs() if row["hours"] == options.hours]
    rows = {_identity(row): row for row in known}
    for seed in options.seeds:
        for trainer in [options.trainer] if options.trainer else arms.PLAN:
            for arm in arms.PLAN[trainer]:
                place = (trainer, arm.name, seed, options.hours)
                if place in rows:
                    continue
                rows[place] = row = arms.run(arm, trainer, seed, options.hours)
                print(f"{trainer} GPUs, {arm.name}, seed {seed}: {row['useful']:.1%} useful", flush=True)
                _write(list(rows.values()))
    _write(list(rows.values()))
    print(results.RESULT)


def _identity(row: dict[str, Any]) -> tuple[int, str, int, float]:
    return row["training_gpus"], row["arm"], row["seed"], row["hours"]


def _write(rows: list[dict[str, Any]]) -> None:
    names = [arm.name for planned in arms.PLAN.values() for arm in planned]
    ordered = sorted(rows, key=lambda row: (-row["training_gpus"], names.index(row["arm"]), row["seed"]))
    write_json(
        results.RESULT,
        {
            "name": "pool",
            "real_or_simulated": "simulated time: the real coordinator and the real env worker's role; VMs, replicas, "
            "trainer and streams are models",
            "machine": machine(),
            "versions": software(),
            "date": time.strftime("%Y-%m-%d"),
            "results": {
                "timings": asdict(Timings()),
                "world": Options().model_dump(exclude={"seed", "boots_in"}),
                "timeouts": asdict(Desktops.timeouts),
                "summary": results.summaries(ordered),
                "runs": ordered,
            },
        },
    )


if __name__ == "__main__":
    main()
