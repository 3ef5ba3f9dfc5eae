"""A simulated worker's connection, with everything that a network and a bad worker can do to it.

`Link` has the worker's end of the session (`dart.wire.session.WorkerEnd`, the real one) and replaces the streams:
messages may come twice, late, out of order or not at all; the stream may be cut, and is dialled again; the process may
be gone for a while and come back as another instance. The link's own random numbers decide all of it, so a seed
determines the whole history.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.simulation.workers import SimulatedWorker
from dart.coordinator.fleet.sessions import Fleet, Rejected, Worker
from dart.v1 import session_pb2 as pb
from dart.wire.outbox import whole
from dart.wire.session import WorkerEnd, assignment_of

HEARTBEAT_SECONDS = 5.0
REDIAL_SECONDS = (0.1, 2.0)
"""How long a worker waits before it dials again because the coordinator has hung up."""
Mutate = Callable[[pb.SessionRequest, random.Random], pb.SessionRequest]


@dataclass
class Trouble:
    """What is wrong with a link or its worker now. Shares are fractions of the messages, from 0 to 1."""

    duplicated: float = 0.0
    late: float = 0.0
    latest_seconds: float = 5.0
    late_until: float = 0.0
    """No message that was late arrives after this time."""
    failing: pb.FailureCode = pb.FAILURE_CODE_UNSPECIFIED
    """The failure code that every command is answered with; unspecified: none."""
    hung: bool = False
    """Commands wait, but heartbeats continue."""
    garbled: Mutate | None = None
    """Applied to the next reply, to corrupt it."""


class Links:
    """All connections of one coordinator's life (`workers.Connects`)."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self.fleet, self._chance = fleet, chance
        self.of: dict[str, Link] = {}
        """The links, by worker name."""

    def connect(self, worker: SimulatedWorker, hello: pb.Hello, ready: pb.Ready) -> Callable[[pb.SessionRequest], None]:
        link = Link(self.fleet, worker, hello, ready, random.Random(self._chance.getrandbits(64)))
        self.of[hello.worker_id] = link
        link.dial()
        return link.reply

    def close(self) -> None:
        for link in self.of.values():
            link.close()


