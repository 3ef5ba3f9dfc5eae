"""The two ends of a session as plain objects: what is sent, carried out, answered, repeated or dropped, and when.

No event loop and no network: events come in as calls, with the time as an argument; messages go out through `Sink.put`.
The coordinator has one `CoordinatorEnd` for each worker instance, the worker has one `WorkerEnd`. Both outlive their
streams; `dart.wire.stream` moves the messages.

What always holds, however often streams break, and whatever arrives twice:

- A command is known by (assignment id, attempt, sequence) within an epoch, and is carried out at most once.
- A command without an answer is sent again with each new stream of the same epoch, before anything newer; a command
  that was answered, or that nobody waits for any more, is not.
- At most one command of an assignment is at the worker at a time; the pages of one call count as one command. What
  follows waits here until the one before it is answered, so a Release never overtakes an Act whose caller has given up.
  Abort alone does not wait.
- A new epoch voids everything of the one before.

Worked example: the caller of Act 2 is cancelled and the episode sends Release 3. The end keeps Act 2 (`abandon`) and
holds Release 3 back. The stream breaks; on the new one Act 2 goes out again. The worker has carried it out already and
repeats its reply; only then does Release 3 go out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

from dart.v1 import session_pb2 as pb
from dart.wire.role import Command, Reply

log = logging.getLogger(__name__)

Work: TypeAlias = tuple[str, int]
"""(assignment id, attempt): one piece of work."""
Key: TypeAlias = tuple[str, int, int]
"""(assignment id, attempt, sequence): one command."""

BOUNDED = frozenset({"reset", "act", "suggest", "generate", "release"})
"""Commands whose answers have to come in time. An update takes as long as it takes, transfers have a timeout."""

Sent_contra = TypeVar("Sent_contra", contravariant=True)


class Sink(Protocol[Sent_contra]):
    """Takes the messages for the other end; they are written in this order."""

    def put(self, message: Sent_contra, /) -> None: ...


def _field_names(message: type[pb.SessionRequest] | type[pb.SessionResponse]) -> dict[str, str]:
    """Of each message that can be a body: its type's name, and the name of its field."""
    bodies = message.DESCRIPTOR.oneofs_by_name["body"].fields
    return {field.message_type.name: field.name for field in bodies if field.message_type is not None}


_COMMAND_FIELDS = _field_names(pb.SessionResponse)
_REPLY_FIELDS = _field_names(pb.SessionRequest)


def assignment_of(message: pb.SessionRequest | pb.SessionResponse) -> pb.Assignment | None:
    """The assignment that a command or a reply is about; None for other messages."""
    body = message.WhichOneof("body")
    return getattr(getattr(message, body), "assignment", None) if body else None


# ---- the coordinator's end ----


@dataclass(slots=True)
class Unanswered:
    """A command (all its pages) that the worker owes an answer to, or will when it is sent."""

    key: Key
    kind: str
    messages: Sequence[pb.SessionResponse]
    since: float
    """When it was sent first (monotonic seconds)."""
    awaited: bool = True
    """Somebody waits for the reply. A Release goes out until it is answered all the same."""

    @property
    def work(self) -> Work:
        return self.key[:2]


@dataclass(frozen=True, slots=True)
class Overdue:
    """Commands that were not answered in time. `hangs`: they are so many that the worker itself has failed."""

    why: str = ""
    failed: Sequence[Key] = ()
    hangs: bool = False


