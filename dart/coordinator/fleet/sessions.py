"""The coordinator's end of each worker's session.

`Fleet` owns one `Worker` per worker instance. A `Worker.call` sends one command and waits for its reply; it survives a
lost stream, because commands without an answer are sent again when the same instance comes back within
`lost_after` seconds, and the worker answers each at most once. After that the worker is lost: every waiting call
raises `WorkerLost`. Only Bye means goodbye.

Bounds: callers take a slot before they call (pools), so a worker never has more assignments than slots; the outbox
holds at most those commands and one heartbeat.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dart.screenshots.held import Held
from dart.v1 import session_pb2 as pb
from dart.wire.outbox import BATCHES, Outbox
from dart.wire.role import Command

log = logging.getLogger(__name__)

_COMMAND_FIELDS: dict[type, str] = {
    pb.Reset: "reset", pb.Act: "act", pb.Release: "release", pb.Suggest: "suggest", pb.Generate: "generate",
    pb.Abort: "abort", pb.ReceiveWeights: "receive_weights", pb.LoadWeights: "load_weights",
    pb.TrainBatch: "train_batch", pb.SendWeights: "send_weights", pb.SaveCheckpoint: "save_checkpoint",
}  # fmt: skip

Key = tuple[str, int, int]
STALLED_SECONDS = 2.0
BOUNDED = frozenset({"reset", "act", "suggest", "generate", "release"})
"""Commands whose answers have to come in time. An update takes as long as it takes, transfers have a timeout."""


class InfrastructureError(Exception):
    """A worker, not the policy, is to blame: the attempt is discarded and given out again."""


class WorkerLost(InfrastructureError):
    """The worker left or went silent while a call waited."""


class CommandFailed(InfrastructureError):
    """The worker answered with a Failure."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Pending:
    messages: list[pb.SessionResponse]
    reply: asyncio.Future[Any]
    since: float

    @property
    def kind(self) -> str:
        return self.messages[0].WhichOneof("body") or ""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker instance. `state`: starting (before Ready), ready, lost."""

    hello: pb.Hello
    epoch: int
    state: str = "starting"
    ready: pb.Ready = field(default_factory=pb.Ready)
    last_heard: float = 0.0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    outbox: Outbox[pb.SessionResponse] = field(default_factory=Outbox)
    stale_replies: int = 0
    said_goodbye: bool = False
    _pending: dict[Key, _Pending] = field(default_factory=dict)
    _sequences: dict[tuple[str, int], int] = field(default_factory=dict)
    screenshots: Held[bool] = field(default_factory=lambda: Held(0))
    """The digests of those that the worker keeps: noted when they are sent, as the worker notes them."""
    connections: int = 0

    @property
    def id(self) -> str:
        return self.hello.worker_id

    @property
    def role(self) -> pb.Role:
        return self.hello.role

    @property
    def slots(self) -> int:
        return self.ready.slots

    @property
    def shares_blobs(self) -> bool:
        """It sees the run's directory of screenshots."""
        return bool(self.ready.shares_blobs)

    @property
    def takes_batches(self) -> bool:
        return BATCHES in self.hello.capabilities

    async def call(self, *commands: Command | pb.SessionResponse) -> Any:
        """Send a command (or the pages of one) and return the reply to it, or to its last page.

        The assignment's epoch and sequence are filled in. A command that carries screenshots comes in its message
        already (`dart.wire.convert` says why). Raises CommandFailed when the worker answers with a
        Failure, WorkerLost when it is gone. A cancelled call forgets the reply.
        """
        if self.state == "lost":
            raise WorkerLost(f"worker {self.id} is lost")
        messages = []
        for command in commands:
            message, key = self._number(command)
            messages.append(message)
        pending = _Pending(messages, asyncio.get_running_loop().create_future(), time.monotonic())
        self._pending[key] = pending
        for message in messages:
            self.outbox.put(message)
        try:
            return await pending.reply
        finally:
            self._pending.pop(key, None)

    def tell(self, command: Command) -> None:
        """Send a command whose reply nobody waits for (Abort, which has none; Release, which is sent until it has)."""
        if self.state == "lost":
            return
        message, key = self._number(command)
        if isinstance(command, pb.Release):
            told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            told.add_done_callback(lambda done: (self._pending.pop(key, None), done.cancelled() or done.exception()))
            self._pending[key] = _Pending([message], told, time.monotonic())
        self.outbox.put(message)

    def end_assignment(self, assignment_id: str, attempt: int) -> None:
        """No more commands of this assignment will come: forget its sequence."""
        self._sequences.pop((assignment_id, attempt), None)

    def receive(self, message: pb.SessionRequest) -> None:
        """A reply from the worker: wakes the call that waits for it, or is counted as stale."""
        body: Any = getattr(message, message.WhichOneof("body") or "", None)
        assignment = getattr(body, "assignment", None)
        if assignment is None:
            return
        pending = self._pending.get((assignment.assignment_id, assignment.attempt, assignment.sequence))
        if assignment.epoch != self.epoch or pending is None or pending.reply.done():
            self.stale_replies += 1
            return
        if isinstance(body, pb.Failure):
            pending.reply.set_exception(CommandFailed(body.code, f"{self.id}: {body.message}"))
        else:
            pending.reply.set_result(body)

    def resume(self) -> None:
        """The same instance is back: send what has no answer again."""
        self.outbox = Outbox(self.takes_batches)
        for pending in self._pending.values():
            for message in pending.messages:
                self.outbox.put(message)

    def lose(self, why: str) -> None:
        self.state = "lost"
        self.lost.set()
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(WorkerLost(f"worker {self.id} is lost: {why}"))

    def fail_overdue(self, now: float, seconds: float) -> str:
        """Commands without an answer for `seconds` have failed. Why the worker itself has, or "" if it has not.

        That is when they are half of what it has: then its engine or its browser hangs, though its heartbeats go on.
        """
        waiting = [one for one in self._pending.values() if one.kind in BOUNDED and not one.reply.done()]
        overdue = [one for one in waiting if now - one.since >= seconds]
        if not overdue:
            return ""
        why = f"no answer to {', '.join(sorted({one.kind for one in overdue}))} for {seconds:.0f} s"
        if 2 * len(overdue) >= len(waiting):
            return why
        for one in overdue:
            one.reply.set_exception(CommandFailed(pb.FAILURE_CODE_UNSPECIFIED, f"{self.id}: {why}"))
        return ""

    def _number(self, command: Command | pb.SessionResponse) -> tuple[pb.SessionResponse, Key]:
        """The message, and what its reply is known by."""
        message = command if isinstance(command, pb.SessionResponse) else None
        inside: Any = command if message is None else _command(message)
        assignment = inside.assignment
        name, attempt = work = assignment.assignment_id, assignment.attempt
        sequence = self._sequences.get(work, 0) + 1
        assignment.epoch, assignment.sequence = self.epoch, sequence
        self._sequences[work] = sequence
        if message is None:
            body: Any = {_COMMAND_FIELDS[type(command)]: command}
            message = pb.SessionResponse(**body)
        return message, (name, attempt, sequence)


