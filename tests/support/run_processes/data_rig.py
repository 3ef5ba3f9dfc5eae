"""A data manager with a real database and without workers: what tests of sampling share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from run_processes.told import events

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.service.journal import Journal
from dart.core.curation.orders import Order
from dart.core.progress import Progress
from dart.core.types import Generation, Image, Step, Termination, Trajectory, VersionSpan
from dart.store.database import Database, sqlite_url

CONFIG = config.parse(
    {
        "model": {"path": "builtin:tiny-qwen3vl"},
        "environment": {"tasks": {"names": ["click-color"]}},
        "curation": {"rollouts": 4, "step_limit": 9, "max_staleness": 2,
                     "dynamic_rollouts": {"minimum": 2, "window": 4},
                     "dynamic_length": {"margin": 1, "floor": 2}},
        "trainer": {"trajectories_per_update": 8},
        "stop": {"updates": 1},
    }
)  # fmt: skip


ENVIRONMENTS = 16


def environments() -> EnvPool:
    pool = EnvPool(Fleet(60.0))
    pool.slots = ENVIRONMENTS
    return pool


def rolled_out(order: Order, success: bool, version: int = 0, steps: int = 2) -> Trajectory:
    image = Image.of(order.trajectory_id.encode(), "image/png", 2, 2)
    generation = Generation((1, 2), (3, 4), (-0.5, -0.25), (VersionSpan(version, 0, 2),), "t")
    made = tuple(Step(index, (image,), generation, None) for index in range(steps))
    return Trajectory(order.trajectory_id, order.group_id, order.task, "do", made, Termination.ENVIRONMENT,
                      float(success), success, order.step_limit, 0.0, float(order.trajectory_id[-1]))  # fmt: skip


class Rig:
    """A data manager over a run directory; a second one over the same directory is a restart."""

    def __init__(self, directory: Path, settings: config.Config = CONFIG) -> None:
        self.directory, self.settings = directory, settings

    async def __aenter__(self) -> Rig:
        new = not (self.directory / "run.db").exists()
        self.database = await Database.open(sqlite_url(self.directory / "run.db"), self.directory / "blobs")
        if new:
            await self.database.start_run("run-1", "test", {}, started=0.0)
        self.progress, self.envs = Progress(100), environments()
        self.journal = Journal(self.directory / "metrics.jsonl", await self.database.last_sequence() + 1)
        self.data = DataManager(
            self.settings, self.database, self.progress, self.journal, "miniwob", await self.database.group_count() + 1,
            self.envs,
        )  # fmt: skip
        await self.data.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.journal.close()
        await self.database.close()

    async def order(self) -> Order:
        async with asyncio.timeout(60):
            order = await self.data.next()
        assert order is not None
        return order

    async def group(self, *outcomes: bool, version: int = 0, steps: int = 2) -> list[Order]:
        orders = [await self.order() for _ in outcomes]
        assert len({order.group_id for order in orders}) == 1
        for order, success in zip(orders, outcomes, strict=True):
            await self.data.finished(order, rolled_out(order, success, version, steps))
        return orders

    async def batch(self, version: int = 0) -> list[Any]:
        async with asyncio.timeout(60):
            return await self.data.next_batch(version)

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.journal.flush_lines()
        return events(self.directory / "metrics.jsonl", kind)