@dataclass(slots=True)
class CoordinatorEnd:
    """Gives out commands and matches replies to them."""

    epoch: int
    outbox: Sink[pb.SessionResponse]
    stale: int = 0
    """Replies of another epoch, or to a command that nobody has open."""
    _sent: dict[Key, Unanswered] = field(default_factory=dict)
    _open: dict[Work, Key] = field(default_factory=dict)
    """The command of each piece of work that is at the worker."""
    _held: dict[Work, list[Unanswered]] = field(default_factory=dict)
    """Those that wait for the one at the worker, oldest first."""
    _sequences: dict[Work, int] = field(default_factory=dict)

    def issue(self, commands: Sequence[Command | pb.SessionResponse], now: float, awaited: bool = True) -> Key:
        """Number a command, or the pages of one, and send it as soon as its work allows; what its reply is known by.

        A command may come in its message already: a body that is put into a message is copied.
        """
        numbered = [self._number(command) for command in commands]
        message, key = numbered[-1]
        kind = message.WhichOneof("body") or ""
        entry = Unanswered(key, kind, [message for message, _ in numbered], now, awaited)
        if kind == "abort":
            self.outbox.put(message)  # it has no reply, and is for the command that it would have to wait for
        elif entry.work in self._open:
            self._held.setdefault(entry.work, []).append(entry)
        else:
            self._send(entry)
        return key

    def abandon(self, key: Key) -> None:
        """Nobody waits for this reply any more. The command stays open while another waits behind it."""
        if (entry := self._sent.get(key)) is not None:
            entry.awaited = False
        elif waiting := self._held.get(key[:2]):
            self._held[key[:2]] = [entry for entry in waiting if entry.key != key]

    def finish(self, work: Work) -> None:
        """No more commands of this work will be issued: forget its numbering, and a command that nobody wants."""
        self._sequences.pop(work, None)
        if (key := self._open.get(work)) is not None and not self._wanted(self._sent[key]):
            self._close(key)

    @property
    def unanswered(self) -> int:
        """Commands that the worker owes an answer to."""
        return len(self._sent)

    def kind_of(self, assignment: pb.Assignment) -> str:
        """The kind of the open command that a reply with this assignment answers, such as "act"; else ""."""
        entry = self._sent.get((assignment.assignment_id, assignment.attempt, assignment.sequence))
        return entry.kind if entry is not None and assignment.epoch == self.epoch else ""

    def answered(self, assignment: pb.Assignment) -> Key | None:
        """The command that a reply closes; None when the reply is stale, which is counted."""
        key = (assignment.assignment_id, assignment.attempt, assignment.sequence)
        if assignment.epoch != self.epoch or key not in self._sent:
            self.stale += 1
            return None
        self._close(key)
        return key

    def refused(self, message: pb.SessionResponse) -> Key | None:
        """The stream cannot carry this message: the command that it closes. None when nobody has it open."""
        assignment = assignment_of(message)
        if assignment is None:
            return None
        work = (assignment.assignment_id, assignment.attempt)
        key = self._open.get(work)
        if key is None or not any(page is message for page in self._sent[key].messages):
            return None
        self._close(key)
        return key

    def resume(self, outbox: Sink[pb.SessionResponse]) -> None:
        """The same instance has a new stream: what it owes an answer to goes out again, in the old order."""
        self.outbox = outbox
        for entry in list(self._sent.values()):
            if self._wanted(entry):
                self._put(entry)
            else:
                self._close(entry.key)

    def overdue(self, now: float, seconds: float) -> Overdue:
        """Commands without an answer for `seconds` have failed, and are closed.

        When they are at least half of what the worker has, its engine or its browser hangs, though its heartbeats go
        on; then nothing is closed, because the worker is to be given up.
        """
        waiting = [entry for entry in self._sent.values() if entry.kind in BOUNDED]
        late = [entry for entry in waiting if now - entry.since >= seconds]
        if not late:
            return Overdue()
        why = f"no answer to {', '.join(sorted({entry.kind for entry in late}))} for {seconds:.0f} s"
        if 2 * len(late) >= len(waiting):
            return Overdue(why, hangs=True)
        for entry in late:
            self._close(entry.key, now)
        return Overdue(why, [entry.key for entry in late])

    def oldest(self, now: float) -> tuple[str, float]:
        """(kind, seconds) of the command that somebody has waited for longest; ("", 0.0) where nobody waits."""
        oldest = min((one for one in self._sent.values() if one.awaited), key=lambda one: one.since, default=None)
        return (oldest.kind, now - oldest.since) if oldest else ("", 0.0)

    def validate(self) -> None:
        """Raises AssertionError when what always holds does not. For tests."""
        assert self._open == {entry.work: key for key, entry in self._sent.items()}
        for work, waiting in self._held.items():
            assert waiting and work in self._open, f"{work} waits for nothing"
            keys = [self._open[work], *(entry.key for entry in waiting)]
            assert keys == sorted(keys), f"{keys} are out of order"

    def _wanted(self, entry: Unanswered) -> bool:
        return entry.awaited or entry.kind == "release" or bool(self._held.get(entry.work))

    def _send(self, entry: Unanswered) -> None:
        self._sent[entry.key] = entry
        self._open[entry.work] = entry.key
        self._put(entry)

    def _put(self, entry: Unanswered) -> None:
        for message in entry.messages:
            self.outbox.put(message)

    def _close(self, key: Key, now: float | None = None) -> None:
        """The worker owes no answer to this any more; the next command of its work may go."""
        entry = self._sent.pop(key)
        del self._open[entry.work]
        waiting = self._held.pop(entry.work, [])
        if waiting:
            following, *rest = waiting
            if rest:
                self._held[entry.work] = rest
            following.since = max(following.since, now or 0.0)
            self._send(following)

    def _number(self, command: Command | pb.SessionResponse) -> tuple[pb.SessionResponse, Key]:
        """The message, with its epoch and sequence, and what its reply is known by."""
        message = command if isinstance(command, pb.SessionResponse) else _wrapped_command(command)
        assignment = assignment_of(message)
        assert assignment is not None, "only commands are issued"
        work = (assignment.assignment_id, assignment.attempt)
        sequence = self._sequences.get(work, 0) + 1
        self._sequences[work] = sequence
        assignment.epoch, assignment.sequence = self.epoch, sequence
        return message, (*work, sequence)


