"""The two ends of a session as plain objects: they decide what is sent, carried out, answered, repeated or dropped.

No event loop and no network: events come in as calls, with the time as an argument; messages go out through `Sink.put`.
The coordinator has one `CoordinatorEnd` for each worker instance, the worker has one `WorkerEnd`. Both outlive their
streams; `dart.wire.stream` moves the messages.

Invariants, however often streams break, and whatever arrives twice:

- A command is known by (assignment id, attempt, sequence) within an epoch, and is carried out at most once.
- A command without an answer is sent again on each new stream of the same epoch, before anything newer; a command that
  was answered, or that nobody waits for any more, is not.
- At most one command of an assignment is at the worker at a time; the pages of one call count as one command. The next
  command waits here until the one before it is answered, so a Release never overtakes an Act whose caller has given up.
  Only Abort does not wait.
- A new epoch voids everything from the one before.

Worked example: the caller of Act 2 is cancelled and the episode sends Release 3. The end keeps Act 2 (`abandon`) and
holds Release 3 back. The stream breaks; on the new one Act 2 goes out again. The worker has carried it out already and
repeats its reply; only then does Release 3 go out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

from dart.v1 import session_pb2 as pb
from dart.wire.role import Command, Reply

log = logging.getLogger(__name__)

Work: TypeAlias = tuple[str, int]
"""(assignment id, attempt): one piece of work."""
Key: TypeAlias = tuple[str, int, int]
"""(assignment id, attempt, sequence): one command."""

BOUNDED = frozenset({"reset", "act", "suggest", "generate", "hold_screenshots", "release"})
"""Commands with a time limit for the answer. Updates have no limit, and transfers have a timeout of their own."""

NOTHING: Mapping[str, float] = MappingProxyType({})

Sent_contra = TypeVar("Sent_contra", contravariant=True)


class Sink(Protocol[Sent_contra]):
    """Takes the messages for the other end, which are written in this order.

    `rest`: further fields of the message's body, encoded (see `dart.wire.outbox`).
    """

    def put(self, message: Sent_contra, rest: Sequence[bytes] = (), /) -> None: ...


def _field_names(message: type[pb.SessionRequest] | type[pb.SessionResponse]) -> dict[str, str]:
    """For each message that can be a body: its type's name → the name of its field."""
    bodies = message.DESCRIPTOR.oneofs_by_name["body"].fields
    return {field.message_type.name: field.name for field in bodies if field.message_type is not None}


_COMMAND_FIELDS = _field_names(pb.SessionResponse)
_REPLY_FIELDS = _field_names(pb.SessionRequest)


def assignment_of(message: pb.SessionRequest | pb.SessionResponse) -> pb.Assignment | None:
    """The assignment that a command or a reply is about; None for other messages."""
    body = message.WhichOneof("body")
    return getattr(getattr(message, body), "assignment", None) if body else None


# ---- the coordinator's end ----


class Owed(Protocol):
    """A command that the worker owes a reply to."""

    @property
    def key(self) -> Key: ...

    @property
    def kind(self) -> str: ...

    @property
    def messages(self) -> Sequence[pb.SessionResponse]:
        """Its pages; the reply answers the last."""


@dataclass(slots=True)
class _Command:
    """A command (with all its pages) that the worker owes an answer to, or will owe once it is sent."""

    key: Key
    kind: str
    messages: Sequence[pb.SessionResponse]
    rest: Sequence[bytes]
    """Further fields of the last page's body, encoded."""
    since: float
    """When it was issued, or sent after waiting here (monotonic seconds)."""
    awaited: bool
    """Somebody waits for the reply. A Release is sent until it is answered in any case."""
    place: int = 0
    """Its position among all commands sent, from 1."""
    asked_again: int = 0
    """How often another reply was asked for, because the one that came broke a rule."""
    reminded: int = 0
    """How often it was sent again because its reply may have been lost."""


