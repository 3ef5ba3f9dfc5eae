"""The coordinator's end of each worker's session.

`Fleet` owns one `Worker` per worker instance. A `Worker.call` sends one command and waits for its reply; it survives a
lost stream, because commands without an answer are sent again when the same instance comes back within `lost_after`
seconds, and the worker answers each at most once. After that the worker is lost, and every waiting call raises
`WorkerLost`. Only Bye ends a session at once.

Bounds: callers take a slot before they call (pools), so a worker never has more assignments than slots; the outbox
holds at most those commands and one heartbeat.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dart.coordinator.fleet.boundary import Boundary
from dart.core.fleet.conduct import Quarantine
from dart.screenshots.held import Held
from dart.v1 import session_pb2 as pb
from dart.wire import rules
from dart.wire.capabilities import BATCHES, NOTICES, has
from dart.wire.outbox import Outbox, too_large
from dart.wire.role import Command
from dart.wire.rules import Malformed, Violation
from dart.wire.session import CoordinatorEnd, Key, Owed

log = logging.getLogger(__name__)

STALLED_SECONDS = 2.0
LOOKS = 4
"""How often the fleet looks for silent workers in the time after which one counts as lost."""
STALLS_KEPT = 64
BEYOND_SECONDS = 60.0
"""How much longer than a worker's own time limit to wait for its answer, which may be a large one on a slow line."""


class InfrastructureError(Exception):
    """A worker, not the policy, is to blame: the attempt is discarded and scheduled again.

    `worker`: the name of the worker to blame; empty if it is not known.
    """

    certain = False
    by_environment = False
    """Whether the attempt's own environment ended it, and was not lost with its worker."""
    """True if another attempt would fail as well."""
    at_verdict = False
    """True if the episode was over, and only the verdict was missing."""

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker


class WorkerLost(InfrastructureError):
    """The worker left or went silent while a call waited."""


class CommandFailed(InfrastructureError):
    """The command failed and the worker goes on: it answered with a Failure, its answer broke a rule, no answer came in
    time, or the command was too large to send."""

    def __init__(self, code: int, message: str, worker: str = "", trajectories: Sequence[str] = ()) -> None:
        super().__init__(message, worker)
        self.code = code
        self.trajectories = trajectories
        """The trajectories of a batch that the trainer cannot train on."""


class SetUpFailed(InfrastructureError):
    """The environment could not begin the task's episode. `certain`: the world says that the task itself is wrong."""

    def __init__(self, message: str, worker: str = "", certain: bool = False) -> None:
        super().__init__(message, worker)
        self.certain = certain


class RuleBroken(CommandFailed):
    """The worker's answer breaks a rule (`dart.wire.rules`)."""

    def __init__(self, worker_id: str, broken: Violation) -> None:
        super().__init__(pb.FAILURE_CODE_UNSPECIFIED, f"{worker_id} broke a rule: {broken}", worker_id)
        self.broken = broken


