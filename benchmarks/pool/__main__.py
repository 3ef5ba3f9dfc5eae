"""What a managed pool of VMs gains: `python -m benchmarks.pool`, in simulated time.

180 VMs of desktops on 18 env workers boot in the background and are offered when they are ready, or each Reset boots
its own, as a worker without a pool would do it; a third arm has one spare VM for each worker. 1 % of the episodes hang
and 5 % of the set-ups fail. `benchmarks.pool.arms` says what is real. Runs of the same seed share the order of tasks.
Finished runs are kept, so it can be stopped and started again; --anew discards them. Runs with other timings or of
another length are not continued. Writes results/pool.json, whose date and machine are those of the newest run.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from typing import Any

from benchmarks import efficiency
from benchmarks.pool import arms, results
from benchmarks.results import write
from benchmarks.simulation.desktops import Desktops, Options
from benchmarks.simulation.timings import Timings
from dart.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="cluster time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5), help="a run of each arm for each")
    parser.add_argument("--trainer", type=int, choices=arms.PLAN, help="only with so many training GPUs")
    parser.add_argument("--anew", action="store_true", help="discard the runs of earlier calls")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # otherwise every failed set-up is logged
    try:
        rows = {} if options.anew else _known(options.hours)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    for seed in options.seeds:
        for trainer in [options.trainer] if options.trainer else arms.PLAN:
            for arm in arms.PLAN[trainer]:
                place = (trainer, arm.name, seed, options.hours)
                if place in rows:
                    continue
                rows[place] = row = arms.run(arm, trainer, seed, options.hours)
                print(f"{trainer} GPUs, {arm.name}, seed {seed}: {row['useful']:.1%} useful", flush=True)
                _write(list(rows.values()))
    print(results.RESULT)


def _known(hours: float) -> dict[tuple[int, str, int, float], dict[str, Any]]:
    """The runs of earlier calls. Raises UserError for those that this call would silently lose."""
    known = efficiency.earlier(results.RESULT, _assumed())
    if other := sorted({row["hours"] for row in known} - {hours}):
        raise UserError(
            f"{results.RESULT} has runs of {other[0]:g} h, and with --hours {hours:g} they would be lost: give --hours "
            f"{other[0]:g}, or move the file away, or discard it with --anew"
        )
    return {_identity(row): row for row in known}


def _assumed() -> dict[str, Any]:
    return {
        "timings": asdict(Timings()),
        "world": Options().model_dump(exclude={"seed", "boots_in"}),
        "timeouts": asdict(Desktops.timeouts),
    }


def _identity(row: dict[str, Any]) -> tuple[int, str, int, float]:
    return row["training_gpus"], row["arm"], row["seed"], row["hours"]


def _write(rows: list[dict[str, Any]]) -> None:
    names = [arm.name for planned in arms.PLAN.values() for arm in planned]
    ordered = sorted(rows, key=lambda row: (-row["training_gpus"], names.index(row["arm"]), row["seed"]))
    write(
        results.RESULT,
        "pool",
        "simulated time: the real coordinator and the real env worker's role; VMs, replicas, "
        "trainer and streams are models",
        _assumed() | {"summary": results.summaries(ordered), "runs": ordered},
    )


if __name__ == "__main__":
    main()