@dataclass(slots=True)
class _Work:
    """One piece of work: its numbering and its commands."""

    sequence: int = 0
    open: _Command | None = None
    """The command at the worker."""
    held: tuple[_Command, ...] = ()
    """Commands that wait for it, oldest first."""
    finished: bool = False
    """No more commands will be issued."""

    @property
    def wanted(self) -> bool:
        """Somebody needs the open command to be carried out."""
        command = self.open
        return command is not None and (command.awaited or command.kind == "release" or bool(self.held))


@dataclass(frozen=True, slots=True)
class Overdue:
    """Commands that were not answered in time. `hangs`: there are so many that the worker itself has failed."""

    why: str = ""
    failed: Sequence[Key] = ()
    hangs: bool = False


@dataclass(slots=True)
class CoordinatorEnd:
    """Gives out commands and matches replies to them."""

    epoch: int
    outbox: Sink[pb.SessionResponse]
    stale: int = 0
    """Replies from another epoch, or to a command that is not open."""
    _work: dict[Work, _Work] = field(default_factory=dict)
    _sent: int = 0
    _late_in_a_row: int = 0
    """Commands that were not answered in time since the last answer to any."""

    @property
    def unanswered(self) -> int:
        """Commands that the worker owes an answer to."""
        return sum(state.open is not None for state in self._work.values())

    def issue(
        self,
        commands: Sequence[Command | pb.SessionResponse],
        now: float,
        awaited: bool = True,
        rest: Sequence[bytes] = (),
    ) -> Key:
        """Number a command, or the pages of one, and send it as soon as its work allows. Returns the key of its reply.

        A command may already be wrapped in its message, which saves copying the body. `rest`: further fields of the
        last one, encoded.
        """
        messages: list[pb.SessionResponse] = []
        for one in commands:
            message = one if isinstance(one, pb.SessionResponse) else _wrapped_command(one)
            kind = message.WhichOneof("body") or ""
            assignment = getattr(message, kind).assignment
            work = assignment.assignment_id, assignment.attempt
            known = self._work.get(work)
            state = self._work[work] = _Work() if known is None else known
            state.sequence += 1
            assignment.sequence, assignment.epoch = state.sequence, self.epoch
            messages.append(message)
        key = *work, state.sequence
        if kind == "abort":
            self.outbox.put(messages[0])  # no reply, and it concerns the command it would have to wait for
            return key
        command = _Command(key, kind, messages, rest, now, awaited)
        if state.open is None:
            self._send(state, command)
        else:
            state.held = (*state.held, command)
        return key

    def abandon(self, key: Key) -> None:
        """Nobody waits for this reply any more. The command stays open while another waits for it."""
        if (state := self._work.get(key[:2])) is None:
            return
        if state.open is not None and state.open.key == key:
            state.open.awaited = False
        elif state.held:
            state.held = tuple(command for command in state.held if command.key != key)

    def finish(self, work: Work) -> None:
        """No more commands of this work will be issued: forget its numbering, and an open command that nobody wants."""
        if (state := self._work.get(work)) is not None:
            state.finished = True
            if not state.wanted:
                del self._work[work]

    @property
    def surplus(self) -> int:
        """Stale replies beyond one for each command ever sent: an honest worker has none."""
        return self.stale - self._sent

    def owed(self, assignment: pb.Assignment) -> Owed | None:
        """The open command that a reply with this assignment answers."""
        state = self._work.get((assignment.assignment_id, assignment.attempt))
        command = None if state is None else state.open
        if command is None or assignment.sequence != command.key[2] or assignment.epoch != self.epoch:
            return None
        return command

    def unexpected(self) -> None:
        """A reply came that answers no open command."""
        self.stale += 1

    def settle(self, owed: Owed, now: float) -> None:
        """The reply has come: close the command. The next of its work is sent, and has its time from now on."""
        self._late_in_a_row = 0
        work = owed.key[:2]
        state = self._work[work]
        if state.held or state.finished:
            self._close(work, state, now)
        else:
            state.open = None

    def ask_again(self, command: pb.SessionResponse, most: int) -> bool:
        """Send an open command again; False when it has been sent again `most` times already.

        A worker that has answered the command repeats its reply; one that is still working on it continues.
        """
        one = next((one for one in self._open() if one.messages[-1] is command), None)
        if one is None or one.asked_again >= most:
            return False
        one.asked_again += 1
        self.outbox.put(command, one.rest)
        return True

    def remind(self, most: int) -> None:
        """A reply may have been lost: send every open command again, each at most so often."""
        for one in self._open():
            if one.reminded < most:
                one.reminded += 1
                self.outbox.put(one.messages[-1], one.rest)

    def refused(self, message: pb.SessionResponse, now: float) -> Key | None:
        """The stream cannot carry this message: close its command, and return it; None if it is not open."""
        assignment = assignment_of(message)
        if assignment is None:
            return None
        work = (assignment.assignment_id, assignment.attempt)
        state = self._work.get(work)
        if state is None or state.open is None or not any(page is message for page in state.open.messages):
            return None
        key = state.open.key
        self._close(work, state, now)
        return key

    def resume(self, outbox: Sink[pb.SessionResponse], now: float) -> None:
        """The same instance has a new stream: commands without an answer are sent again, in the old order."""
        self.outbox = outbox
        for command in sorted(self._open(), key=lambda command: command.place):
            work = command.key[:2]
            state = self._work[work]
            if state.wanted:
                self._put(command)
            else:
                self._close(work, state, now)

    def forget(self, outbox: Sink[pb.SessionResponse]) -> None:
        """The worker is lost: drop its commands, to which there will be no answers."""
        self.outbox = outbox
        self._work.clear()

    def overdue(
        self, now: float, seconds: float, longer: Mapping[str, float] = NOTHING, environments: int = 0
    ) -> Overdue:
        """Commands without an answer for `seconds`, or for what `longer` says of their kind, have failed, and are
        closed.

        If they are at least half of the worker's commands, its engine hangs although heartbeats continue; then nothing
        is closed, because the worker is to be given up. A worker with `environments` is judged by all of its answers
        instead, because one environment that hangs may be the only one that was asked anything: it hangs if it has
        answered nothing while commands for half of its environments, and at least two, became late, or a Release,
        which waits for no environment.
        """
        waiting = [command for command in self._open() if command.kind in BOUNDED]
        limits = {kind: max(seconds, longer.get(kind, 0.0)) for kind in BOUNDED}
        late = [command for command in waiting if now - command.since >= limits[command.kind]]
        if not late:
            return Overdue()
        self._late_in_a_row += len(late)
        kinds = sorted({command.kind for command in late})
        why = f"no answer to {', '.join(kinds)} for {min(limits[kind] for kind in kinds):.0f} s"
        if environments:
            enough = "release" in kinds or 2 * self._late_in_a_row >= environments
            hangs = self._late_in_a_row >= 2 and enough
        else:
            hangs = 2 * len(late) >= len(waiting)
        if hangs:
            return Overdue(why, hangs=True)
        for command in late:
            work = command.key[:2]
            self._close(work, self._work[work], now)
        return Overdue(why, [command.key for command in late])

    def oldest(self, now: float) -> tuple[str, float]:
        """(kind, seconds) of the command that somebody has waited for longest; ("", 0.0) if nobody waits."""
        oldest = min((one for one in self._open() if one.awaited), key=lambda one: one.since, default=None)
        return (oldest.kind, now - oldest.since) if oldest else ("", 0.0)

    def validate(self) -> None:
        """Check the invariants. Raises AssertionError. For tests."""
        for work, state in self._work.items():
            commands = [*([state.open] if state.open else []), *state.held]
            keys = [command.key for command in commands]
            assert all(key[:2] == work for key in keys)
            assert keys == sorted(keys), f"{keys} are out of order"
            assert state.open or not state.held, f"{work} waits for nothing"
            assert state.wanted or not state.finished, f"{work} is over"

    def _open(self) -> list[_Command]:
        return [state.open for state in self._work.values() if state.open is not None]

    def _send(self, state: _Work, command: _Command) -> None:
        self._sent += 1
        command.place = self._sent
        state.open = command
        self._put(command)

    def _put(self, command: _Command) -> None:
        for message in command.messages[:-1]:
            self.outbox.put(message)
        self.outbox.put(command.messages[-1], command.rest)

    def _close(self, work: Work, state: _Work, now: float) -> None:
        """The worker owes no answer to the open command any more: send the next one of this work."""
        state.open = None
        if state.held:
            following, *rest = state.held
            state.held = tuple(rest)
            following.since = max(following.since, now)
            self._send(state, following)
        elif state.finished:
            del self._work[work]


