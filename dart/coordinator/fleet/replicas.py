"""The replicas as one resource: `RolloutPool.generate` goes to whichever replica has capacity.

A request waits in line while no replica has capacity, and is made again elsewhere when a replica is lost or ends the
request for a weight update; generating has no side effect, so the episode never notices. The line has no bound of its
own: at most one entry per environment stands in it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable

from dart.agent.episode import ContextFull
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, InfrastructureError, Worker, WorkerLost
from dart.core.routing import Replica, Router
from dart.core.types import Generation, Prompt
from dart.core.usage import EnvState, Ledger, ReplicaState
from dart.screenshots.stored import ScreenshotLost, StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.convert import generation_from_proto, write_prompt

GENERATE_ATTEMPTS = 5


class RolloutPool:
    def __init__(self, fleet: Fleet, screenshots: StoredScreenshots) -> None:
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
                    worker.screenshots.forget()
                    with_data = True
                last: InfrastructureError = error
            except WorkerLost as error:
                last = error
            except ScreenshotLost as error:
                raise InfrastructureError(str(error)) from error
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
                if not (image.data or image.sha256 in stored) and (with_data or image.sha256 not in worker.screenshots)
            ]:
                stored |= await self.screenshots.missing(wanted)
        start = 0
        for block in prompt.blocks:
            for place, image in block.images:
                held = image.sha256 in worker.screenshots
                if (with_data or not held) and (data := image.data or stored.get(image.sha256)):
                    request.prompt[start + place].image.data = data
                # A worker that shares the store keeps what it reads there, as if it had been sent.
                worker.screenshots.note(image.sha256, True)
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