def _command(message: pb.SessionResponse) -> Any:
    return getattr(message, message.WhichOneof("body") or "")


Listener = Callable[[Worker], None]


class Fleet:
    """Every connected worker. Listeners are called when a worker becomes ready and when it is lost."""

    def __init__(self, lost_after: float, answer_within: float = math.inf) -> None:
        self._lost_after, self._answer_within = lost_after, answer_within
        self._epochs = itertools.count(int(time.time()) << 8)
        self.workers: dict[str, Worker] = {}
        """By instance id; the lost ones are gone."""
        self.on_ready: list[Listener] = []
        self.on_lost: list[Listener] = []

    def of_role(self, role: pb.Role) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def admit(self, hello: pb.Hello) -> tuple[Worker, bool]:
        """The worker of this Hello, and whether it resumes a session that is still remembered."""
        known = self.workers.get(hello.instance_id)
        if known is not None and known.epoch == hello.last_epoch:
            known.resume()
            return known, True
        if known is not None:
            self.lose(known, "it began anew")
        for other in list(self.workers.values()):
            # The same name twice: a restarted worker, whose old stream has not been noticed as dead yet.
            if other.id == hello.worker_id and other.connections == 0:
                self.lose(other, "another instance took its name")
        worker = Worker(hello, next(self._epochs), last_heard=time.monotonic())
        worker.outbox = Outbox(worker.takes_batches)
        self.workers[hello.instance_id] = worker
        return worker, False

    def receive(self, worker: Worker, message: pb.SessionRequest) -> None:
        """The one door for what a worker says after its Hello; the messages of a batch come one by one."""
        match message.WhichOneof("body"):
            case "ready":
                self.became_ready(worker, message.ready)
            case "bye":
                worker.said_goodbye = True
            case "heartbeat":
                pass
            case _:
                worker.receive(message)

    def became_ready(self, worker: Worker, ready: pb.Ready) -> None:
        if worker.state == "ready":
            return
        worker.ready, worker.state = ready, "ready"
        worker.screenshots = Held(ready.image_cache_entries)
        for listener in self.on_ready:
            listener(worker)

    def lose(self, worker: Worker, why: str) -> None:
        if worker.state == "lost":
            return
        was_ready = worker.state == "ready"
        del self.workers[worker.hello.instance_id]
        worker.lose(why)
        log.log(logging.INFO if worker.said_goodbye else logging.WARNING, "worker %s is gone: %s", worker.id, why)
        if was_ready:
            for listener in self.on_lost:
                listener(worker)

    async def reap(self) -> None:
        """Lose every worker that has been silent for `lost_after` seconds, or does not answer. Runs until cancelled.

        One that is lost though it lives dials again, and prepares anew.
        """
        while True:
            now = time.monotonic()
            for worker in list(self.workers.values()):
                if why := worker.fail_overdue(now, self._answer_within):
                    self.lose(worker, why)
            for worker in [w for w in self.workers.values() if now - w.last_heard >= self._lost_after]:
                self.lose(worker, f"silent for {self._lost_after:.0f} s")
            heard = min((worker.last_heard for worker in self.workers.values()), default=now)
            wake = max(heard + self._lost_after, now + 0.5)
            await asyncio.sleep(wake - now)
            if (late := time.monotonic() - wake) > STALLED_SECONDS:
                # This process stood still (its machine was paused, a disk hung), and what came meanwhile is not read
                # yet: nobody was silent.
                log.warning("the coordinator stood still for %.1f s", late)
                for worker in self.workers.values():
                    worker.last_heard = time.monotonic()

    def send_all(self, message: pb.SessionResponse, workers: Sequence[Worker] | None = None) -> None:
        for worker in list(self.workers.values()) if workers is None else workers:
            worker.outbox.put(message)
