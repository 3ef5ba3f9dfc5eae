"""The data manager: every finished trajectory comes here, and the trainer's batches leave from here.

It carries out what `core.curation.lifecycle` decides. A trajectory and its screenshots are durable before anything
counts it; a verdict is durable before it moves its group (`_apply`: the transaction, then the state machine, the
counters and the event). A batch is given to the trainer once, and marked consumed when the update is done. A group that
cannot be trained on is dropped, with the reason, wherever that is noticed.

Back-pressure: a new group is opened only while fewer than `core.curation.judging.start_budget` trajectories have begun
and are not over; `next` waits otherwise, unblocked by a consumed or dropped group, or by `resume`. Where `schedule`
asks for it, `core.curation.schedule` holds roll-outs and updates back as well.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from dart.agent.vocabulary import vocabulary_size
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.coordinator.sampling.sources import copy_sources
from dart.coordinator.service.journal import Journal
from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.group import Group
from dart.core.curation.judging import REPLACED, STALE, Judging, Verdict, staleness
from dart.core.curation.lifecycle import Lifecycle, Rules
from dart.core.curation.orders import Attempt, Failures, Order
from dart.core.curation.planning import LengthRule, NumberRule, Plan, Planner, spread
from dart.core.curation.pool import Entry, ExperiencePool, pooled_copy
from dart.core.curation.quarantine import TaskQuarantine
from dart.core.curation.sampling import TaskSampler
from dart.core.curation.schedule import Schedule
from dart.core.curation.submitted import Submissions
from dart.core.curation.usable import why_unusable
from dart.core.fates import PENDING, dropped
from dart.core.progress import Progress
from dart.core.types import Task, Trajectory, without_bytes
from dart.core.usage import EnvState
from dart.errors import UserError
from dart.failpoints import failpoint
from dart.store.blobs import BlobError, BlobUnreachable
from dart.store.database import Database
from dart.store.records import GroupKind, GroupState, StoredGroup

log = logging.getLogger(__name__)

LEAST_WEIGHT = 0.01
"""The sampling weight of a task with nothing left to learn, at full task_preference: it is still tried now and then."""
MOST_REFUSED_BATCHES = 3
"""The run ends when the trainer refuses more trajectories than this many batches hold, with no update in between."""
MOST_LOSSES = 3
"""A group is dropped when the trainer was lost this many times while the group was in its batch."""


class DataManager:
    """The training run's source of orders (`coordinator.sampling.episodes.EpisodeSource`) and of batches."""

    def __init__(
        self,
        config: Config,
        database: Database,
        progress: Progress,
        journal: Journal,
        suite: str,
        first_group: int,
        envs: EnvPool,
        failures: Failures | None = None,
    ) -> None:
        """`failures`: the run's, if attempts are also made outside of training."""
        self._config, self._database, self._envs = config, database, envs
        self._progress, self._journal = progress, journal
        self.temperature = config.rollout.temperature
        tasks, curation = config.environment.tasks, config.curation
        number = NumberRule(maximum=curation.rollouts, **curation.dynamic_rollouts.model_dump())
        length = LengthRule(cap=curation.step_limit, **curation.dynamic_length.model_dump())
        self._planner = Planner(number, length, tasks.step_limits)
        self._pool = ExperiencePool(curation.pool.per_task, curation.pool.max_age)
        rng = random.Random(config.run.seed + first_group)
        self.quarantine = TaskQuarantine()
        """Tasks that keep failing while others work."""
        sampler = TaskSampler(
            suite, tasks.training, tasks.train_seeds, rng, self._weight, tasks.single_instance, self._rests
        )
        self._submissions = Submissions(suite, tasks.training, tasks.eval_seeds, tasks.single_instance)
        self._failures = failures or Failures()
        self._lifecycle = Lifecycle(_rules(config), sampler, self._plan, first_group, self._failures)
        self._resumed = first_group > 1
        self._refused = 0
        """Trajectories that the trainer has refused since its last update."""
        self._changed = asyncio.Event()
        """Set for a moment to wake all waiters, each of which checks its condition again."""

    @property
    def waiting_groups(self) -> int:
        return self._lifecycle.waiting_groups

    @property
    def waiting_trajectories(self) -> int:
        return self._lifecycle.waiting_trajectories

    @property
    def submitted_tasks(self) -> int:
        """Submitted tasks for which no group has been opened yet."""
        return self._lifecycle.submitted_tasks

    def submit(self, tasks: Sequence[Task]) -> None:
        """Put tasks ahead of all others, all of them or none. Raises NotWanted."""
        self._submissions.check(tasks, self.submitted_tasks)
        named = [[task.suite, task.name, task.seed] for task in tasks]
        self._journal.event("submitted", number=len(tasks), tasks=named, first_group=self._lifecycle.next_group)
        for task in tasks:
            self._lifecycle.submit(task)

    def pause(self, paused: bool) -> None:
        self._lifecycle.pause(paused)
        self._notify()

    async def close(self) -> None:
        """Sampling is over: nothing waits for an order any more."""
        self._envs.usage.blame(EnvState.IDLE, "", time.monotonic())

    # ---- roll-outs ----

    async def next(self) -> Order | None:
        waited = False
        if self._lifecycle.undecided:
            await self._decide()
        while why := self._lifecycle.why_wait(self._envs.slots):
            waited = True
            self._envs.usage.blame(EnvState.IDLE, why, time.monotonic())
            await self._changed.wait()
            await self._decide()
        if waited:
            self._envs.usage.blame(EnvState.IDLE, "", time.monotonic())
        order, opened = self._lifecycle.next(self._envs.slots)
        if opened is not None:
            await self._database.open_group(opened.id, opened.task, opened.planned, time.time(), plan=opened.why)
            failpoint("group-opened")
        return order

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await self._database.add_trajectory(trajectory, order.attempt)
        failpoint("trajectory-stored")
        trajectory = self._to_wait(trajectory)
        self._lifecycle.finished(trajectory)
        self.quarantine.finished(trajectory.task.name)
        self._progress.trajectory_finished(trajectory)
        self._planner.record(trajectory)
        if trajectory.success:
            self._pool.add(Entry(trajectory.id, trajectory.task, trajectory.newest_version))
        if self._lifecycle.undecided:
            await self._decide()
        self._notify()

    def failed(self, order: Order, error: InfrastructureError) -> None:
        """Raises UserError when nothing works any more."""
        name, by_environment = order.task.name, error.certain or error.by_environment
        if by_environment:
            self._doubt(name, error)
        certain = error.certain or (by_environment and self.quarantine.doubted(name))
        attempt = self._lifecycle.failed(order, time.monotonic(), certain)
        self._progress.attempt_failed()
        self._journal.event("attempt_failed", trajectory=order.trajectory_id, attempt=order.attempt, why=str(error))
        if attempt is Attempt.NOTHING_WORKS:
            raise UserError(
                f"{self._failures.in_a_row} attempts in a row failed, the last with: {error}: "
                "look at the workers' logs in the run directory, and run `dart doctor`"
            )
        if attempt is Attempt.GIVEN_UP:
            self._journal.event("given_up", trajectory=order.trajectory_id, attempts=order.attempt, why=str(error))
        self._notify()

    def _doubt(self, name: str, error: InfrastructureError) -> None:
        """A task that keeps failing in environments is quarantined."""
        why, several, now = str(error), self._envs.workers > 1, time.monotonic()
        seconds = self.quarantine.failed(name, why, now, worker=error.worker, several=several, certain=error.certain)
        if seconds:
            self._journal.event("task_quarantined", task=name, seconds=seconds, why=why)

    def _rests(self, name: str) -> bool:
        return self.quarantine.rests(name, time.monotonic())

    def _plan(self, task: Task) -> Plan:
        plan = self._planner.plan(task.name)
        for change in plan.changes:
            self._journal.event("plan", task=task.name, reason=change)
        return plan

    def _weight(self, name: str) -> float:
        """How often a task is sampled: by how likely the members of its groups are to differ; never 0."""
        curation, informative = self._config.curation, self._planner.informative(name)
        if curation.pool.enabled and self._pool.has(name):
            # At least one of N succeeds: the pooled one.
            informative = max(informative, spread([1.0] + [0.0] * (curation.rollouts - 1)))
        return max(LEAST_WEIGHT, 1 - curation.task_preference * (1 - informative))

    # ---- decisions ----

    async def _decide(self) -> None:
        """Judge every group that has nothing left to run."""
        while group := self._lifecycle.to_judge():
            pools = group.wants_success and self._config.curation.pool.enabled
            stand_in = await self._stand_in(group) if pools else None
            await self._apply(self._lifecycle.judge(group, stand_in))

    async def _apply(self, verdict: Verdict) -> None:
        """Store a verdict; then move its group, count it and report it."""
        fate = PENDING if verdict.released else dropped(verdict.cause)
        ids = [trajectory.id for trajectory in verdict.trajectories]
        advantages = dict(zip(ids, verdict.advantages, strict=True)) if verdict.advantages else {}
        replaced = {verdict.replaced: dropped(REPLACED)} if verdict.replaced else {}
        await self._database.close_group(
            verdict.group_id,
            GroupState.RELEASED if verdict.released else GroupState.DROPPED,
            verdict.detail if verdict.released else dropped(verdict.detail),
            fate, advantages, time.time(), fates=replaced, pooled=verdict.pooled,
        )  # fmt: skip
        failpoint("group-closed")
        self._lifecycle.decided(verdict)
        if (pooled := verdict.pooled) is not None:
            self._progress.success_pooled()
            self._progress.dropped(dropped(REPLACED), 1)
            self._journal.event("pooled", group=verdict.group_id, success=pooled.pooled_from, replaced=verdict.replaced,
                                reason=f"pooled success {pooled.pooled_from}, version {pooled.oldest_version}, "
                                       f"inserted for failure {verdict.replaced}")  # fmt: skip
        if verdict.released:
            self._progress.curation.released()
        elif ids:
            self._progress.dropped(fate, len(ids))
            if verdict.cause != STALE:
                self._progress.curation.dropped(verdict.cause, verdict.detail, len(ids))
        self._journal.event("group", group=verdict.group_id, task=verdict.task.id, size=len(ids), plan=verdict.plan,
                            released=verdict.released, cause=verdict.cause, reason=verdict.detail)  # fmt: skip
        self._notify()

    async def _stand_in(self, group: Group) -> Trajectory | None:
        """A copy of a pooled success of the group's task, to replace one of its failures."""
        oldest = min(trajectory.oldest_version for trajectory in group.finished)
        while entry := self._pool.take(group.task, self._progress.counts.updates):
            try:
                stored = await self._database.trajectory(entry.trajectory_id, with_images=True)
                assert stored is not None, f"{entry.trajectory_id} was stored before it was pooled"
                lost = why_unusable(replace(stored.trajectory, pooled_from=entry.trajectory_id))
                if lost is None:
                    success = self._to_wait(stored.trajectory)
                    return pooled_copy(success, group.id, self._progress.counts.version, oldest)
            except BlobUnreachable as error:  # the next group may have it
                log.warning("group %s gets no pooled success: %s", group.id, error)
                return None
            except (BlobError, OSError) as error:  # a directory that is not readable, for example
                lost = str(error)
            if self._pool.discard(entry):
                self._journal.event("pool_entry_lost", success=entry.trajectory_id, why=lost)
        return None

    def _to_wait(self, trajectory: Trajectory) -> Trajectory:
        """Without the bytes of its screenshots if the trainer reads them from the directory: hundreds wait. The last
        image is only for people, who find it in the database."""
        blobs, trajectory = self._database.blobs, replace(trajectory, last_image=None)
        return without_bytes(trajectory) if blobs and blobs.directory else trajectory

    # ---- batches ----

    async def next_batch(self, trainer_version: int) -> list[ReleasedGroup]:
        """Wait until released groups make a batch, dropping those that have become stale."""
        while True:
            while verdicts := self._lifecycle.stale(trainer_version):  # another may close while these are stored
                for verdict in verdicts:
                    await self._apply(verdict)
            if self._lifecycle.update_due:
                batch = self._lifecycle.take()
                self._notify()  # the reasons to wait may have changed
                if batch:
                    return batch
            await self._changed.wait()

    def update_over(self) -> None:
        """Every replica serves the weights of the last update; synchronous sampling waits for this."""
        self._lifecycle.update_over()
        self._notify()

    async def consumed(self, batch: list[ReleasedGroup], update: int, trainer_version: int) -> None:
        """Update `update`, which began at `trainer_version`, has trained on the batch."""
        await self._database.consume_groups([group.id for group in batch], update)
        self._lifecycle.consumed()
        self._progress.batch_consumed(
            batch, [staleness(trainer_version, t) for group in batch for t in group.trajectories]
        )
        self._refused = 0
        self._notify()

    async def skipped(self, batch: Sequence[ReleasedGroup], why: str) -> None:
        """The update counts, but changed no weight. Its groups are dropped, so that they do not come back after a
        restart from an earlier checkpoint. Raises UserError as `unusable` does."""
        await self.unusable(batch, why)

    async def unusable(self, groups: Sequence[ReleasedGroup], why: str) -> None:
        """The update was not made, because these groups of its batch cannot be trained on. The others wait again.

        Raises UserError when the trainer refuses batch after batch.
        """
        for group in groups:
            self._lifecycle.unusable(group.id, why)
        self._lifecycle.returned()
        await self._decide()
        self._notify()
        self._refused += sum(len(group.trajectories) for group in groups)
        if self._refused > MOST_REFUSED_BATCHES * self._config.trainer.trajectories_per_update:
            raise UserError(
                f"the trainer has refused {self._refused} trajectories and made no update between them, the last "
                f"with: {why}: look at logs/train*.log in the run directory, then continue with --resume"
            )

    def trainer_lost(self, batch: Sequence[ReleasedGroup], why: str) -> None:
        """The trainer was lost while it trained on the batch. `prepare` drops groups of too many such batches."""
        self._journal.event("trainer_lost", groups=[group.id for group in batch], why=why)

    # ---- restarts ----

    async def prepare(self) -> None:
        """Load what earlier processes left in the database: statistics, the pool, submitted tasks, unfinished groups.

        Open groups continue, and released ones wait for the trainer. The pool's sources are read once, before this
        database has any collected group.
        """
        pool = self._config.curation.pool
        if pool.enabled and pool.sources and not await self._database.group_count(GroupKind.COLLECTED):
            copied = await copy_sources(self._config, self._database)
            self._journal.event("pool_filled", successes=copied, sources=[str(folder) for folder in pool.sources])
        window = max(self._planner.number.window, self._planner.length.window or 1)
        for past in await self._database.task_histories(window):
            self._planner.restore(past.name, past.results, past.lengths, past.longest)
            if past.results:  # else its successes were only collected
                self._failures.finished(past.name)
        for success in await self._database.newest_successes(pool.per_task):
            # One update makes one version.
            self._pool.add(Entry(success.trajectory_id, success.task, success.newest_version, success.uses))
        for task in await self._database.unopened_submissions():
            if not self._submissions.why_not(task):  # the config may have changed since
                self._lifecycle.submit(task)
        if self._resumed:
            await self._restore_groups()

    async def _restore_groups(self) -> None:
        losses = Counter[str]()
        for event in await self._database.newest_events("trainer_lost", 100):
            losses.update(_groups_of(event.json))
        vocabulary = await asyncio.to_thread(vocabulary_size, self._config.model.folder)
        groups = await self._database.unfinished_groups()
        damaged = await self._damaged(groups)
        for group in groups:
            self._restore(group, losses[group.id], vocabulary, damaged)
        await self._database.close_evaluations(time.time())
        await self._decide()

    async def _damaged(self, groups: Sequence[StoredGroup]) -> set[bytes]:
        """The digests of their screenshots that are gone: the trainer would refuse group after group."""
        needed = {
            group.id: {
                image.sha256 for one in group.trajectories for step in one.trajectory.steps for image in step.images
            }
            for group in groups
        }
        every = set[bytes]().union(*needed.values())
        if damaged := await self._database.blobs.damaged(every):
            dropped = [name for name, digests in needed.items() if digests & damaged]
            why = (
                f"{len(damaged)} of {len(every)} screenshots that unfinished groups need are gone, empty or changed: "
                f"check the disk of {self._database.blobs.where} (its files may be lost in a power failure, too); the "
                f"{len(dropped)} groups are dropped, and sampling goes on"
            )
            log.warning("%s", why)
            self._journal.event("screenshots_damaged", files=len(damaged), groups=dropped, why=why)
        return damaged

    def _restore(self, group: StoredGroup, losses: int, vocabulary: int | None, damaged: Collection[bytes]) -> None:
        # In a released group, a failure that a pooled success replaced has no advantage.
        is_open = group.state == GroupState.OPEN
        members = [one for one in group.trajectories if is_open or one.advantages]
        problems = ((one.trajectory.id, why_unusable(one.trajectory, vocabulary, one.advantages or None, damaged))
                    for one in members)  # fmt: skip
        why = next((f"{name}: {problem}" for name, problem in problems if problem), "")
        if losses >= MOST_LOSSES:
            why = why or f"the trainer was lost {losses} times while it trained on it"
        trajectories = tuple(one.trajectory for one in members)
        if is_open:
            self._lifecycle.restore_open(group.id, group.task, group.planned, trajectories, group.plan)
            if why:
                self._lifecycle.unusable(group.id, why)
            return
        advantages = tuple(one.advantages for one in members)
        why = why or ("" if members else "none of its trajectories has an advantage")
        released = ReleasedGroup(group.id, trajectories, advantages)
        self._lifecycle.restore_released(released, group.task, group.plan, why, losses)

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()


def _groups_of(event_json: str) -> list[str]:
    """The groups that a "trainer_lost" event names."""
    groups = json.loads(event_json).get("groups", [])
    return [name for name in groups if isinstance(name, str)]


def _rules(config: Config) -> Rules:
    advantage, size = config.trainer.advantage, config.trainer.trajectories_per_update
    return Rules(
        Schedule(config.schedule.sampling, config.schedule.training == "synchronous", config.curation.rollouts, size),
        config.curation.max_staleness,
        Judging(
            level=advantage.level,
            std_normalise=advantage.std_normalise,
            step_weight=advantage.step_weight if advantage.kind == "gigpo" else 0.0,
            gamma=advantage.gamma,
            overlong_penalty=advantage.overlong_penalty,
            overlong_buffer=advantage.overlong_buffer,
            max_tokens=config.rollout.max_tokens,
        ),
        config.sync.every_updates,
    )
