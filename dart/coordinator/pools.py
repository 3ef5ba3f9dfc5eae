"""The fleet as resources: environments to hold for an episode, replicas to generate with.

`EnvPool` owns which environments are free: `acquire` waits for one, first come first served. `RolloutPool` owns the
replicas' load: `generate` goes to whichever replica has capacity, waits in line while none has, and is made again
elsewhere when a replica is lost or ends the request for a weight update; generating has no side effect, so the
episode never notices. Lines have no bound of their own: at most one entry per environment stands in them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable

from dart.agent.episode import ContextFull
from dart.coordinator.screenshots import Screenshots
from dart.coordinator.sessions import CommandFailed, Fleet, InfrastructureError, Worker, WorkerLost
from dart.core.action import Action
from dart.core.groups import Order
from dart.core.routing import Replica, Router
from dart.core.types import Generation, Observation, Prompt, Task
from dart.core.usage import EnvState, Ledger, ReplicaState, rest_seconds
from dart.v1 import session_pb2 as pb
from dart.wire.convert import (
    action_from_proto,
    generation_from_proto,
    observation_from_proto,
    task_to_proto,
    write_action,
    write_prompt,
)

GENERATE_ATTEMPTS = 5


class EnvPool:
    def __init__(self, fleet: Fleet) -> None:
        now = time.monotonic()
        self.usage = Ledger(set(EnvState) - {EnvState.IDLE, EnvState.RESTING, EnvState.LOST}, now)
        self.usage.blame(EnvState.RESTING, "one attempt after the other failed", now)
        self.slots = 0
        self._failures: Counter[str] = Counter()
        """Of each worker, since an attempt on it ended well."""
        self._live: dict[str, Worker] = {}
        self._free: deque[Worker] = deque()
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

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
        self._assignment = pb.Assignment(assignment_id=order.trajectory_id, attempt=order.attempt)

    async def reset(self, task: Task) -> Observation:
        self.enter(EnvState.RESETTING)
        reply = await self._worker.call(pb.Reset(assignment=self._assignment, task=task_to_proto(task)))
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
        self.enter(EnvState.GENERATING)
        return observation_from_proto(reply)

    async def suggest(self) -> Action | None:
        """What the scripted oracle would do next; None when it finds no way on."""
        reply = await self._worker.call(pb.Suggest(assignment=self._assignment))
        return action_from_proto(reply.action) if reply.HasField("action") else None

    def enter(self, state: EnvState) -> None:
        """Account for the environment's time."""
        self._pool.move(self._worker, self._state, state)
        self._state = state

    def close(self) -> None:
        """The environment is free again; also when the episode was cancelled, so nothing is awaited."""
        self.enter(EnvState.IDLE)
        self._worker.tell(pb.Release(assignment=self._assignment))
        self._worker.end_assignment(self._assignment.assignment_id, self._assignment.attempt)


