"""A store for simulated runs: it drops what the coordinator writes, except what the coordinator reads again."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from dart.core.types import Trajectory
from dart.store.blobs import BlobError

REMEMBERED = 2000
"""Successes that may be pooled."""


class NoDatabase:
    """Stands in for `dart.store.database.Database`."""

    blobs = None

    def __init__(self) -> None:
        self._successes: OrderedDict[str, Trajectory] = OrderedDict()

    async def add_trajectory(self, trajectory: Trajectory, attempt: int = 1) -> None:
        if trajectory.success:
            self._successes[trajectory.id] = trajectory
            if len(self._successes) > REMEMBERED:
                self._successes.popitem(last=False)

    async def trajectory(self, trajectory_id: str, *, with_images: bool = False) -> Any:
        if trajectory_id not in self._successes:
            raise BlobError("no longer remembered")
        return SimpleNamespace(trajectory=self._successes[trajectory_id])

    def wait_at_most(self, seconds: float) -> None:
        """It never waits."""

    def __getattr__(self, name: str) -> Any:
        """Everything that is only written, or only read by a restart."""

        async def nothing(*_: Any, **__: Any) -> Any:
            lists = ("task_histories", "newest_successes", "checkpoints", "unopened_submissions")
            return [] if name in lists else 0

        return nothing
