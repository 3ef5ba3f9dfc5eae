"""The replicas as one resource: `RolloutPool.generate` asks the replica that `core.fleet.replicas` chooses.

A request waits in a queue while no replica has capacity. It is retried when a replica fails or is lost, elsewhere if
possible, and when a weight update ends it; generating has no side effect, so the episode never notices. The queue needs
no bound of its own: it holds at most one entry per environment.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dart.agent.episode import ContextFull
from dart.coordinator.fleet.prompts import PromptTooLarge, encoded_prompt
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, InfrastructureError, Worker
from dart.core.fleet.replica import Replica, Request
from dart.core.fleet.replicas import Replicas
from dart.core.types import Generation, Prompt
from dart.core.usage import EnvState
from dart.screenshots.stored import ScreenshotLost, StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.rules import Violation

GENERATE_ATTEMPTS = 5
OWN_FAULT = (pb.FAILURE_CODE_INVALID, pb.FAILURE_CODE_CONTEXT_FULL)
"""Failures caused by the request itself, which it would meet on every replica."""


@dataclass(slots=True)
class _Turn:
    """What a replica is asked for. `forced_text`: the turn's text, so that nothing is sampled.

    `with_data`: the replicas to send the bytes of every screenshot, because they lacked one that they were thought to
    have.
    """

    id: str
    prompt: Prompt
    temperature: float
    max_tokens: int
    forced_text: str | None
    attempt: int = 0
    with_data: set[str] = field(default_factory=set)
    declined: bool = False
    """A replica has said that the request itself is wrong."""
    too_large: set[str] = field(default_factory=set)
    """The replicas that the prompt is too large for."""


class RolloutPool:
    """`replicas`: anyone may read it; only this pool and weight sync change it."""

    def __init__(self, fleet: Fleet, screenshots: StoredScreenshots, replicas: Replicas[Worker] | None = None) -> None:
        self.screenshots = screenshots
        self.replicas: Replicas[Worker] = Replicas(time.monotonic()) if replicas is None else replicas
        self.usage = self.replicas.usage
        self.requests = 0
        self._waiting: dict[Request[Worker], asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._alarm = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.replicas.on_change.append(self._replicas_changed)
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)
        fleet.on_slots.append(self._offered)
        self._fleet = fleet

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

        `forced_text`: the turn's text; nothing is sampled, and there are no log-probabilities. `enter` is called with
        QUEUED when the request has to wait for a replica, and with GENERATING when it has got one.

        A replica that says the request itself is wrong is believed when a second one, if there is one, agrees. A prompt
        that is too large for one replica goes to the others.

        Raises ContextFull, and InfrastructureError: after `GENERATE_ATTEMPTS` attempts have failed, with the name of
        the replica that failed last, or without a name when the request itself is invalid.
        """
        turn = _Turn(f"q{next(self._numbers)}", prompt, temperature, max_tokens, forced_text)
        request: Request[Worker] = Request(affinity)
        while True:
            if (replica := self.replicas.take(request, time.monotonic())) is None:
                enter(EnvState.QUEUED)
                replica = await self._wait_for_replica(request)
                enter(EnvState.GENERATING)
            try:
                return await self._attempt(turn, request, replica), replica.name
            except InfrastructureError as error:
                code = error.code if isinstance(error, CommandFailed) else None
                if code in OWN_FAULT and not turn.declined and len(self.replicas) > 1:
                    turn.declined = True  # one that is wrong about it would end the episode: ask another
                    continue
                if code == pb.FAILURE_CODE_CONTEXT_FULL:
                    raise ContextFull(str(error)) from error
                if code == pb.FAILURE_CODE_INVALID:
                    raise InfrastructureError(str(error)) from error
                if code == pb.FAILURE_CODE_UNKNOWN_IMAGE:
                    replica.session.screenshots.forget()
                    turn.with_data.add(replica.name)
                if request.failures >= GENERATE_ATTEMPTS:  # what a weight update ended is nobody's failure
                    raise
            except PromptTooLarge as error:  # another one may keep more screenshots, or take them in parts
                asked_before = replica.name in turn.too_large
                turn.too_large.add(replica.name)
                if asked_before or all(one.name in turn.too_large for one in self.replicas):
                    raise InfrastructureError(str(error)) from error
            except ScreenshotLost as error:
                raise InfrastructureError(str(error)) from error

    async def _attempt(self, turn: _Turn, request: Request[Worker], replica: Replica[Worker]) -> Generation:
        """Ask the replica once, then give it back and report whether it failed."""
        worker, version = replica.session, replica.version
        turn.attempt += 1
        blame, served, declined = "", False, False
        try:
            message, prompt = await self._message(turn, worker)
            generation: Generation = await worker.call(message, rest=prompt)
            self.requests += 1
            served = True
            return generation
        except InfrastructureError as error:
            declined = isinstance(error, CommandFailed) and error.code in OWN_FAULT
            if not _excused(error, turn, replica, version):
                blame = str(error)
            raise
        except PromptTooLarge:
            declined = True
            raise
        except asyncio.CancelledError:
            worker.tell(pb.Abort(assignment=pb.Assignment(assignment_id=turn.id, attempt=turn.attempt)))
            raise
        finally:
            worker.end_assignment(turn.id, turn.attempt)
            now = time.monotonic()
            if served:
                self.replicas.served(request, now)
            elif blame:
                self.replicas.failed(request, blame, now)
            elif declined:
                self.replicas.declined(request, now)
            else:
                self.replicas.ended(request, now)
            if self._waiting:
                self._grant()

    async def _message(self, turn: _Turn, worker: Worker) -> tuple[pb.SessionResponse, Sequence[bytes]]:
        """(a Generate without its prompt, the encoded prompt)."""
        message = pb.SessionResponse()
        request = message.generate  # filled in place, as for Act
        assignment, sampling = request.assignment, request.sampling
        assignment.assignment_id, assignment.attempt = turn.id, turn.attempt
        sampling.temperature, sampling.max_tokens = turn.temperature, turn.max_tokens
        if turn.forced_text is not None:
            request.forced_text = turn.forced_text
        with_data = worker.id in turn.with_data
        return message, await encoded_prompt(request, turn.prompt, worker, self.screenshots, with_data)

    # ---- the queue ----

    async def _wait_for_replica(self, request: Request[Worker]) -> Replica[Worker]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request] = granted
        self.replicas.wait(request)
        self._set_timer()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self.replicas.withdraw(request)
            else:
                self.replicas.ended(request, time.monotonic())
                self._grant()
            raise
        finally:
            del self._waiting[request]
        assert request.replica is not None, "it was granted"
        return request.replica

    def _grant(self) -> None:
        """Give replicas to waiting requests."""
        while granted := self.replicas.grants(time.monotonic()):
            for request in granted:
                if self._waiting[request].done():  # its episode has just been cancelled
                    self.replicas.ended(request, time.monotonic())
                else:
                    self._waiting[request].set_result(None)

    def _replicas_changed(self) -> None:
        self._grant()
        self._set_timer()

    def _set_timer(self) -> None:
        """Apply changes that are due because time has passed."""
        now = time.monotonic()
        alarm = self.replicas.next_alarm(now)
        if alarm == self._alarm:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._alarm, self._timer = alarm, None
        if alarm < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, alarm - now), self._alarmed)

    def _alarmed(self) -> None:
        self._alarm, self._timer = math.inf, None
        self.replicas.time_passed(time.monotonic())

    # ---- joining and leaving ----

    def _joined(self, worker: Worker) -> None:
        if worker.role == pb.ROLE_ROLLOUT:
            self.replicas.join(worker.id, worker.slots, worker.ready.weight_version, worker, time.monotonic())

    def _offered(self, worker: Worker, slots: pb.Slots) -> None:
        """The replica's KV cache has room for another number of requests."""
        replica = self.replicas.get(worker.id)
        if replica is None or replica.session is not worker:
            return
        if not 1 <= slots.count <= worker.ready.slots:
            rule = f"from 1 to {worker.ready.slots}, the slots of its Ready"
            self._fleet.broke(worker, Violation("Slots.count", f"{slots.count}", rule))
        elif slots.count != replica.slots:
            self.replicas.resize(replica, slots.count, time.monotonic())

    def _left(self, worker: Worker) -> None:
        replica = self.replicas.get(worker.id)
        if replica is not None and replica.session is worker:  # else another instance has replaced it
            self.replicas.leave(replica, time.monotonic(), for_good=worker.said_goodbye)


def _excused(error: InfrastructureError, turn: _Turn, replica: Replica[Worker], version: int) -> bool:
    """The replica is not to blame: the request was invalid, it was updated, or a screenshot was wrongly left out.

    `version`: the replica's weight version when it was asked.
    """
    if not isinstance(error, CommandFailed):
        return False
    if error.code == pb.FAILURE_CODE_ABORTED:
        return replica.target is not None or not replica.serving or replica.version != version
    if error.code == pb.FAILURE_CODE_UNKNOWN_IMAGE:
        return replica.name not in turn.with_data
    return error.code in OWN_FAULT
