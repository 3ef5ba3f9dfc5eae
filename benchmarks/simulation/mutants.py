"""Simulated workers some of whose messages are mutated (`mutations`), beside others that are honest.

What arrives takes the way that the server gives it: bytes are parsed by the rules, what is no message ends the stream,
a goodbye ends the worker. A worker that the coordinator refuses comes back when it may, some under another name: then
it has no past, and can be mutated again at once.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.simulation import memory
from benchmarks.simulation.links import Link, Links
from benchmarks.simulation.mutations import Sent, mutated, mutated_message
from benchmarks.simulation.workers import SimulatedWorker
from dart.coordinator.fleet.sessions import Fleet
from dart.v1 import session_pb2 as pb
from dart.wire import rules
from dart.wire.channel import MAX_MESSAGE_BYTES
from dart.wire.role import ROLE_NAMES
from dart.wire.rules import Malformed

MUTATED = "bad-"
"""Worker names that begin so are those of mutants."""
REDIAL_SECONDS, RENAMED_SHARE = 2.0, 0.9
READY_SHARE = 0.1
"""Of a mutant's Ready messages, and of its Hellos, so many are mutated; the rest say nothing new."""
TRAINERS_READY_SHARE = 1.0
"""The same for the trainer, which says hardly any."""
LEAVES_AFTER_SECONDS = (30.0, 300.0)
"""A mutant ends with a Bye after so long, and another process takes its place; the trainer stays."""
FAILS_SHARE = 0.02
"""Of the commands of a mutant other than the trainer, so many fail."""
FAILURES: dict[int, tuple[pb.FailureCode, ...]] = {
    pb.ROLE_ENV: (pb.FAILURE_CODE_ENVIRONMENT,),
    pb.ROLE_ROLLOUT: (
        pb.FAILURE_CODE_ENGINE, pb.FAILURE_CODE_ABORTED, pb.FAILURE_CODE_UNKNOWN_IMAGE, pb.FAILURE_CODE_TRANSFER,
    ),
}  # fmt: skip
NEVER_FAIL = frozenset({"reset", "release", "abort"})
FORCED = "generated, forced"
"""The answer to a Generate with a forced text: it has other rules than one that was sampled."""
_ALL = frozenset({"hello", "ready", "heartbeat", "bye", "failure"})
SAYS: dict[str, frozenset[str]] = {
    "env": _ALL | {"observed", "released", "suggested", "slots"},
    "rollout": _ALL | {"generated", FORCED, "screenshots_held", "receiving_weights", "weights_loaded"},
    "train": _ALL | {"trained", "weights_sent", "checkpoint_saved"},
}
"""What the workers of each role say, and so what is mutated."""
EXEMPT: dict[tuple[str, str], str] = {
    ("train", "failure"): "a trainer that says it has failed is believed: its optimiser's state may be half an update "
    "ahead, so the run ends, and continues from the last checkpoint with --resume",
    ("train", "bye"): "a trainer that says goodbye is gone, with its optimiser's state: the run ends, and continues "
    "from the last checkpoint with --resume",
}
"""(role, kind) of the messages that are not mutated and whose place no mutation takes, and why."""


LARGE_BYTES = 100_000
"""Smaller messages are not worth a look at the memory."""


class Tally:
    """What has been sent so far, over all mutants of a run."""

    def __init__(self) -> None:
        self.mutations: Counter[tuple[str, str]] = Counter()
        """By the role of the worker, and the kind of the message that was mutated."""
        self.longest_seconds = 0.0
        """The processor's time that the coordinator took for what came in one piece, at most."""
        self.most_mb = 0.0
        """The memory that the coordinator took for what came in one piece, at most; what a mutant needs to make it is
        not among that."""


def missing(mutations: Counter[tuple[str, str]]) -> list[str]:
    """The messages of which none was mutated, as "role kind"; those that are exempt are left out."""
    wanted = {(role, kind) for role, kinds in SAYS.items() for kind in kinds} - set(EXEMPT)
    return sorted(f"{role} {kind}" for role, kind in wanted if not mutations[role, kind])


class Mutants(Links):
    """All connections of one coordinator's life. `shares`: of the replies of a mutant, by the role of the worker."""

    def __init__(self, fleet: Fleet, chance: random.Random, tally: Tally, shares: dict[int, float]) -> None:
        super().__init__(fleet, chance)
        self._tally, self._shares, self._random = tally, shares, chance

    def connect(self, worker: SimulatedWorker, hello: pb.Hello, ready: pb.Ready) -> Callable[[pb.SessionRequest], None]:
        if not (hello.worker_id.startswith(MUTATED) or hello.role == pb.ROLE_TRAIN):
            return super().connect(worker, hello, ready)
        chance, share = random.Random(self._random.getrandbits(64)), self._shares[hello.role]
        link = Mutant(self.fleet, worker, hello, ready, chance, self._tally, share)
        self.of[hello.worker_id] = link
        link.dial()
        return link.reply


