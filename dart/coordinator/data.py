"""The data manager: every finished trajectory comes here, and the trainer's batches leave from here.

What always holds: a trajectory and its screenshots are durable before anything counts it; a group is judged once,
when its last roll-out finishes, and is then either in the feed or dropped with a reason; a batch is given to the
trainer once and marked consumed when the update is done.

Back-pressure: a new group is opened only while begun-and-unconsumed trajectories stay within
`core.curation.start_budget`; `next` waits otherwise, unblocked by a consumed or dropped group, or by `resume`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from dart.config import Config
from dart.coordinator.metrics import Metrics
from dart.coordinator.sessions import InfrastructureError
from dart.core.curation import judge, staleness, start_budget
from dart.core.feed import Feed, ReleasedGroup
from dart.core.groups import Group, GroupBook, Order, TaskSampler
from dart.core.types import Task, Trajectory
from dart.errors import UserError
from dart.store.database import Database
from dart.store.records import GroupState, StoredGroup

MOST_FAILURES_IN_A_ROW = 100


class DataManager:
    """The training run's source of orders (`coordinator.episodes.EpisodeSource`) and of batches."""

    def __init__(self, config: Config, database: Database, metrics: Metrics, suite: str, first_group: int = 1) -> None:
        self._config, self._database, self._metrics = config, database, metrics
        self.temperature = config.rollout.temperature
        tasks = config.environment.tasks
        sampler = TaskSampler(suite, tasks.names, tasks.train_seeds, random.Random(config.run.seed + first_group))
        self._book = GroupBook(sampler, self._plan, first_group)
        self._feed = Feed(config.trainer.trajectories_per_update, config.curation.max_staleness)
        self._in_training = 0
        self._budget = start_budget(
            config.curation.max_staleness, config.trainer.trajectories_per_update, config.curation.rollouts
        )
        self._changed = asyncio.Event()
        self._paused = False
        self._failures_in_a_row = 0

    @property
    def waiting_groups(self) -> int:
        return len(self._feed)

    def submit(self, task: Task) -> None:
        self._book.sampler.submit(task)

    async def take_up(self, groups: Sequence[StoredGroup]) -> None:
        """Groups that an earlier process of this run left: open ones go on, released ones wait for the trainer."""
        for group in groups:
            if group.id.startswith("eval-"):
                await self._database.close_group(group.id, GroupState.DROPPED, "evaluated", {}, time.time())
                continue
            trajectories = tuple(stored.trajectory for stored in group.trajectories)
            if group.state == GroupState.OPEN:
                if complete := self._book.restore(group.id, group.task, group.planned, trajectories):
                    await self._close(complete)
            else:
                advantages = tuple(stored.advantage or 0.0 for stored in group.trajectories)
                self._feed.add(ReleasedGroup(group.id, trajectories, advantages))

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._notify()

    # ---- orders ----

    async def next(self) -> Order | None:
        while self._paused or (self._book.next_would_open() and self._begun >= self._budget):
            await self._changed.wait()
        order, opened = self._book.next()
        if opened is not None:
            await self._database.open_group(opened.id, opened.task, opened.planned, time.time())
        return order

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await self._database.add_trajectory(trajectory, order.attempt)
        self._failures_in_a_row = 0
        self._metrics.counted(trajectory)
        if group := self._book.finished(trajectory):
            await self._close(group)

    def failed(self, order: Order, error: InfrastructureError) -> None:
        self._metrics.infrastructure_failures += 1
        self._failures_in_a_row += 1
        self._metrics.event("attempt_failed", trajectory=order.trajectory_id, attempt=order.attempt, why=str(error))
        if self._failures_in_a_row >= MOST_FAILURES_IN_A_ROW:
            raise UserError(
                f"{MOST_FAILURES_IN_A_ROW} attempts in a row failed, the last with: {error}: "
                "look at the workers' logs in the run directory, and run `dart doctor`"
            )
        self._book.failed(order)
        self._notify()

    @property
    def _begun(self) -> int:
        return self._book.open_trajectories + self._feed.waiting_trajectories + self._in_training

    def _plan(self, _task: Task) -> tuple[int, int]:
        return self._config.curation.rollouts, self._config.curation.step_limit

    async def _close(self, group: Group) -> None:
        how = self._config.trainer.advantage
        decision = judge(group.finished, level=how.level, std_normalise=how.std_normalise)
        ids = [trajectory.id for trajectory in group.finished]
        state = GroupState.RELEASED if decision.release else GroupState.DROPPED
        fate = decision.reason if decision.release else f"dropped: {decision.reason}"
        await self._database.close_group(
            group.id, state, fate, dict(zip(ids, decision.advantages, strict=True)), time.time()
        )
        if decision.release:
            self._feed.add(ReleasedGroup(group.id, tuple(group.finished), decision.advantages))
        else:
            self._metrics.fates[f"dropped: {decision.cause}"] += len(ids)
        self._metrics.event(
            "group",
            group=group.id,
            task=group.task.id,
            size=len(ids),
            released=decision.release,
            reason=decision.reason,
        )
        self._notify()

    # ---- batches ----

    async def next_batch(self, trainer_version: int) -> list[ReleasedGroup]:
        """Wait for released groups that make a batch; what has grown stale is dropped on the way."""
        while True:
            for group in self._feed.drop_stale(trainer_version):
                await self._drop_stale(group, trainer_version)
            if batch := self._feed.take():
                self._in_training = sum(len(group.trajectories) for group in batch)
                return batch
            await self._changed.wait()

    async def consumed(self, batch: list[ReleasedGroup], update: int, trainer_version: int) -> None:
        """Update `update`, which began at `trainer_version`, has trained on the batch."""
        await self._database.consume_groups([group.id for group in batch], update)
        self._metrics.consumed([staleness(trainer_version, t) for group in batch for t in group.trajectories])
        self._in_training = 0
        self._notify()

    async def _drop_stale(self, group: ReleasedGroup, trainer_version: int) -> None:
        worst = max(staleness(trainer_version, trajectory) for trajectory in group.trajectories)
        reason = f"stale: {worst} versions old, {self._config.curation.max_staleness} allowed"
        await self._database.close_group(group.id, GroupState.DROPPED, f"dropped: {reason}", {}, time.time())
        self._metrics.fates["dropped: stale"] += len(group.trajectories)
        self._metrics.event("group", group=group.id, task=group.trajectories[0].task.id,
                            size=len(group.trajectories), released=False, reason=reason)  # fmt: skip
        self._notify()

    def _notify(self) -> None:
        """Wake everyone who waits; each looks again whether its condition holds."""
        self._changed.set()
        self._changed = asyncio.Event()
