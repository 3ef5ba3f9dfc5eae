"""The environments as a resource: `EnvPool.acquire` waits for a free one, first come first served.

`EnvPool` owns which environments are free; `EnvSession` is one episode's hold on one. The line has no bound of its own:
at most one entry stands in it for each loop that samples.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.core.action import Action
from dart.core.curation.orders import Order
from dart.core.pace import Pace
from dart.core.types import Observation, Task
from dart.core.usage import EnvState, Ledger, rest_seconds
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_from_proto, observation_from_proto, task_to_proto, write_action


class Underway:
    """The episodes that run now: what they have seen must not be removed."""

    def __init__(self) -> None:
        self._began: dict[object, float] = {}

    @contextmanager
    def episode(self) -> Iterator[None]:
        """One runs, from its first screenshot until it is stored or has failed."""
        name = object()
        self._began[name] = time.time()
        try:
            yield
        finally:
            del self._began[name]

    @property
    def oldest(self) -> float:
        """When the oldest of them began (Unix seconds), or infinity."""
        return min(self._began.values(), default=math.inf)


class EnvPool:
    def __init__(self, fleet: Fleet) -> None:
        now = time.monotonic()
        self.usage = Ledger(set(EnvState) - {EnvState.IDLE, EnvState.RESTING, EnvState.LOST}, now)
        self.usage.blame(EnvState.RESTING, "one attempt after the other failed", now)
        self.pace = Pace()
        self.slots = 0
        self.underway = Underway()
        self._failures: Counter[str] = Counter()
        """Of each worker, since an attempt on it ended well."""
        self._live: dict[str, Worker] = {}
        self._free: deque[Worker] = deque()
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

    def failures(self, worker_id: str | None = None) -> int:
        """Attempts that have failed since the last good one of this worker, or of each; of all together."""
        return self._failures.total() if worker_id is None else self._failures[worker_id]

    async def acquire(self) -> Worker:
        """A worker with a free environment, which is now held; give it back with `release`."""
        while self._free:
            worker = self._free.popleft()
            if worker.state == "ready":
                return worker
        waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(waiter.result())
            raise

    def release(self, worker: Worker, failed: bool = False) -> None:
        """The environment that `acquire` gave is free. `failed`: its attempt did; then it may have to rest first."""
        if worker.state != "ready":
            return
        self._failures[worker.id] = self._failures[worker.id] + 1 if failed else 0
        if seconds := rest_seconds(self._failures[worker.id], worker.slots):
            self.move(worker, EnvState.IDLE, EnvState.RESTING)
            asyncio.get_running_loop().call_later(seconds, self._rested, worker)
        else:
            self._give(worker)

    def _rested(self, worker: Worker) -> None:
        if worker.state == "ready":
            self.move(worker, EnvState.RESTING, EnvState.IDLE)
            self._give(worker)

    def _give(self, worker: Worker) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._free.append(worker)

    def move(self, worker: Worker, old: EnvState, new: EnvState) -> None:
        """One of the worker's environments changes; after the worker is lost nothing does."""
        if self._live.get(worker.id) is worker:
            self.usage.move(worker.id, old, new, time.monotonic())

    def _joined(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ENV:
            return
        self.slots += worker.slots
        now = time.monotonic()
        if self.usage.counts(worker.id):
            self.usage.left(worker.id, now)
        self._live[worker.id] = worker
        self.usage.joined(worker.id, EnvState.IDLE, worker.slots, now)
        for _ in range(worker.slots):
            self._give(worker)

    def _left(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ENV:
            return
        self.slots -= worker.slots
        self._failures.pop(worker.id, None)
        if self._live.get(worker.id) is worker:
            del self._live[worker.id]
            self.usage.lost(worker.id, EnvState.LOST, time.monotonic(), for_good=worker.said_goodbye)
        self._free = deque(w for w in self._free if w is not worker)


class EnvSession:
    """One episode's hold on an environment (`dart.agent.episode.Env`)."""

    def __init__(self, pool: EnvPool, worker: Worker, order: Order) -> None:
        self._pool, self._worker = pool, worker
        self._state = EnvState.IDLE
        self._answered = time.monotonic()
        self._assignment = pb.Assignment(assignment_id=order.trajectory_id, attempt=order.attempt)

    async def reset(self, task: Task) -> Observation:
        self.enter(EnvState.RESETTING)
        reply = await self._worker.call(pb.Reset(assignment=self._assignment, task=task_to_proto(task)))
        self._count_answer()
        self.enter(EnvState.GENERATING)
        return observation_from_proto(reply)

    async def act(self, action: Action, last: bool) -> Observation:
        self.enter(EnvState.ACTING)
        message = pb.SessionResponse()
        command = message.act  # in place: each level of nesting would be copied
        command.assignment.CopyFrom(self._assignment)
        write_action(command.action, action)
        command.last = last
        reply = await self._worker.call(message)
        self._count_answer()
        self.enter(EnvState.GENERATING)
        return observation_from_proto(reply)

    async def suggest(self) -> Action | None:
        """What the scripted oracle would do next; None when it finds no way on."""
        reply = await self._worker.call(pb.Suggest(assignment=self._assignment))
        return action_from_proto(reply.action) if reply.HasField("action") else None

    def _count_answer(self) -> None:
        now = time.monotonic()
        self._pool.pace.answered(now - self._answered)
        self._answered = now

    def enter(self, state: EnvState) -> None:
        """Account for the environment's time."""
        self._pool.move(self._worker, self._state, state)
        self._state = state

    def close(self) -> None:
        """The environment is free again; also when the episode was cancelled, so nothing is awaited."""
        self.enter(EnvState.IDLE)
        self._worker.tell(pb.Release(assignment=self._assignment))
        self._worker.end_assignment(self._assignment.assignment_id, self._assignment.attempt)