@dataclass(slots=True, eq=False)
class Worker:
    """One worker instance. `state`: starting (before Ready), ready, lost."""

    hello: pb.Hello
    epoch: int
    state: str = "starting"
    ready: pb.Ready = field(default_factory=pb.Ready)
    offered: pb.Slots | None = None
    last_heard: float = 0.0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    said_goodbye: bool = False
    why_lost: str = ""
    last_failure: str = ""
    """Why its last failed call failed, in the worker's own words."""
    screenshots: Held[bool] = field(default_factory=lambda: Held(0))
    """Digests of the screenshots that the worker keeps, noted on sending, in the same order as by the worker."""
    connections: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """When set, the newest stream of this worker is to end. Each stream has its own event (`connected`)."""
    id: str = field(init=False)
    role: pb.Role = field(init=False)
    """Both are the Hello's, read once: every command and every answer asks for them."""
    role_and_id: tuple[int, str] = field(init=False)
    """It outlives the instance, and is the key of its conduct."""
    end: CoordinatorEnd = field(init=False)
    _waiting: dict[Key, asyncio.Future[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id, self.role = self.hello.worker_id, self.hello.role
        self.role_and_id = self.role, self.id
        self.end = CoordinatorEnd(self.epoch, self._new_outbox())

    @property
    def outbox(self) -> Outbox[pb.SessionResponse]:
        """What the worker's stream writes next; a new one for each stream. A simulated worker has none."""
        assert isinstance(self.end.outbox, Outbox)
        return self.end.outbox

    @property
    def slots(self) -> int:
        """The environments, or the requests at once, that the worker last reported; else the slots of its Ready."""
        return self.ready.slots if self.offered is None else self.offered.count

    @property
    def shares_blobs(self) -> bool:
        """Whether it can read the run's directory of screenshots."""
        return bool(self.ready.shares_blobs)

    async def call(self, *commands: Command | pb.SessionResponse, rest: Sequence[bytes] = ()) -> Any:
        """Send a command (or the pages of one) and return the reply to it, or to its last page: its message, or, to
        Generate, a `Generation`.

        The assignment's epoch and sequence are filled in. A command with screenshots must already be in its message
        (`dart.wire.convert` says why). `rest`: further fields of the last command, encoded. Raises CommandFailed, and
        WorkerLost when the worker is lost. The reply to a cancelled call is ignored.
        """
        if self.state == "lost":
            raise WorkerLost(f"worker {self.id} is lost", self.id)
        key = self.end.issue(commands, time.monotonic(), rest=rest)
        reply = self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            return await reply
        except asyncio.CancelledError:
            self.end.abandon(key)
            raise
        finally:
            del self._waiting[key]

    def tell(self, command: Command) -> None:
        """Send a command without waiting for a reply (Abort has none; Release is sent again until it is answered)."""
        if self.state != "lost":
            self.end.issue([command], time.monotonic(), awaited=False)

    def notify(self, notice: pb.Notice) -> None:
        """Tell it what it did wrong, for its log, if it reads that."""
        if has(self.hello, NOTICES):
            self.end.outbox.put(pb.SessionResponse(notice=notice))

    def end_assignment(self, assignment_id: str, attempt: int) -> None:
        """No more commands of this assignment will come."""
        self.end.finish((assignment_id, attempt))

    def answered(self, owed: Owed, reply: object) -> None:
        """Wake the call that waits for the reply to this command."""
        self.end.settle(owed, time.monotonic())
        if isinstance(reply, pb.Failure):
            told, refused = f"{self.id}: {reply.message}", tuple(reply.trajectory_ids)
            self._fail(owed.key, CommandFailed(reply.code, told, self.id, refused))
        elif (waiting := self._waiting.get(owed.key)) is not None and not waiting.done():
            waiting.set_result(reply)

    def refuse(self, owed: Owed, broken: Violation) -> None:
        """Fail the call that waits for a reply which breaks a rule."""
        self.end.settle(owed, time.monotonic())
        self._fail(owed.key, RuleBroken(self.id, broken))

    def resume(self) -> None:
        """The same instance is back: send all unanswered commands again."""
        self.end.resume(self._new_outbox(), time.monotonic())

    def connected(self) -> asyncio.Event:
        """A stream of this worker begins; the one before it ends. Returns the event that ends this one."""
        self.hung_up.set()
        self.hung_up = asyncio.Event()
        self.connections += 1
        self.last_heard = time.monotonic()
        return self.hung_up

    def lose(self, why: str) -> None:
        self.state, self.why_lost = "lost", why
        self.lost.set()
        self.hung_up.set()
        for key in self._waiting:
            self._fail(key, WorkerLost(f"worker {self.id} is lost: {why}", self.id))
        # Its stream has the outbox in which a Bye may wait. Commands, some with screenshots, would be kept for days:
        # a Worker is in a cycle, and what has lived for hours is seldom collected.
        self.end.forget(Outbox())
        self.screenshots = Held(self.screenshots.capacity)

    def fail_overdue(self, now: float, seconds: float) -> str:
        """Fail commands without an answer for `seconds`, or for as long as the worker said that they may take.

        Returns why the worker itself failed, or "".
        """
        longest = {kind: told + BEYOND_SECONDS for kind, told in self.ready.longest_seconds.items()}
        overdue = self.end.overdue(now, seconds, longest, self.ready.slots if self.role == pb.ROLE_ENV else 0)
        for key in overdue.failed:
            if self.role == pb.ROLE_ROLLOUT:  # it would hold its slot and its cache, and the next weight update
                self.tell(pb.Abort(assignment=pb.Assignment(assignment_id=key[0], attempt=key[1])))
            self._fail(key, CommandFailed(pb.FAILURE_CODE_UNSPECIFIED, f"{self.id}: {overdue.why}", self.id))
        return overdue.why if overdue.hangs else ""

    def _new_outbox(self) -> Outbox[pb.SessionResponse]:
        return Outbox(has(self.hello, BATCHES), self._too_large)

    def _fail(self, key: Key, error: InfrastructureError) -> None:
        self.last_failure = str(error)
        if (waiting := self._waiting.get(key)) is not None and not waiting.done():
            waiting.set_exception(error)

    def _too_large(self, message: pb.SessionResponse, size: int) -> None:
        why = f"{self.id}: {too_large(message.WhichOneof('body') or '', size)}"
        log.error("%s: the command has failed", why)
        if (key := self.end.refused(message, time.monotonic())) is not None:
            self._fail(key, CommandFailed(pb.FAILURE_CODE_INVALID, why, self.id))


class Rejected(Exception):
    """This worker cannot join; it receives the message and the remedy, and ends.

    `retry_after_seconds`: more than 0 if it may reconnect after that time.
    """

    def __init__(self, reason: str, remedy: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.remedy, self.retry_after_seconds = remedy, retry_after_seconds


Listener = Callable[[Worker], None]


def _identity(hello: pb.Hello) -> tuple[str, pb.Role, int, int]:
    """What identifies a worker instance for as long as it lives."""
    return hello.worker_id, hello.role, hello.rank, hello.world_size


def _places(hello: pb.Hello) -> list[tuple[pb.Role, str | int]]:
    """What only one worker of a role can have: its name or, in the trainer, its rank."""
    named: list[tuple[pb.Role, str | int]] = [(hello.role, hello.worker_id)]
    return [*named, (hello.role, hello.rank)] if hello.role == pb.ROLE_TRAIN else named


class Fleet:
    """Every connected worker. Listeners are called when a worker becomes ready and when it is lost."""

    def __init__(self, lost_after: float, answer_within: float = math.inf) -> None:
        self._lost_after, self._answer_within = lost_after, answer_within
        self._looked = time.monotonic()
        """When `reap` last looked for silent workers."""
        self._stalls: deque[tuple[float, float]] = deque(maxlen=STALLS_KEPT)
        """(when it ended, seconds) of the newest times in which this process stood still."""
        self._bye: pb.SessionResponse | None = None
        """Once the run is over."""
        self.boundary = Boundary()
        self._epochs = itertools.count(int(time.time()) << 8)
        self.workers: dict[str, Worker] = {}
        """By instance id; lost workers are removed."""
        self._places: dict[tuple[pb.Role, str | int], Worker] = {}
        self.on_ready: list[Listener] = []
        self.on_slots: list[Callable[[Worker, pb.Slots], None]] = []
        self.on_lost: list[Listener] = []

    def of_role(self, role: pb.Role) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role == role]

    def rival(self, hello: pb.Hello) -> Worker | None:
        """Another instance with the name or trainer rank of this Hello, if its stream was heard from recently."""
        now = time.monotonic()
        # When the next look is overdue, this process may have stood still since the last one.
        awake = now if now <= self._looked + self._lost_after / LOOKS else self._looked
        bound = self._lost_after / 2
        return next(
            (one for one in self._same_place(hello) if one.connections and self._silent(one, awake) <= bound), None
        )

    def _silent(self, worker: Worker, now: float) -> float:
        """Seconds since the worker was heard, without the time in which this process stood still: it hears nobody
        then, and reads what came meanwhile only later."""
        stood = sum(seconds for ended, seconds in self._stalls if ended > worker.last_heard)
        return now - worker.last_heard - stood

    def refused(self, hello: pb.Hello) -> float:
        """Seconds for which this worker is not admitted, because it is in quarantine. A session that continues is."""
        return 0.0 if hello.instance_id in self.workers else self.boundary.refused((hello.role, hello.worker_id))

    def admit(self, hello: pb.Hello) -> tuple[Worker, bool]:
        """The worker of this Hello, and whether it resumes a session that is still remembered.

        The previous holder of its place is lost, so ask `rival` first. Raises Rejected for another worker's session.
        """
        known = self.workers.get(hello.instance_id)
        if known is not None:
            if _identity(known.hello) != _identity(hello):
                raise Rejected(
                    f"the session to resume belongs to {known.id}, not to {hello.worker_id} with this role and rank",
                    "start the worker again",
                )
            if known.epoch == hello.last_epoch:
                known.resume()
                self._greet(known)
                return known, True
            self.lose(known, "it started a new session")
        for other in self._same_place(hello):
            self.lose(other, "another instance took its place")
        worker = Worker(hello, next(self._epochs), last_heard=time.monotonic())
        self.workers[hello.instance_id] = worker
        self._places |= dict.fromkeys(_places(hello), worker)
        self._greet(worker)
        return worker, False

    def _greet(self, worker: Worker) -> None:
        """The first message after Welcome, if everybody is to leave."""
        if self._bye is not None:
            worker.end.outbox.put(self._bye)

    def _same_place(self, hello: pb.Hello) -> list[Worker]:
        """The other instances with this role and name, or, in the trainer, this rank."""
        found = (self._places.get(place) for place in _places(hello))
        return [worker for worker in found if worker is not None and worker.hello.instance_id != hello.instance_id]

    def receive(self, worker: Worker, message: pb.SessionRequest | Malformed) -> None:
        """Handle every message of a worker after its Hello, one at a time; nothing else receives them."""
        worker.last_heard = time.monotonic()
        if worker.state == "lost":
            return
        if isinstance(message, Malformed):
            quarantine = self.boundary.malformed(worker, message)
        elif (kind := message.WhichOneof("body") or "") in rules.UNASKED:
            quarantine = self._unasked(worker, message, kind)
        else:
            quarantine = self.boundary.answered(worker, message, kind)
        if quarantine is not None:
            self._refuse(worker, quarantine)

    def broke(self, worker: Worker, broken: Violation) -> None:
        """A message that kept the rules of its fields contradicts what the worker said before: it is lost, and must
        begin anew."""
        quarantine = self.boundary.broke(worker, broken)
        if quarantine is not None:
            self._refuse(worker, quarantine)
        self.lose(worker, f"it broke a rule: {broken}")

    def _refuse(self, worker: Worker, quarantine: Quarantine) -> None:
        self.lose(worker, f"it is refused for {quarantine.seconds:.0f} s: {quarantine.last}")

    def became_ready(self, worker: Worker, ready: pb.Ready) -> Quarantine | None:
        """Take the worker into service. A Ready that breaks a rule and cannot be mended gets a Bye that says why."""
        broken = self.boundary.ready(ready, worker.role)
        if broken is not None and not broken.mended:
            if worker.state == "starting":
                why = f"this worker cannot be used: {broken}"
                worker.end.outbox.put(pb.SessionResponse(bye=pb.Bye(reason=why, refused=True)))
                self.boundary.turned_away(worker.role_and_id, broken)
            return self.boundary.broke(worker, broken)
        if broken is not None and worker.state == "starting":  # one that is repeated changes nothing
            self.boundary.broke(worker, broken)
        if worker.state == "starting":
            self.boundary.taken(worker.role_and_id)
            worker.ready, worker.state = ready, "ready"
            worker.screenshots = Held(ready.image_cache_entries)
            for listener in self.on_ready:
                listener(worker)
        return None

    def _unasked(self, worker: Worker, message: pb.SessionRequest, kind: str) -> Quarantine | None:
        if kind == "ready":
            return self.became_ready(worker, message.ready)
        if (broken := rules.BODIES[kind].violation(getattr(message, kind))) is not None:
            quarantine = self.boundary.broke(worker, broken)
            if not broken.mended:
                return quarantine
        if kind == "slots":
            self._offered(worker, message.slots)
        return None

    def _offered(self, worker: Worker, slots: pb.Slots) -> None:
        """Slots received before Ready are ignored: the worker sends them again after it."""
        if worker.state != "ready":
            return
        worker.offered = slots
        for listener in self.on_slots:
            listener(worker, slots)

    def lose(self, worker: Worker, why: str) -> None:
        if worker.state == "lost":
            return
        was_ready = worker.state == "ready"
        del self.workers[worker.hello.instance_id]
        for place in _places(worker.hello):
            del self._places[place]
        worker.lose(why)
        log.log(logging.INFO if worker.said_goodbye else logging.WARNING, "worker %s is gone: %s", worker.id, why)
        if was_ready:
            for listener in self.on_lost:
                listener(worker)

    async def reap(self) -> None:
        """Lose every worker that has been silent for `lost_after` seconds, or does not answer. Runs until cancelled.

        A lost worker that is in fact alive reconnects, and prepares again.
        """
        while True:
            self._looked = now = time.monotonic()
            for worker in list(self.workers.values()):
                if why := worker.fail_overdue(now, self._answer_within):
                    self.lose(worker, why)
            for worker in [w for w in self.workers.values() if self._silent(w, now) >= self._lost_after]:
                self.lose(worker, f"silent for {self._lost_after:.0f} s")
            heard = min((worker.last_heard for worker in self.workers.values()), default=now)
            wake = max(min(heard + self._lost_after, now + self._lost_after / LOOKS), now + 0.5)
            await asyncio.sleep(wake - now)
            if (late := time.monotonic() - wake) > STALLED_SECONDS:
                # Its machine was paused, say, or a disk hung: at any time since the last look.
                log.warning("the coordinator was stopped for %.1f s", late)
                self._stalls.append((wake + late, wake + late - now))

    def say_goodbye(self, reason: str) -> None:
        """Send Bye to every worker, and to those that dial in, or dial in again, from now on."""
        self._bye = pb.SessionResponse(bye=pb.Bye(reason=reason))
        for worker in list(self.workers.values()):
            worker.end.outbox.put(self._bye)