def _wrapped_command(command: Command) -> pb.SessionResponse:
    message = pb.SessionResponse()
    getattr(message, _COMMAND_FIELDS[command.DESCRIPTOR.name]).CopyFrom(command)
    return message


# ---- the worker's end ----

LEAST_KEPT = 64
"""Pieces of work whose last reply is kept, at least."""


@dataclass(slots=True)
class _Done:
    """The newest command of one piece of work: carried out, or being so."""

    sequence: int
    running: bool = True
    reply: pb.SessionRequest | None = None


@dataclass(slots=True)
class WorkerEnd:
    """Says which commands to carry out, and keeps the last reply of each recent piece of work to repeat it."""

    outbox: Sink[pb.SessionRequest]
    epoch: int = 0
    kept: int = LEAST_KEPT
    """Set to twice the slots where that is more: what can be unanswered, and what has just been answered."""
    _work: OrderedDict[Work, _Done] = field(default_factory=OrderedDict)

    def welcomed(self, welcome: pb.Welcome, outbox: Sink[pb.SessionRequest]) -> bool:
        """A new stream has begun. True when what this end held is void: the coordinator does not know it."""
        void = self.epoch != 0 and not welcome.resumed
        if void:
            self._work.clear()
        self.epoch, self.outbox = welcome.epoch, outbox
        return void

    def accept(self, assignment: pb.Assignment) -> bool:
        """True when the command with this assignment is to be carried out; one that was answered is answered again."""
        if assignment.epoch != self.epoch:
            log.warning("dropped a command of epoch %d; this is epoch %d", assignment.epoch, self.epoch)
            return False
        work = (assignment.assignment_id, assignment.attempt)
        done = self._work.get(work)
        if done is None or assignment.sequence > done.sequence:
            self._work[work] = _Done(assignment.sequence)
            self._work.move_to_end(work)
            self._forget()
            return True
        if assignment.sequence == done.sequence and done.reply is not None:
            self.outbox.put(done.reply)
        return False

    def reply(self, assignment: pb.Assignment, reply: Reply | pb.Failure | None) -> None:
        """The command was carried out; None: it has no reply (an Abort, a page that is not the last)."""
        message = None if reply is None else _wrapped_reply(reply, assignment)
        if assignment.epoch != self.epoch:
            return
        done = self._work.get((assignment.assignment_id, assignment.attempt))
        if done is not None and done.sequence == assignment.sequence:
            done.running, done.reply = False, message
        if message is not None:
            self.outbox.put(message)

    def refused(self, message: pb.SessionRequest, why: str) -> None:
        """The stream cannot carry this reply: the command has failed instead."""
        assignment = assignment_of(message)
        if assignment is not None and not message.HasField("failure"):
            self.reply(assignment, pb.Failure(code=pb.FAILURE_CODE_INVALID, message=why))

    def _forget(self) -> None:
        """The oldest work that is not being done, when there is too much of it."""
        spare = len(self._work) - self.kept
        oldest: Iterable[Work] = (work for work, done in self._work.items() if not done.running)
        for work in [work for work, _ in zip(oldest, range(spare), strict=False)]:
            del self._work[work]


def _wrapped_reply(reply: Reply | pb.Failure, assignment: pb.Assignment) -> pb.SessionRequest:
    """The reply in its message. A screenshot's bytes are set in place (`dart.wire.convert` says why)."""
    data = b""
    if isinstance(reply, pb.Observed) and reply.image.data:
        data, reply.image.data = reply.image.data, b""
    reply.assignment.CopyFrom(assignment)
    message = pb.SessionRequest()
    getattr(message, _REPLY_FIELDS[reply.DESCRIPTOR.name]).CopyFrom(reply)
    if data:
        message.observed.image.data = data
    return message
