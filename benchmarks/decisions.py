"""What a scheduling decision costs, and whether it grows: `python -m benchmarks.decisions`.

Real: the data manager with its planner, sampler, pool and lifecycle machine; the owner of the replicas. Left out: the
database (writes to it are dropped) and workers. Trajectories are made beforehand.

begin: choose the next roll-out for a free environment. finish: count a trajectory; its group closes, is judged, and
waits for the trainer or is dropped. route: choose the replica for a request, and note that the request has ended.
batch: an update's groups leave the queue and count as trained, per trajectory. All in microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.results import write
from benchmarks.simulation.store import NoDatabase
from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.service.journal import Journal
from dart.core.curation.orders import Order
from dart.core.fleet.replica import Request
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan
from dart.processes.settings import collect_seldom

RESULT = Path(__file__).parent / "results" / "decisions.json"
SIZES = ((100, 100), (1_000, 100), (1_000, 1_000), (10_000, 1_000), (10_000, 10_000))
"""(environments, tasks)."""
STEPS, ENVIRONMENTS_PER_REPLICA, REPLICA_SLOTS = 20, 22, 32


class Clock:
    """The measured times in microseconds, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str, parts: int = 1) -> Iterator[None]:
        began = time.perf_counter_ns()
        yield
        self.times.setdefault(name, []).append((time.perf_counter_ns() - began) / 1000 / parts)

    def results(self) -> dict[str, dict[str, float]]:
        made = {}
        for name, times in self.times.items():
            times.sort()
            made[name] = {
                "mean": round(statistics.fmean(times), 2),
                "p50": round(times[len(times) // 2], 2),
                "p99": round(times[int(len(times) * 0.99)], 2),
            }
        return made


async def decide(environments: int, tasks: int, decisions: int) -> dict[str, dict[str, float]]:
    """All environments are busy; each decision ends one roll-out and begins another."""
    settings = config.parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": [f"task-{number:05d}" for number in range(tasks)]}},
            "curation": {"max_staleness": 4},
            "trainer": {"trajectories_per_update": environments},
            "stop": {"updates": 1},
        }
    )
    clock, chance = Clock(), random.Random(0)
    pool = EnvPool(Fleet(60.0))
    pool.slots = environments
    with tempfile.TemporaryDirectory() as folder:
        progress, journal = Progress(settings.stop.window), Journal(Path(folder) / "metrics.jsonl")
        data = DataManager(settings, NoDatabase(), progress, journal, "bench", 1, pool)  # type: ignore[arg-type]
        running = deque([order for _ in range(environments) if (order := await data.next())])
        for number in range(environments + decisions):
            if number == environments:  # every group has been through once
                clock = Clock()
            order = running.popleft()
            trajectory = _rolled_out(order, chance.random() < 0.4)
            with clock.time("finish"):
                await data.finished(order, trajectory)
            with clock.time("begin"):
                following = await data.next()
            assert following is not None
            running.append(following)
            if data.waiting_trajectories >= environments:
                with clock.time("batch", environments):
                    await data.consumed(await data.next_batch(0), 1, 0)
        journal.close()
    _route(clock, environments, decisions, chance)
    return clock.results()


def _route(clock: Clock, environments: int, decisions: int, chance: random.Random) -> None:
    replicas: Replicas[None] = Replicas(0.0)
    for number in range(-(-environments // ENVIRONMENTS_PER_REPLICA)):
        replicas.join(f"rollout-{number}", REPLICA_SLOTS, 0, None, 0.0)
    busy: deque[Request[None]] = deque(Request() for _ in range(environments // 2))
    last = [f"rollout-{chance.randrange(len(replicas))}" for _ in range(1000)]
    for request in busy:
        replicas.take(request, 0.0)
    for number in range(decisions):
        with clock.time("route"):
            replicas.served(busy.popleft(), 0.0)
            request = Request(last[number % 1000])
            replica = replicas.take(request, 0.0)
        assert replica is not None
        busy.append(request)


_IMAGE = Image.of(b"a screenshot", "image/png", 1920, 1080)
_GENERATION = Generation(tuple(range(100)), tuple(range(24)), (-0.1,) * 24, (VersionSpan(0, 0, 24),), "click")
_TRAJECTORY = Trajectory(
    "", "", Task("bench", "task"), "do", tuple(Step(n, (_IMAGE,), _GENERATION, None) for n in range(STEPS)),
    Termination.ENVIRONMENT, 0.0, False, 30, 0.0, 1.0,
)  # fmt: skip


def _rolled_out(order: Order, success: bool) -> Trajectory:
    return replace(_TRAJECTORY, id=order.trajectory_id, group_id=order.group_id, task=order.task,
                   reward=float(success), success=success)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=20_000, help="decisions timed at each size")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    collect_seldom()  # as in the coordinator: else collections of garbage are a quarter of what is timed
    rows: list[dict[str, Any]] = [
        {"environments": environments, "tasks": tasks} | asyncio.run(decide(environments, tasks, options.decisions))
        for environments, tasks in SIZES
    ]
    smallest, largest = rows[0], rows[-1]
    growth = {name: round(largest[name]["p50"] / smallest[name]["p50"], 2) for name in ("begin", "finish", "route")}
    write(
        options.out,
        "decisions",
        "the real data manager and owner of the replicas; no database, no workers",
        {"unit": "microseconds", "sizes": rows, "largest_over_smallest": growth},
    )
    show(rows)
    print(options.out)


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("begin", "finish", "route", "batch")
    table = Table("environments", "tasks", *(f"{name}, µs mean (p50, p99)" for name in names))
    for row in rows:
        shown = (row.get(name) for name in names)
        cells = (f"{one['mean']:.1f} ({one['p50']:.1f}, {one['p99']:.1f})" if one else "" for one in shown)
        table.add_row(f"{row['environments']:,}", f"{row['tasks']:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
