"""The environments as a resource: `EnvPool.acquire` waits for a free one, first come first served.

`EnvPool` knows which environments are free; `EnvSession` is one episode's hold on one. A worker may change how many it
offers at any time (`core.fleet.credits`): environments boot, are renewed after each episode, and may fail to come back.
The queue needs no bound of its own: each loop that samples has at most one entry in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from dart.coordinator.fleet.boundary import broken_screenshot
from dart.coordinator.fleet.sessions import (
    CommandFailed,
    Fleet,
    InfrastructureError,
    RuleBroken,
    SetUpFailed,
    Worker,
)
from dart.core.action import Action, Observe, Several, Single
from dart.core.curation.orders import Order
from dart.core.fleet.credits import Credits
from dart.core.fleet.pace import Pace
from dart.core.learning.recent import Attempts
from dart.core.types import Image, Observation, Task
from dart.core.usage import WITHIN_EPISODE, EnvState, Ledger, rest_seconds
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import SLOTS, has
from dart.wire.convert import action_from_proto, observation_from_proto, task_to_proto, write_single
from dart.wire.rules import Violation

log = logging.getLogger(__name__)


class Underway:
    """The episodes that run now; the screenshots that they have seen must not be removed."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Marks an episode as running, from its first screenshot until it is stored or has failed."""
        name = object()
        self._began[name] = time.time()
        try:
            yield
        finally:
            del self._began[name]

    @property
    def oldest(self) -> float:
        """When the oldest running episode began (Unix seconds), or infinity."""
        return min(self._began.values(), default=math.inf)


@dataclass(slots=True, eq=False)
class _Member:
    """A live worker with its environments."""

    worker: Worker
    credits: Credits
    failures: int = 0
    """Failed attempts since its last good one."""
    resting: int = 0
    parked: int = 0
    """Of the environments that rest, those that do because the worker broke rules."""


