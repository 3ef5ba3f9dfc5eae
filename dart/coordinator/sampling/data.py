"""The data manager: every finished trajectory comes here, and the trainer's batches leave from here.

What always holds: a trajectory and its screenshots are durable before anything counts it; a group is judged once,
when its last roll-out finishes (where all failed, with a pooled success in the place of one), and is then either in
the feed or dropped with a reason; a batch is given to the trainer once and marked consumed when the update is done.
Every decision goes into the database and the events with its reason.

Back-pressure: a new group is opened only while begun-and-unconsumed trajectories stay within
`core.curation.start_budget`; `next` waits otherwise, unblocked by a consumed or dropped group, or by `resume`. Where
`schedule` asks for it, `core.schedule.Pacing` holds roll-outs and updates back as well.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.coordinator.sampling.sources import copy_sources
from dart.coordinator.service.journal import Journal
from dart.core.curation.advantage import overlong_penalty
from dart.core.curation.feed import Feed, ReleasedGroup
from dart.core.curation.groups import Group, GroupBook, Order
from dart.core.curation.judging import Decision, judge, staleness, start_budget
from dart.core.curation.planning import LengthRule, NumberRule, Plan, Planner, spread
from dart.core.curation.pool import Entry, ExperiencePool, pooled_copy
from dart.core.curation.sampling import TaskSampler
from dart.core.curation.schedule import Pacing, Situation
from dart.core.progress import Progress
from dart.core.types import Task, Trajectory
from dart.core.usage import EnvState
from dart.errors import UserError
from dart.store.blobs import BlobError
from dart.store.database import Database
from dart.store.records import DROPPED, EVALUATED, PENDING, GroupKind, GroupState

FAILURES_PER_ENVIRONMENT, LEAST_FAILURES, FAILING_SECONDS = 4, 8, 120.0
"""The run ends when attempts have failed for so long without a finished one, and so many of them: a node that is lost
fails all of its own at once, and a cloud may be away for a minute."""
REPLACED = f"{DROPPED}: replaced by a pooled success"
STALE = f"{DROPPED}: stale"
UNMADE = "none of its roll-outs could be made"
UNUSABLE = f"{DROPPED}: cannot be trained on"
LEAST_WEIGHT = 0.01
"""Of a task that has nothing to teach at full task_preference: every task is looked at again now and then."""


class DataManager:
    """The training run's source of orders (`coordinator.episodes.EpisodeSource`) and of batches."""

    def __init__(
        self,
        config: Config,
        database: Database,
        progress: Progress,
        journal: Journal,
        suite: str,
        first_group: int,
        envs: EnvPool,
    ) -> None:
        self._config, self._database, self._envs = config, database, envs
        self._progress, self._journal = progress, journal
        self.temperature = config.rollout.temperature
        tasks, curation = config.environment.tasks, config.curation
        number = NumberRule(maximum=curation.rollouts, **curation.dynamic_rollouts.model_dump())
        self._planner = Planner(number, LengthRule(cap=curation.step_limit, **curation.dynamic_length.model_dump()))
        self._pool = ExperiencePool(curation.pool.per_task, curation.pool.max_age)
        self._resumed = first_group > 1
        rng = random.Random(config.run.seed + first_group)
        sampler = TaskSampler(suite, tasks.names, tasks.train_seeds, rng, self._weight)
        self._book = GroupBook(sampler, self._plan, first_group)
        self._feed = Feed(config.trainer.trajectories_per_update, config.curation.max_staleness)
        self._in_training = 0
        self._running = 0
        """Roll-outs under way."""
        self._given_up: list[Group] = []
        """Groups that a roll-out which cannot be made has closed; nothing is decided about them yet."""
        self._closing: list[Group] = []
        """Out of the book, and not in the feed yet: what is decided about them is being stored."""
        schedule, size = config.schedule, config.trainer.trajectories_per_update
        self._pacing = Pacing(schedule.sampling, schedule.training == "synchronous", curation.rollouts, size)
        self._budget = start_budget(
            config.curation.max_staleness, config.trainer.trajectories_per_update, config.curation.rollouts
        )
        self._changed = asyncio.Event()
        self._paused = False
        self._failures_in_a_row, self._failing_since = 0, 0.0
        self._most_environments = 0

    @property
    def waiting_groups(self) -> int:
        return len(self._feed)

    @property
    def waiting_trajectories(self) -> int:
        return self._feed.waiting_trajectories

    def submit(self, task: Task) -> None:
        self._book.sampler.submit(task)

    async def prepare(self) -> None:
        """Take up what earlier processes left in the database: statistics, the pool, groups that are not done.

        Open groups go on, released ones wait for the trainer. The pool's sources are read once, before there is any
        collected group here.
        """
        pool = self._config.curation.pool
        if pool.enabled and pool.sources and not await self._database.group_count(GroupKind.COLLECTED):
            copied = await copy_sources(self._config, self._database)
            self._journal.event("pool_filled", successes=copied, sources=[str(folder) for folder in pool.sources])
        await self._restore_curation()
        if not self._resumed:
            return
        for group in await self._database.unfinished_groups(with_images=False):
            if group.kind is not GroupKind.TRAINING:
                await self._database.close_group(group.id, GroupState.DROPPED, EVALUATED, EVALUATED, {}, time.time())
            elif group.state == GroupState.OPEN:
                finished = [stored.trajectory for stored in group.trajectories]
                if complete := self._book.restore(group.id, group.task, group.planned, finished):
                    await self._close(complete)
            else:
                # A failure that a pooled success replaced has no advantage.
                members = [(one.trajectory, one.advantage) for one in group.trajectories if one.advantage is not None]
                trajectories, advantages = zip(*members, strict=True)
                self._feed.add(ReleasedGroup(group.id, trajectories, advantages))

    async def _restore_curation(self) -> None:
        window = max(self._planner.number.window, self._planner.length.window or 1)
        for past in await self._database.task_histories(window):
            self._planner.restore(past.name, past.results, past.lengths, past.longest)
        for success in await self._database.newest_successes(self._config.curation.pool.per_task):
            # One update makes one version.
            self._pool.add(Entry(success.trajectory_id, success.task, success.newest_version, success.uses))

    async def close(self) -> None:
        """Sampling is over: nobody waits for an order any more."""
        self._envs.usage.blame(EnvState.IDLE, "", time.monotonic())

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._notify()

    # ---- orders ----

    async def next(self) -> Order | None:
        waited = False
        await self._close_given_up()
        while why := self._why_wait():
            waited = True
            self._envs.usage.blame(EnvState.IDLE, why, time.monotonic())
            await self._changed.wait()
            await self._close_given_up()
        if waited:
            self._envs.usage.blame(EnvState.IDLE, "", time.monotonic())
        order, opened = self._book.next()
        self._running += 1
        self._most_environments = max(self._most_environments, self._envs.slots)
        if opened is not None:
            self._pacing.opened()
            await self._database.open_group(opened.id, opened.task, opened.planned, time.time(), plan=opened.why)
        return order

    def _why_wait(self) -> str | None:
        """Why no roll-out may begin; None when one may."""
        if self._paused:
            return "the run is paused"
        if self._book.next_would_open() and self._begun >= self._budget:
            return "the trainer is behind: more roll-outs would grow too old"
        return self._pacing.why_wait(self._situation)

    @property
    def _situation(self) -> Situation:
        return Situation(
            opens=self._book.next_would_open(),
            open_groups=self._book.open_groups + len(self._closing) + len(self._given_up),
            running=self._running + len(self._closing) + len(self._given_up),
            waiting=self._feed.waiting_trajectories,
            environments=self._envs.slots,
        )

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await self._database.add_trajectory(trajectory, order.attempt)
        self._running -= 1
        self._failures_in_a_row = 0
        self._progress.trajectory_finished(trajectory)
        self._planner.record(trajectory)
        if trajectory.success:
            self._pool.add(Entry(trajectory.id, trajectory.task, trajectory.newest_version))
        if group := self._book.finished(trajectory):
            await self._close_now(group)
        self._notify()

    async def _close_now(self, group: Group) -> None:
        self._closing.append(group)
        await self._close(group)
        self._closing.remove(group)
        self._pacing.closed(self._situation)

    async def _close_given_up(self) -> None:
        while self._given_up:
            await self._close_now(self._given_up.pop())

    def failed(self, order: Order, error: InfrastructureError) -> None:
        self._running -= 1
        self._progress.attempt_failed()
        now = time.monotonic()
        if not self._failures_in_a_row:
            self._failing_since = now
        self._failures_in_a_row += 1
        self._journal.event("attempt_failed", trajectory=order.trajectory_id, attempt=order.attempt, why=str(error))
        enough = max(LEAST_FAILURES, FAILURES_PER_ENVIRONMENT * self._most_environments)
        if self._failures_in_a_row >= enough and now - self._failing_since >= FAILING_SECONDS:
            raise UserError(
                f"{self._failures_in_a_row} attempts in a row failed, the last with: {error}: "
                "look at the workers' logs in the run directory, and run `dart doctor`"
            )
        if order.hopeless and self._failures_in_a_row < self._most_environments + LEAST_FAILURES:
            # Others succeed meanwhile, so this one is to blame: a task whose page does not load, say.
            self._journal.event("given_up", trajectory=order.trajectory_id, attempts=order.attempt, why=str(error))
            if group := self._book.give_up(order):
                self._given_up.append(group)
        else:
            self._book.failed(order)
        self._notify()

    @property
    def _begun(self) -> int:
        closing = sum(group.planned for group in (*self._closing, *self._given_up))
        return self._book.open_trajectories + closing + self._feed.waiting_trajectories + self._in_training

    def _plan(self, task: Task) -> Plan:
        plan = self._planner.plan(task.name)
        for change in plan.changes:
            self._journal.event("plan", task=task.name, reason=change)
        return plan

    def _weight(self, name: str) -> float:
        """How often a task is sampled: by how likely the members of its groups are to differ, but never never."""
        curation, informative = self._config.curation, self._planner.informative(name)
        if curation.pool.enabled and self._pool.has(name):
            # One of N succeeds at the least.
            informative = max(informative, spread(1 / curation.rollouts))
        return max(LEAST_WEIGHT, 1 - curation.task_preference * (1 - informative))

    async def _close(self, group: Group) -> None:
        if not group.finished:
            reason = f"dropped: {UNMADE}"
            await self._database.close_group(group.id, GroupState.DROPPED, reason, reason, {}, time.time())
            self._journal.event("group", group=group.id, task=group.task.id, size=0, released=False, reason=UNMADE)
            return
        members = list(group.finished)
        pooled, fates = None, {}
        if not any(one.success for one in members) and (pooled := await self._pooled(group)):
            replaced = members.pop()
            fates[replaced.id] = REPLACED
            members.append(pooled)
        decision = self._judge(members)
        ids = [trajectory.id for trajectory in members]
        state = GroupState.RELEASED if decision.release else GroupState.DROPPED
        reason = decision.reason if decision.release else f"dropped: {decision.reason}"
        fate = PENDING if decision.release else f"{DROPPED}: {decision.cause}"
        advantages = dict(zip(ids, decision.advantages, strict=True))
        await self._database.close_group(
            group.id, state, reason, fate, advantages, time.time(), fates=fates, pooled=pooled
        )
        if pooled is not None:
            self._progress.success_pooled()
            self._progress.dropped(REPLACED, 1)
            self._journal.event("pooled", group=group.id, success=pooled.pooled_from, replaced=replaced.id,
                                reason=f"pooled success {pooled.pooled_from}, version {pooled.oldest_version}, "
                                       f"inserted for failure {replaced.id}")  # fmt: skip
        if decision.release:
            self._feed.add(ReleasedGroup(group.id, tuple(members), decision.advantages))
        else:
            self._progress.dropped(fate, len(ids))
        self._journal.event("group", group=group.id, task=group.task.id, size=len(ids), plan=group.why,
                            released=decision.release, reason=decision.reason)  # fmt: skip
        self._notify()

    def _judge(self, trajectories: Sequence[Trajectory]) -> Decision:
        how = self._config.trainer.advantage
        limit = self._config.rollout.max_tokens

        def shaping(trajectory: Trajectory) -> float:
            longest = max(len(step.generation.token_ids) for step in trajectory.steps)
            return how.overlong_penalty * overlong_penalty(longest, limit, how.overlong_buffer)

        return judge(trajectories, level=how.level, std_normalise=how.std_normalise, shaping=shaping)

    async def _pooled(self, group: Group) -> Trajectory | None:
        """A copy of a pooled success of the group's task, to stand in for a failure of it."""
        if not self._config.curation.pool.enabled:
            return None
        oldest = min(trajectory.oldest_version for trajectory in group.finished)
        while entry := self._pool.take(group.task, self._progress.counts.updates):
            try:
                stored = await self._database.trajectory(entry.trajectory_id, with_images=True)
            except BlobError as error:
                self._pool.discard(entry)
                self._journal.event("pool_entry_lost", success=entry.trajectory_id, why=str(error))
                continue
            assert stored is not None, f"{entry.trajectory_id} was stored before it was pooled"
            return pooled_copy(stored.trajectory, group.id, self._progress.counts.version, oldest)
        return None

    # ---- batches ----

    async def next_batch(self, trainer_version: int) -> list[ReleasedGroup]:
        """Wait for released groups that make a batch; what has grown stale is dropped on the way."""
        while True:
            for group in self._feed.drop_stale(trainer_version):
                await self._drop_stale(group, trainer_version)
            if self._pacing.update_due(self._situation):
                # A synchronous batch is what was released of it, however little.
                if batch := self._feed.take(1 if self._pacing.synchronous else None):
                    self._in_training = sum(len(group.trajectories) for group in batch)
                    self._pacing.update_begins()
                    self._notify()  # what waits, waits for something else now
                    return batch
                self.update_over()
            await self._changed.wait()

    def update_over(self) -> None:
        """Where sampling waits for updates: every replica serves what this one made."""
        self._pacing.update_over()
        self._notify()

    async def consumed(self, batch: list[ReleasedGroup], update: int, trainer_version: int) -> None:
        """Update `update`, which began at `trainer_version`, has trained on the batch."""
        await self._database.consume_groups([group.id for group in batch], update)
        self._progress.batch_consumed(
            batch, [staleness(trainer_version, t) for group in batch for t in group.trajectories]
        )
        self._in_training = 0
        self._notify()

    async def unusable(self, batch: list[ReleasedGroup], group: ReleasedGroup, why: str) -> None:
        """The trainer could not have this group of the batch: it is dropped, and the others wait again."""
        reason = f"{UNUSABLE}: {why}"
        await self._database.close_group(group.id, GroupState.DROPPED, reason, UNUSABLE, {}, time.time())
        self._progress.dropped(UNUSABLE, len(group.trajectories))
        self._journal.event("group", group=group.id, task=group.trajectories[0].task.id,
                            size=len(group.trajectories), released=False, reason=reason)  # fmt: skip
        for other in batch:
            if other.id != group.id:
                self._feed.add(other)
        self._in_training = 0
        self._pacing.update_over()
        self._notify()

    async def _drop_stale(self, group: ReleasedGroup, trainer_version: int) -> None:
        worst = max(staleness(trainer_version, trajectory) for trajectory in group.trajectories)
        reason = f"stale: {worst} versions old, {self._config.curation.max_staleness} allowed"
        await self._database.close_group(group.id, GroupState.DROPPED, f"dropped: {reason}", STALE, {}, time.time())
        self._progress.dropped(STALE, len(group.trajectories))
        self._journal.event("group", group=group.id, task=group.trajectories[0].task.id,
                            size=len(group.trajectories), released=False, reason=reason)  # fmt: skip
        self._notify()

    def _notify(self) -> None:
        """Wake everyone who waits; each looks again whether its condition holds."""
        self._changed.set()
        self._changed = asyncio.Event()