def _wrapped_command(command: Command) -> pb.SessionResponse:
    message = pb.SessionResponse()
    getattr(message, _COMMAND_FIELDS[command.DESCRIPTOR.name]).CopyFrom(command)
    return message


# ---- the worker's end ----

LEAST_KEPT = 64
"""The last reply is kept for at least this many pieces of work."""


@dataclass(slots=True)
class _Done:
    """The newest command of one piece of work, done or under way."""

    sequence: int
    running: bool = True
    reply: pb.SessionRequest | None = None
    rest: Sequence[bytes] = ()
    """Further fields of the reply's body, encoded."""


@dataclass(slots=True)
class WorkerEnd:
    """Decides which commands to carry out, and keeps the last reply of each recent piece of work to repeat it."""

    outbox: Sink[pb.SessionRequest]
    epoch: int = 0
    kept: int = LEAST_KEPT
    """Raised to twice the slots if that is more: work that can be unanswered, and work just answered."""
    _work: OrderedDict[Work, _Done] = field(default_factory=OrderedDict)

    def welcomed(self, welcome: pb.Welcome, outbox: Sink[pb.SessionRequest]) -> bool:
        """A new stream has begun. Returns True if the coordinator does not know this end, so that what it held is
        void."""
        void = self.epoch != 0 and not welcome.resumed
        if void:
            self._work.clear()
        self.epoch, self.outbox = welcome.epoch, outbox
        return void

    def accept(self, assignment: pb.Assignment) -> bool:
        """Whether to carry out the command with this assignment; if it was answered before, the reply is repeated."""
        if assignment.epoch != self.epoch:
            log.warning("dropped a command of epoch %d; this is epoch %d", assignment.epoch, self.epoch)
            return False
        work = (assignment.assignment_id, assignment.attempt)
        done = self._work.get(work)
        if done is None or assignment.sequence > done.sequence:
            self._work[work] = _Done(assignment.sequence)
            self._work.move_to_end(work)
            if len(self._work) > self.kept:
                self._forget()
            return True
        if assignment.sequence == done.sequence and done.reply is not None:
            self.outbox.put(done.reply, done.rest)
        return False

    def reply(self, assignment: pb.Assignment, reply: Reply | pb.Failure | None) -> None:
        """The command was carried out. `reply` is None if it has none (an Abort, a page that is not the last)."""
        message, rest = (None, ()) if reply is None else _wrapped_reply(reply, assignment)
        if assignment.epoch != self.epoch:
            return
        done = self._work.get((assignment.assignment_id, assignment.attempt))
        if done is not None and done.sequence == assignment.sequence:
            done.running, done.reply, done.rest = False, message, rest
        if message is not None:
            self.outbox.put(message, rest)

    def refused(self, message: pb.SessionRequest, why: str) -> None:
        """The stream cannot carry this reply: answer that the command failed."""
        assignment = assignment_of(message)
        if assignment is not None and not message.HasField("failure"):
            self.reply(assignment, pb.Failure(code=pb.FAILURE_CODE_INVALID, message=why))

    def _forget(self) -> None:
        """Forget the oldest work that is not under way: there is too much of it."""
        spare = len(self._work) - self.kept
        oldest: Iterable[Work] = (work for work, done in self._work.items() if not done.running)
        for work in [work for work, _ in zip(oldest, range(spare), strict=False)]:
            del self._work[work]


def _wrapped_reply(reply: Reply | pb.Failure, assignment: pb.Assignment) -> tuple[pb.SessionRequest, Sequence[bytes]]:
    """(a message with the assignment, the encoded reply): a screenshot in it is copied only once."""
    message = pb.SessionRequest()
    getattr(message, _REPLY_FIELDS[reply.DESCRIPTOR.name]).assignment.CopyFrom(assignment)
    reply.ClearField("assignment")
    return message, (reply.SerializeToString(),)
