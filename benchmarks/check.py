"""Has something become slower? `make bench-check` compares the cheap benchmarks with their recorded values.

It compares only ratios, each taken within one run, because machines differ and are noisy, and a check fails only on
a clear drop. Simulated time has no noise, so there even a small drop is clear. `--record` rewrites results/check.json:
use it after an intended change, and commit both together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import decisions, efficiency, step_path
from benchmarks.results import write
from benchmarks.simulation.cluster import simulate
from benchmarks.simulation.full_hd.pages import RATIOS
from benchmarks.simulation.timings import Timings

RECORD = Path(__file__).parent / "results" / "check.json"
SIMULATED_HOURS = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """`least`: the share of the recorded value below which the check fails; a cost may grow by 1/`least`."""

    name: str
    value: float
    least: float
    higher_is_better: bool = True

    def dropped(self, recorded: float) -> bool:
        worse = self.value / recorded if self.higher_is_better else recorded / self.value
        return worse < self.least


def measure() -> list[Check]:
    made = []
    paths = uvloop.run(step_path.measure(3.0, 64))
    made += [Check(f"step path over raw gRPC, {name}", row["ratio_to_raw"], 0.4) for name, row in paths.items()]
    small, large = (asyncio.run(decisions.decide(*size, 4000)) for size in (decisions.SIZES[0], decisions.SIZES[-1]))
    for name in ("begin", "finish", "route"):
        growth = large[name]["p50"] / small[name]["p50"]
        made.append(Check(f"decision to {name} at 10,000 environments over 100", round(growth, 2), 0.4, False))
    rungs = [
        simulate(efficiency.SYNC_FIGURE, efficiency.LADDER[rung], Timings(), SIMULATED_HOURS)
        for rung in ("decoupled", "coupled")
    ]
    for name in RATIOS:
        made.append(
            Check(f"decoupled over coupled, simulated, {name}", round(rungs[0][name] / rungs[1][name], 3), 0.95)
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record these values for later comparisons")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    checks = measure()
    if options.record:
        _record(checks)
        return
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["results"]
    missing = [check.name for check in checks if check.name not in recorded]
    if missing:
        sys.exit(f"{RECORD} has no {', '.join(missing)}: record it again with --record")
    dropped = [check for check in checks if check.dropped(recorded[check.name])]
    for check in checks:
        mark = "DROPPED" if check in dropped else "ok"
        print(f"{mark:8s}{check.name:60s} {check.value:8.3f}, recorded {recorded[check.name]:.3f}")
    if dropped:
        sys.exit(f"{len(dropped)} of {len(checks)} checks are clearly worse")


def _record(checks: list[Check]) -> None:
    results: dict[str, Any] = {check.name: check.value for check in checks}
    write(
        RECORD,
        "check",
        "ratios of short runs of other benchmarks, which say what of them is real",
        results,
    )
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
