"""Supervised training: batches of demonstrations instead of roll-outs (`algorithm: sft`).

Like the data manager, `Demonstrations` gives the training phase its batches, but from successes that `dart collect`
stored: every trajectory once per epoch, in an order that the seed decides. Nothing is sampled and no group is kept;
updates, versions, checkpoints and weight sync work as in any run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from dart.config import Config
from dart.coordinator.sampling.sources import SFT, check_sources, fitting_successes, open_source
from dart.coordinator.service.journal import Journal
from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.pool import unscored_copy
from dart.core.curation.quarantine import TaskQuarantine
from dart.core.progress import Progress
from dart.core.types import Task
from dart.errors import UserError
from dart.store.database import Reader


class Demonstrations:
    """Used instead of `DataManager`; it gives out no orders."""

    def __init__(self, config: Config, progress: Progress, journal: Journal) -> None:
        self._config, self._progress, self._journal = config, progress, journal
        self.quarantine = TaskQuarantine()
        """Empty: it gives out no tasks."""
        self._open = AsyncExitStack()
        self._all: list[tuple[Reader, int, str]] = []
        """Each with the number of its source, from 1: two of them may have trajectories of the same name."""
        self._order: list[int] = []
        """This epoch's."""
        self._going = asyncio.Event()
        self._going.set()

    @property
    def waiting_groups(self) -> int:
        return 0

    @property
    def submitted_tasks(self) -> int:
        return 0

    def submit(self, tasks: Sequence[Task]) -> None:
        raise UserError("no task can be submitted: this run trains on demonstrations and samples nothing")

    def pause(self, paused: bool) -> None:
        if paused:
            self._going.clear()
        else:
            self._going.set()

    async def prepare(self) -> None:
        """Find every demonstration. Raises UserError."""
        await check_sources(self._config, SFT)
        for number, directory in enumerate(self._config.sft.sources, 1):
            source = await self._open.enter_async_context(await open_source(directory, SFT))
            found = await fitting_successes(source, directory, self._config, SFT, per_task=None)
            self._all += [(source, number, success.trajectory_id) for success in found]
        size = self._config.trainer.trajectories_per_update
        self._journal.event("demonstrations", trajectories=len(self._all), updates_per_epoch=len(self._all) / size)

    async def next_batch(self, trainer_version: int) -> list[ReleasedGroup]:
        """The next `trajectories_per_update` demonstrations, each a group of one whose steps have advantage 1."""
        await self._going.wait()
        size = self._config.trainer.trajectories_per_update
        first = self._progress.counts.updates * size
        made = []
        for number in range(first, first + size):
            epoch, place = divmod(number, len(self._all))
            if place == 0 or not self._order:
                self._order = self._shuffled(epoch)
            source, folder, name = self._all[self._order[place]]
            stored = await source.trajectory(name, with_images=True)
            assert stored is not None, f"{name} has left its run directory"
            copy = unscored_copy(stored.trajectory, f"collected-{folder}-{name}-{epoch}", trainer_version)
            made.append(ReleasedGroup.evenly(copy.group_id, (copy,), (1.0,)))
        return made

    async def consumed(self, batch: list[ReleasedGroup], update: int, trainer_version: int) -> None:
        self._progress.batch_consumed(batch, [0 for group in batch for _ in group.trajectories])

    async def skipped(self, batch: Sequence[ReleasedGroup], why: str) -> None:
        """The update counts, but changed no weight: these demonstrations come again in the next epoch."""

    async def unusable(self, groups: Sequence[ReleasedGroup], why: str) -> None:
        names = ", ".join(group.id for group in groups)
        raise UserError(
            f"sft.sources: {names} cannot be trained on: {why}: collect them again, or leave their folder out"
        )

    def trainer_lost(self, batch: Sequence[ReleasedGroup], why: str) -> None:
        """A restart trains on the same demonstrations again: they were checked when they were collected."""

    async def close(self) -> None:
        await self._open.aclose()

    def _shuffled(self, epoch: int) -> list[int]:
        """The same in every process of the run, so that a resumed one continues where it stopped."""
        order = list(range(len(self._all)))
        random.Random(f"{self._config.run.seed}/{epoch}").shuffle(order)
        return order