class Link:
    def __init__(
        self, fleet: Fleet, simulated: SimulatedWorker, hello: pb.Hello, ready: pb.Ready, chance: random.Random
    ) -> None:
        self._fleet, self._simulated, self._hello, self._ready, self._chance = fleet, simulated, hello, ready, chance
        self._loop = asyncio.get_running_loop()
        self.end = WorkerEnd(self)
        self.worker: Worker | None = None
        self.trouble = Trouble()
        self.rejections = 0
        self._stream = 0
        """The number of the stream that is up; 0: none."""
        self._streams = itertools.count(1)
        self._timers: set[asyncio.TimerHandle] = set()
        self._dialling: asyncio.TimerHandle | None = None
        self._held: list[pb.SessionResponse] = []
        """Commands that arrived while it hung."""
        self._over = False

    # ---- the stream ----

    @property
    def name(self) -> str:
        return self._hello.worker_id

    @property
    def up(self) -> bool:
        return self._stream != 0

    def dial(self) -> None:
        """Exchange Hello, Welcome and Ready; retry if the coordinator refuses."""
        if self._over or self.up:
            return
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.last_epoch = self.end.epoch
        if seconds := self._fleet.refused(hello):
            self._dial_in(seconds)
            return
        try:
            if self._fleet.rival(hello) is not None:
                raise Rejected("a live worker has this place", "end it first")
            worker, resumed = self._fleet.admit(hello)
        except Rejected:
            self.rejections += 1
            self._dial_in(HEARTBEAT_SECONDS)
            return
        self.worker = worker
        if self.end.welcomed(pb.Welcome(epoch=worker.epoch, resumed=resumed), self):
            self._begin_anew()
        worker.connected()
        self._stream = next(self._streams)
        down = _Down(self, self._stream)
        if resumed:
            worker.end.resume(down, time.monotonic())
        else:
            worker.end.outbox = down
        self._tell(pb.SessionRequest(ready=self._ready))
        self._simulated.said_ready()
        self._beat(self._stream)

    def twin(self) -> Link:
        """Another process with this worker's name and place, which has dialled, and is gone if it was refused."""
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.instance_id += "-twin"
        other = Link(self._fleet, self._simulated, hello, self._ready, random.Random(0))
        other.dial()
        if not other.up:
            other.close()
        return other

    def cut(self, seconds: float) -> None:
        """Break the stream; it is dialled again `seconds` from now."""
        if self.up and self.worker is not None:
            self.worker.connections -= 1
        self._stream = 0
        self._dial_in(seconds)

    def _dial_in(self, seconds: float) -> None:
        """Dial then, and not before: a later fault outlasts an earlier one."""
        if self._dialling is not None:
            self._dialling.cancel()
        self._dialling = self._later(seconds, self.dial)

    def die(self, seconds: float, name: str) -> None:
        """End the process; another instance comes `seconds` from now."""
        self.end = WorkerEnd(self)
        self._begin_anew()
        self._hello.instance_id = name
        self.cut(seconds)

    def go_on(self) -> None:
        """Stop hanging: commands that came meanwhile are carried out, if they still belong to this session."""
        self.trouble.hung = False
        held, self._held = self._held, []
        for message in held:
            assignment = assignment_of(message)
            if assignment is not None and assignment.epoch == self.end.epoch:
                self._carry_out(message, assignment)

    def close(self) -> None:
        self._over, self._stream = True, 0
        for timer in self._timers:
            timer.cancel()

    def _begin_anew(self) -> None:
        self._held.clear()
        self._simulated.forget()

    def _beat(self, stream: int) -> None:
        if stream == self._stream:
            self._tell(pb.SessionRequest(heartbeat=pb.Heartbeat()))
            self._later(HEARTBEAT_SECONDS, self._beat, stream)

    # ---- messages ----

    def down(self, message: pb.SessionResponse, stream: int) -> None:
        """Send a message from the coordinator on its way."""
        self._travel(stream, self._arrived, message)

    def put(self, message: pb.SessionRequest, rest: Sequence[bytes] = (), /) -> None:
        """Send a reply on its way (`WorkerEnd.outbox`)."""
        message = whole(message, rest)
        if (mutate := self.trouble.garbled) is not None:
            self.trouble.garbled, message = None, mutate(message, self._chance)
        self._tell(message)

    def reply(self, message: pb.SessionRequest) -> None:
        """Called when the simulated worker has carried out a command, or has something to say unasked."""
        body = message.WhichOneof("body") or ""
        assignment = assignment_of(message)
        if assignment is None:
            self._tell(message)
        else:
            self.end.reply(assignment, getattr(message, body))

    def _tell(self, message: pb.SessionRequest) -> None:
        if self.up:
            self._travel(self._stream, self._told, message)

    def _told(self, message: pb.SessionRequest, stream: int) -> None:
        if stream != self._stream or not self.up or self.worker is None:
            return
        if self.worker.state == "lost":
            self.cut(self._chance.uniform(*REDIAL_SECONDS))  # the coordinator has hung up
        else:
            self._fleet.receive(self.worker, message)

    def _arrived(self, message: pb.SessionResponse, stream: int) -> None:
        if stream != self._stream:
            return
        body = message.WhichOneof("body")
        assignment = assignment_of(message)
        if body == "bye" and self.worker is not None:
            self._over, self.worker.said_goodbye = True, True
            self._fleet.lose(self.worker, "goodbye")
        if assignment is None or not self.end.accept(assignment):
            return
        if self.trouble.hung:
            self._held.append(message)
        elif self.trouble.failing and body not in ("release", "abort"):
            self.end.reply(assignment, pb.Failure(code=self.trouble.failing, message="it fails whatever it is asked"))
        else:
            self._carry_out(message, assignment)

    def _carry_out(self, message: pb.SessionResponse, assignment: pb.Assignment) -> None:
        batch = message.train_batch
        if message.HasField("train_batch") and batch.page + 1 < batch.pages:
            self.end.reply(assignment, None)
        else:
            self._simulated.carry_out(message)

    def _travel(self, stream: int, arrive: Callable[..., None], message: object) -> None:
        trouble, chance = self.trouble, self._chance
        times = 2 if trouble.duplicated and chance.random() < trouble.duplicated else 1
        for _ in range(times):
            if trouble.late and chance.random() < trouble.late:
                self._later(chance.uniform(0.0, trouble.latest_seconds), arrive, message, stream)
            else:
                self._loop.call_soon(arrive, message, stream)

    def _later(self, seconds: float, call: Callable[..., None], *arguments: object) -> asyncio.TimerHandle | None:
        if self._over:
            return None

        def go() -> None:
            self._timers.discard(timer)
            if not self._over:
                call(*arguments)

        timer = self._loop.call_later(seconds, go)
        self._timers.add(timer)
        return timer


@dataclass(slots=True)
class _Down:
    """One stream of the link, which the coordinator's end writes to."""

    link: Link
    stream: int

    def put(self, message: pb.SessionResponse, rest: Sequence[bytes] = (), /) -> None:  # nobody reads the prompt
        self.link.down(message, self.stream)