class Mutant(Link):
    def __init__(
        self,
        fleet: Fleet,
        simulated: SimulatedWorker,
        hello: pb.Hello,
        ready: pb.Ready,
        chance: random.Random,
        tally: Tally,
        share: float,
    ) -> None:
        super().__init__(fleet, simulated, hello, ready, chance)
        self._tally, self._share = tally, share
        self._honest = hello.worker_id, ready
        self._names = itertools.count(1)
        if share and not self._trains:
            self._later(chance.uniform(*LEAVES_AFTER_SECONDS), self._leave)

    @property
    def _trains(self) -> bool:
        return bool(self._hello.role == pb.ROLE_TRAIN)

    def dial(self) -> None:
        if self._over or self.up:
            return
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        if self._due(self._dialling_share):
            mutated_message(hello, self._chance)
            self._count("hello")
            if rules.hello(hello) is not None:  # the server tells it so; it comes back as it is
                self._later(REDIAL_SECONDS, self.dial)
                return
        if seconds := self._fleet.refused(self._hello):
            self.rejections += 1
            if self._chance.random() < RENAMED_SHARE and not self._trains:
                self._come_back(f"{self._honest[0]}-{next(self._names)}")
            else:
                self._later(seconds, self.dial)
            return
        self._ready = pb.Ready()
        self._ready.CopyFrom(self._honest[1])
        if self._due(self._dialling_share):
            mutated_message(self._ready, self._chance)
            self._count("ready")
        super().dial()

    @property
    def _dialling_share(self) -> float:
        return TRAINERS_READY_SHARE if self._trains else READY_SHARE

    def _due(self, share: float) -> bool:
        return self._chance.random() < share * self._share

    def _count(self, kind: str) -> None:
        self._tally.mutations[ROLE_NAMES[self._hello.role], kind] += 1

    def _come_back(self, name: str = "") -> None:
        """As another process, under this name; a trainer keeps its own, and so does one that is given none."""
        if name and not self._trains:
            self._hello.worker_id = name
        self.die(REDIAL_SECONDS, f"{self._hello.worker_id}/{self._chance.getrandbits(32):x}")

    def _leave(self) -> None:
        """Say goodbye and end, whatever becomes of the goodbye."""
        self._tell(pb.SessionRequest(bye=pb.Bye(reason="stopped")))
        self._later(0.1, self._come_back)
        self._later(self._chance.uniform(*LEAVES_AFTER_SECONDS), self._leave)

    def _carry_out(self, message: pb.SessionResponse, assignment: pb.Assignment) -> None:
        body = message.WhichOneof("body")
        fails = not self._trains and body not in NEVER_FAIL and self._share > 0.0
        if fails and self._chance.random() < FAILS_SHARE:
            code = self._chance.choice(FAILURES[self._hello.role])
            self.end.reply(assignment, pb.Failure(code=code, message="it did not work this time"))
        else:
            super()._carry_out(message, assignment)

    def _told(self, message: pb.SessionRequest, stream: int) -> None:
        kind = message.WhichOneof("body") or ""
        sent: list[Sent] = [message]
        if kind != "ready" and self._chance.random() < self._share:
            sent = mutated(message, self._chance)
            if self._trains and _exempt(sent):
                sent = [message]
            else:
                self._count(FORCED if kind == "generated" and not message.generated.logprobs else kind)
        for one in sent:
            if stream == self._stream:
                self._arrives(one)

    def _arrives(self, sent: Sent) -> None:
        worker = self.worker
        if worker is None or worker.state == "lost":
            return self._lost()
        data = sent if isinstance(sent, bytes) else sent.SerializeToString()
        if len(data) > MAX_MESSAGE_BYTES:
            return self.cut(REDIAL_SECONDS)  # gRPC ends the stream before anything of it is read
        large = len(data) >= LARGE_BYTES
        before = memory.begin_peak() if large else 0.0
        began = time.thread_time()
        message = rules.parsed(data)
        goodbye = False
        if isinstance(message, Malformed):
            self._fleet.receive(worker, message)
            self.cut(REDIAL_SECONDS)
        else:
            for one in message.batch or (message,):
                goodbye = one.HasField("bye")
                if goodbye:
                    break
                self._fleet.receive(worker, one)
        if goodbye:
            worker.said_goodbye = True
            self._fleet.lose(worker, "goodbye")
        self._tally.longest_seconds = max(self._tally.longest_seconds, time.thread_time() - began)
        if large:
            self._tally.most_mb = max(self._tally.most_mb, memory.peak_mb() - before)
        if worker.state == "lost":
            self._lost()

    def _arrived(self, message: pb.SessionResponse, stream: int) -> None:
        if stream == self._stream and message.bye.reason.startswith("this worker cannot be used"):
            if self.worker is not None:
                self.worker.said_goodbye = True
                self._fleet.lose(self.worker, "goodbye")
            return self._come_back(f"{self._honest[0]}-{next(self._names)}")
        super()._arrived(message, stream)

    def _lost(self) -> None:
        if self.up and not self._over:
            self.cut(REDIAL_SECONDS)


def _exempt(sent: list[Sent]) -> bool:
    """Whether a trainer must not say this (`EXEMPT`)."""
    for one in sent:
        message = rules.parsed(one) if isinstance(one, bytes) else one
        if isinstance(message, Malformed):
            continue
        if any(("train", each.WhichOneof("body")) in EXEMPT for each in message.batch or (message,)):
            return True
    return False