class EnvPool:
    def __init__(self, fleet: Fleet) -> None:
        now = time.monotonic()
        self.usage = Ledger(WITHIN_EPISODE, now)
        self.usage.blame(EnvState.RESTING, "its worker's attempts failed, or it broke rules", now)
        self.pace = Pace()
        self.attempts = Attempts()
        self.slots = 0
        """Environments of all workers, free or not."""
        self.underway = Underway()
        self._fleet = fleet
        self._members: dict[str, _Member] = {}
        """By the worker's name."""
        self._free: deque[_Member] = deque()
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        fleet.on_ready.append(self._joined)
        fleet.on_slots.append(self._offered)
        fleet.on_lost.append(self._left)

    @property
    def workers(self) -> int:
        """Env workers that are there now."""
        return len(self._members)

    def failures(self, worker_id: str) -> int:
        """The worker's attempts that have failed since its last good one."""
        member = self._members.get(worker_id)
        return member.failures if member else 0

    async def acquire(self) -> Worker:
        """A worker with a free environment, which is now held until `EnvSession` or `give_back` frees it."""
        while self._free:
            member = self._free.popleft()
            if member.credits.free > 0:  # else its worker took this one back
                if not self._may_work(member):
                    self._park(member)
                    continue
                member.credits.take()
                return member.worker
        waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(waiter.result())
            raise

    def give_back(self, worker: Worker) -> None:
        """Free the environment that `acquire` gave, when no episode was begun on it."""
        if member := self._member(worker):
            member.credits.give_back()
            self._fleet.boundary.conduct.ended(worker.role_and_id, well=False)
            self._give(member)

    def begun(self, worker: Worker) -> None:
        """An episode begins on the environment that `acquire` gave."""
        if member := self._member(worker):
            member.credits.begin()

    def ended(self, worker: Worker, failed: bool | None) -> None:
        """An episode is over. Its environment is free again now, or when its worker says so.

        `failed`: True if the attempt failed and this worker is to blame, so that the environment may have to rest
        first; False if it went well; None if another worker ended it, or it was cancelled.
        """
        if member := self._member(worker):
            if failed is not None:
                member.failures = member.failures + 1 if failed else 0
            restored = self._fleet.boundary.conduct.ended(worker.role_and_id, well=failed is False)
            self._unpark(member, member.parked if restored else 1)
            for _ in range(member.credits.end()):
                self._freed(member)

    def broke(self, worker: Worker, broken: Violation) -> None:
        self._fleet.boundary.broke(worker, broken)

    def after_an_episode(self, worker: Worker) -> EnvState:
        member = self._member(worker)
        return EnvState.RENEWING if member and member.credits.elastic else EnvState.IDLE

    def _member(self, worker: Worker) -> _Member | None:
        """None once the worker is lost."""
        member = self._members.get(worker.id)
        return member if member and member.worker is worker else None

    def _freed(self, member: _Member) -> None:
        """An environment becomes free; if its worker's attempts have failed, it has to rest first."""
        if seconds := rest_seconds(member.failures, max(1, member.worker.slots)):
            self._rest(member)
            asyncio.get_running_loop().call_later(seconds, self._rested, member)
        else:
            self._give(member)

    def _rest(self, member: _Member) -> None:
        member.resting += 1
        self.move(member.worker, EnvState.IDLE, EnvState.RESTING)

    def _rested(self, member: _Member) -> None:
        if self._members.get(member.worker.id) is member:
            member.resting -= 1
            self.move(member.worker, EnvState.RESTING, EnvState.IDLE)
            self._give(member)

    def _give(self, member: _Member) -> None:
        if member.credits.free <= 0:
            return
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if not self._waiting:
            self._free.append(member)
        elif self._may_work(member):
            member.credits.take()
            self._waiting.popleft().set_result(member.worker)
        else:
            self._park(member)

    # ---- workers that broke rules (`core.fleet.conduct`) ----

    def _may_work(self, member: _Member) -> bool:
        return self._fleet.boundary.conduct.may_work(member.worker.role_and_id, time.monotonic())

    def _park(self, member: _Member) -> None:
        """A free environment whose worker may have no work now, or no more than it has."""
        member.parked += 1
        self._rest(member)
        if seconds := self._fleet.boundary.conduct.seconds_left(member.worker.role_and_id, time.monotonic()):
            asyncio.get_running_loop().call_later(seconds, self._unpark, member, 1)

    def _unpark(self, member: _Member, environments: int) -> None:
        for _ in range(min(environments, member.parked)):
            member.parked -= 1
            self._rested(member)

    def move(self, worker: Worker, old: EnvState, new: EnvState) -> None:
        """Record that one of the worker's environments changed state; ignored after the worker is lost."""
        if self._member(worker):
            self.usage.move(worker.id, old, new, time.monotonic())

    # ---- workers ----

    def _joined(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ENV:
            return
        if other := self._members.get(worker.id):
            self._left(other.worker)
        now = time.monotonic()
        if self.usage.counts(worker.id):
            self.usage.left(worker.id, now)
        credits = Credits(elastic=has(worker.hello, SLOTS), most=worker.ready.slots)
        member = self._members[worker.id] = _Member(worker, credits)
        slots = 0 if credits.elastic else worker.slots
        self.slots += slots
        self.usage.joined(worker.id, EnvState.IDLE, slots, now)
        for _ in range(credits.offered(slots, slots, 0)):
            self._give(member)

    def _offered(self, worker: Worker, slots: pb.Slots) -> None:
        """The worker reports a change in its environments, or in which of them are ready."""
        member = self._member(worker)
        if member is None or not member.credits.elastic:
            return
        credits = member.credits
        before = credits.count
        try:
            more = credits.offered(slots.count, slots.granted, slots.booting, slots.quarantined)
        except ValueError as error:
            shown = f"count {slots.count}, granted {slots.granted}, booting {slots.booting}"
            shown += f", quarantined {slots.quarantined}"
            self._fleet.broke(worker, Violation("Slots", shown, str(error)))
            return
        self.slots += credits.count - before
        worker.last_failure = slots.reason or worker.last_failure
        if slots.reason and credits.count < before:
            log.warning("worker %s has %d of %d environments: %s", worker.id, slots.count, worker.slots, slots.reason)
        now = time.monotonic()
        for state, number in (
            (EnvState.IDLE, max(0, credits.idle - member.resting)),
            (EnvState.RENEWING, credits.renewing),
            (EnvState.BOOTING, credits.booting),
            (EnvState.QUARANTINED, credits.quarantined),
            (EnvState.MISSING, credits.missing),
        ):
            self.usage.resize(worker.id, state, number, now)
        for _ in range(more):
            self._freed(member)

    def _left(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ENV:
            return
        if member := self._member(worker):
            self.slots -= member.credits.count
            del self._members[worker.id]
            self._free = deque(one for one in self._free if one is not member)
            self._fleet.boundary.conduct.ended(worker.role_and_id, well=False)
            self.usage.lost(worker.id, EnvState.LOST, time.monotonic(), for_good=worker.said_goodbye)


class EnvSession:
    """One episode's hold on an environment that `EnvPool.acquire` gave (`dart.agent.episode.Env`)."""

    def __init__(self, pool: EnvPool, worker: Worker, order: Order) -> None:
        self._pool, self._worker = pool, worker
        self._state = EnvState.IDLE
        self._answered = time.monotonic()
        self._begun = self._closed = False
        self._assignment = pb.Assignment(assignment_id=order.trajectory_id, attempt=order.attempt)

    @property
    def worker(self) -> str:
        """The name of the worker that it is on."""
        return self._worker.id

    async def reset(self, task: Task) -> Observation:
        """Raises SetUpFailed, among others."""
        if not self._begun:
            self._begun = True
            self._pool.begun(self._worker)
        self.enter(EnvState.RESETTING)
        try:
            reply = await self._worker.call(pb.Reset(assignment=self._assignment, task=task_to_proto(task)))
        except RuleBroken:
            raise
        except CommandFailed as error:
            certain = error.code == pb.FAILURE_CODE_TASK
            raise SetUpFailed(str(error), error.worker or self._worker.id, certain) from None
        self._count_answer()
        self.enter(EnvState.GENERATING)
        return self._seen(observation_from_proto(reply))

    async def act(self, action: Action, last: bool) -> Observation:
        """Carry the action out; several of them one by one, until one fails or the episode is over."""
        if isinstance(action, Several):
            return await self._act_in_turn(action.actions, last)
        self.enter(EnvState.ACTING)
        message = pb.SessionResponse()
        command = message.act  # filled in place, because assigning a nested message copies it
        command.assignment.CopyFrom(self._assignment)
        write_single(command.action, action)
        command.last = last
        try:
            reply = await self._worker.call(message)
        except CommandFailed as error:
            error.at_verdict = last
            raise
        self._count_answer()
        self.enter(EnvState.GENERATING)
        return self._seen(observation_from_proto(reply))

    async def _act_in_turn(self, actions: Sequence[Single], last: bool) -> Observation:
        for number, one in enumerate(actions, 1):
            observation = await self.act(one, last and number == len(actions))
            if observation.done:
                return observation
            if observation.last_action_error and number < len(actions):
                # The others were meant for what this one should have brought about.
                return await self.act(Observe(), True) if last else observation
        return observation

    async def judge(self) -> Observation | None:
        """The world's verdict on the state as it is, as at the step limit. None if that fails: it decides nothing."""
        try:
            verdict = await self.act(Observe(), True)
        except InfrastructureError as error:
            log.info("%s: the state was not judged: %s", self._assignment.assignment_id, error)
            return None
        return verdict if verdict.done else None

    async def suggest(self) -> Action | None:
        """What the scripted oracle would do next; None when it does not know how to continue."""
        reply = await self._worker.call(pb.Suggest(assignment=self._assignment))
        return action_from_proto(reply.action) if reply.HasField("action") else None

    def answer_for(self, images: Iterable[Image]) -> None:
        """Somebody could not use these screenshots. Raises RuleBroken where this environment sent other bytes than it
        said."""
        for image in images:
            if image.data and hashlib.sha256(image.data).digest() != image.sha256:
                self._broke(
                    Violation("Observed.image: Image.data", f"{len(image.data):,} bytes", "those that sha256 is of")
                )

    def _seen(self, observation: Observation) -> Observation:
        for image in (observation.image, *observation.goal_images):
            if broken := broken_screenshot(image, shared=self._worker.shares_blobs):
                self._broke(broken)
        return observation

    def _broke(self, broken: Violation) -> NoReturn:
        self._pool.broke(self._worker, broken)
        raise RuleBroken(self._worker.id, broken)

    def _count_answer(self) -> None:
        now = time.monotonic()
        self._pool.pace.answered(now - self._answered)
        self._answered = now

    def enter(self, state: EnvState) -> None:
        """Account for the environment's time."""
        self._pool.move(self._worker, self._state, state)
        self._state = state

    def close(self, failed: bool | None = None) -> None:
        """End the episode, also when it was cancelled or never began. Awaits nothing. Call once."""
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            self._pool.give_back(self._worker)
            return
        self.enter(self._pool.after_an_episode(self._worker))
        self._worker.tell(pb.Release(assignment=self._assignment))
        self._worker.end_assignment(self._assignment.assignment_id, self._assignment.attempt)
        self._pool.ended(self._worker, failed)