class RolloutPool:
    def __init__(self, fleet: Fleet, screenshots: Screenshots) -> None:
        self.screenshots = screenshots
        self.router = Router()
        self.usage = Ledger({ReplicaState.BUSY}, time.monotonic())
        self.requests = 0
        self.on_rotation: list[Callable[[], None]] = []
        """Called when a replica was taken out of the rotation or put back, has come or is gone."""
        self._states: dict[str, ReplicaState] = {}
        self._workers: dict[str, Worker] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._numbers = itertools.count(1)
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def generate(
        self,
        prompt: Prompt,
        temperature: float,
        max_tokens: int,
        affinity: str | None,
        forced_text: str | None = None,
        enter: Callable[[EnvState], None] = lambda state: None,
    ) -> tuple[Generation, str]:
        """One turn of the policy, and the replica that served it. `affinity`: the replica of the last turn.

        `forced_text`: nothing is sampled, this is the turn; it has no log-probabilities. `enter` is told when the
        request has to stand in line, and when a replica has it then.

        Raises InfrastructureError after `GENERATE_ATTEMPTS` replicas have failed, or when the request itself is
        invalid, and ContextFull.
        """
        number = next(self._numbers)
        with_data = False
        for attempt in range(1, GENERATE_ATTEMPTS + 1):
            if (replica := self._taken(affinity)) is None:
                enter(EnvState.QUEUED)
                replica = await self._wait_for_one(affinity)
                enter(EnvState.GENERATING)
            worker = self._workers[replica.id]
            try:
                message = pb.SessionResponse()
                request = message.generate  # in place, as for Act
                request.assignment.assignment_id, request.assignment.attempt = f"q{number}", attempt
                request.sampling.temperature, request.sampling.max_tokens = temperature, max_tokens
                if forced_text is not None:
                    request.forced_text = forced_text
                write_prompt(request, prompt)
                await self._fill_screenshots(request, prompt, worker, with_data)
                reply = await worker.call(message)
                self.requests += 1
                return _checked(generation_from_proto(reply), replica.id, forced_text is not None), replica.id
            except CommandFailed as error:
                if error.code == pb.FAILURE_CODE_INVALID:
                    raise
                if error.code == pb.FAILURE_CODE_CONTEXT_FULL:
                    raise ContextFull(str(error)) from error
                if error.code == pb.FAILURE_CODE_UNKNOWN_IMAGE:
                    worker.forget_images()
                    with_data = True
                last: InfrastructureError = error
            except WorkerLost as error:
                last = error
            except asyncio.CancelledError:
                worker.tell(pb.Abort(assignment=pb.Assignment(assignment_id=f"q{number}", attempt=attempt)))
                raise
            finally:
                worker.end_assignment(f"q{number}", attempt)
                self._give_back(replica)
        raise last

    def set_serving(self, replica_id: str, serving: bool) -> None:
        """Take a replica out of the rotation for a weight update, or put it back."""
        if replica := self.router.replicas.get(replica_id):
            self.router.set_serving(replica, serving)
            self._account(replica)
            self._rotated()
            self._wake()

    def set_version(self, replica_id: str, version: int) -> None:
        if replica := self.router.replicas.get(replica_id):
            self.router.set_version(replica, version)

    async def _fill_screenshots(self, request: pb.Generate, prompt: Prompt, worker: Worker, with_data: bool) -> None:
        """The bytes of those screenshots that the worker does not hold; `with_data`: of all.

        Those that the run's store alone has are read first, and in the end all is decided in one go: what the worker
        holds changes with every request, in the order in which they are sent.
        """
        stored: dict[bytes, bytes] = {}
        if with_data or not worker.shares_blobs:
            while wanted := [
                image
                for image in prompt.images
                if not (image.data or image.sha256 in stored) and (with_data or not worker.keeps_image(image.sha256))
            ]:
                stored |= await self.screenshots.missing(wanted)
        start = 0
        for block in prompt.blocks:
            for place, image in block.images:
                if with_data or not worker.holds_image(image.sha256):
                    # One that shares the store keeps what it reads there, as if it had been sent.
                    worker.sent_image(image.sha256)
                    if data := image.data or stored.get(image.sha256):
                        request.prompt[start + place].image.data = data
            start += len(block.parts)

    def _taken(self, affinity: str | None) -> Replica | None:
        """A replica with capacity, which has this request now."""
        if replica := self.router.take(affinity):
            self._account(replica)
        return replica

    async def _wait_for_one(self, affinity: str | None) -> Replica:
        while (replica := self._taken(affinity)) is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()
                raise
        return replica

    def _give_back(self, replica: Replica) -> None:
        if not self.router.give_back(replica):
            return  # the replica left, and took its time with it
        self._account(replica)
        self._wake()

    def _rotated(self) -> None:
        for listener in self.on_rotation:
            listener()

    def _account(self, replica: Replica) -> None:
        """Book the replica's time from here on to what it does now."""
        serves = ReplicaState.IDLE if replica.serving else ReplicaState.SYNCING
        state = ReplicaState.BUSY if replica.busy else serves
        if (old := self._states[replica.id]) is not state:
            self._states[replica.id] = state
            self.usage.move(replica.id, old, state, time.monotonic())

    def _wake(self) -> None:
        free = self.router.free
        while self._waiting and free > 0:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    def _joined(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ROLLOUT:
            return
        self._workers[worker.id] = worker
        self.router.join(Replica(worker.id, worker.slots, worker.ready.weight_version))
        now = time.monotonic()
        if self.usage.counts(worker.id):
            self.usage.left(worker.id, now)
        self._states[worker.id] = ReplicaState.IDLE
        self.usage.joined(worker.id, ReplicaState.IDLE, 1, now)
        self._rotated()
        self._wake()

    def _left(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ROLLOUT:
            return
        if self._workers.get(worker.id) is not worker:
            return  # another instance of this name has taken its place
        del self._workers[worker.id]
        self.router.leave(worker.id)
        self.usage.lost(worker.id, ReplicaState.LOST, time.monotonic(), for_good=worker.said_goodbye)
        self._rotated()


def _checked(generation: Generation, replica: str, forced: bool) -> Generation:
    """Refuses sampled tokens without a log-probability each: in training they would pass for on-policy ones."""
    wanted = 0 if forced else len(generation.token_ids)
    if len(generation.logprobs) != wanted:
        raise InfrastructureError(
            f"{replica} answered {len(generation.token_ids)} {'forced' if forced else 'sampled'} tokens "
            f"with {len(generation.logprobs)} log-probabilities, not {wanted}: update dart on that machine"
        )
    if not all(map(math.isfinite, generation.logprobs)):
        raise InfrastructureError(f"{replica} answered a log-probability that is not finite")
    return generation
