"""Does the coordinator's memory grow over days? `python -m benchmarks.endurance.growth --hours 48`.

Real: the coordinator with its sessions, curation, pool, housekeeping and database. Simulated: workers, network and
time, so that two days take a quarter of an hour. What a process holds is counted exactly, after a garbage collection:
Python's memory blocks, the objects among them by type, and the bytes that malloc has given out (protobuf's and
SQLite's are among them). The first quarter, in which caches fill, is left out. `soak` watches the resident memory of
the real processes, which also moves with fragmentation and with what the kernel counts as shared.

Writes results/growth.json. Exits with 1 if blocks or bytes grew by more than one per cent, and their slope's interval
does not contain 0.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.endurance.soak import Series, described
from benchmarks.simulation import virtual_time
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.coordinator.summary import machine, write_json
from dart.job import Train
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url

RESULT = Path(__file__).parents[1] / "results" / "growth.json"
SLOTS = 8
"""Environments of each env worker."""
READINGS = 96
GROWN = 0.01
"""A process whose memory grows by less than this share from the first quarter to the end counts as flat."""


@dataclass
class Growth:
    """What was read, by virtual hours."""

    blocks: Series = field(default_factory=Series)
    """Thousands of memory blocks of Python's allocator."""
    malloc: Series = field(default_factory=Series)
    """MB that malloc has given out."""
    early: Counter[str] = field(default_factory=Counter)
    """Objects that the garbage collector tracks, by type: the sum over the readings of the second quarter."""
    late: Counter[str] = field(default_factory=Counter)
    """The same over the last quarter. Sums, because what is kept of every reading would be counted by the next."""
    trajectories: int = 0
    updates: int = 0

    def read(self, number: int, readings: int, at: float) -> None:
        """`number`: of so many readings, from 0."""
        gc.collect()
        self.blocks.add(at, sys.getallocatedblocks() / 1000)
        self.malloc.add(at, _malloc_mb())
        if (into := {1: self.early, 3: self.late}.get(4 * number // readings)) is not None:
            into.update(sys.intern(f"{type(one).__module__}.{type(one).__qualname__}") for one in gc.get_objects())

    def most_grown(self) -> dict[str, float]:
        """Type → how many times as many there were in the last quarter as in the second, of the eight that gained
        most."""
        gained = sorted(self.late, key=lambda name: self.early[name] - self.late[name])
        return {name: round(self.late[name] / max(self.early[name], 1), 3) for name in gained[:8]}


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    ]  # fmt: skip


def _malloc_mb() -> float:
    mallinfo: Any = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return float(found.uordblks + found.hblkhd) / 1e6


def grow(hours: float, environments: int, replicas: int, seed: int = 0, readings: int = READINGS) -> Growth:
    """Run for so many virtual hours, and read the memory at equal distances."""
    with tempfile.TemporaryDirectory() as folder:
        return virtual_time.run(_live(Path(folder), hours, environments, replicas, seed, readings))


async def _live(folder: Path, hours: float, environments: int, replicas: int, seed: int, readings: int) -> Growth:
    growth, settings, directory = Growth(), _config(hours, replicas, seed), RunDirectory(folder)
    async with await Database.open(sqlite_url(directory.database), directory.blobs) as database:
        await database.start_run(directory.name, "growth", {}, started=virtual_time.START)
        run = Run(settings, directory, database, Train(), Start())
        SimulatedTrainer(run.fleet, Timings())
        for number in range(replicas):
            SimulatedReplica(run.fleet, f"rollout-{number}", Timings(), seed)
        for number in range(environments // SLOTS):
            names = list(settings.environment.tasks.names)
            SimulatedEnvs(run.fleet, f"env-{number}", SLOTS, Timings(), names, seed)

        async def read() -> None:
            for number in range(readings):
                await asyncio.sleep(3600 * hours / (readings + 1))
                growth.read(number, readings, (number + 1) * hours / (readings + 1))

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read())
            await run.work()
            reading.cancel()
        growth.trajectories, growth.updates = run.progress.counts.trajectories, run.progress.counts.updates
    return growth


def _config(hours: float, replicas: int, seed: int) -> config.Config:
    return config.parse(
        {
            "run": {"seed": seed},
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": [f"task-{number:03d}" for number in range(40)]}},
            "rollout": {"replicas": replicas},
            "curation": {"rollouts": 8, "step_limit": 30, "max_staleness": 4},
            "trainer": {"trajectories_per_update": 32},
            "evaluation": {"episodes": 0},
            "checkpoint": {"every_updates": 10},
            "stop": {"train_seconds": 3600 * hours},
            "server": {"lost_after_seconds": 1e9},
        }
    )


def grew(series: Series) -> bool:
    """By more than `GROWN` after the first quarter, and not by chance."""
    one: dict[str, Any] = described(series, "")
    hours = series.at[-1] - series.later().at[0]
    return bool(one["low"] > 0 and one["slope_per_hour"] * hours > GROWN * one["first"])


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=48.0, help="virtual hours")
    parser.add_argument("--environments", type=int, default=40, help=f"a multiple of {SLOTS}")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    if choices.environments < SLOTS or choices.environments % SLOTS:
        parser.error(f"--environments is {choices.environments}: it must be a multiple of {SLOTS}")
    logging.disable(logging.CRITICAL)
    growth = grow(choices.hours, choices.environments, choices.replicas, choices.seed)
    result = {
        "machine": machine(),
        "simulated": "environments, replicas, trainer, network and time; the coordinator, its store and sessions are "
        "real",
        "virtual_hours": choices.hours, "environments": choices.environments, "replicas": choices.replicas,
        "seed": choices.seed, "trajectories": growth.trajectories, "updates": growth.updates,
        "series": {
            "Python's memory blocks": described(growth.blocks, "thousands"),
            "malloc": described(growth.malloc, "MB"),
        },
        "objects_that_gained_most": growth.most_grown(),  # last quarter over second
        "grew": [name for name, one in (("blocks", growth.blocks), ("malloc", growth.malloc)) if grew(one)],
    }  # fmt: skip
    write_json(choices.out, result)
    print(json.dumps(result, indent=2))
    return 1 if result["grew"] else 0


if __name__ == "__main__":
    sys.exit(main())
