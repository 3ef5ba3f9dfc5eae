"""A worker's end of the session: dial, Hello, prepare, Ready, then one reply per command until Bye.

What always holds: a command is carried out at most once per epoch, however often it arrives (the reply is kept and
sent again); a lost stream is dialled again and, if the coordinator remembers this instance, work in progress goes on;
if it does not, the work is cancelled and the role prepared anew. Heartbeats go on during long work; silence from the
coordinator counts as a lost stream. `serve` returns when either end says Bye.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire.channel import PROTOCOL_VERSION, Dial
from dart.wire.outbox import BATCHES, Outbox, each
from dart.wire.role import Command, CommandError, Offering, Reply, WorkerRole
from dart.wire.stream import Stream, StreamLostError

log = logging.getLogger(__name__)

_REPLY_FIELDS = {
    pb.Observed: "observed", pb.Released: "released", pb.Suggested: "suggested", pb.Generated: "generated",
    pb.ReceivingWeights: "receiving_weights", pb.WeightsLoaded: "weights_loaded", pb.Trained: "trained",
    pb.WeightsSent: "weights_sent", pb.CheckpointSaved: "checkpoint_saved", pb.Failure: "failure",
}  # fmt: skip
Key = tuple[str, int, int]
"""(assignment id, attempt, sequence): what replies are deduplicated on."""

_FIRST_DELAY_SECONDS = 0.2
HANG_UP_SECONDS = 2.0


@dataclass(slots=True)
class WorkerOptions:
    dial: Dial
    worker_id: str
    rank: int = 0
    world_size: int = 1
    capabilities: Sequence[str] = ()
    """Names of what this worker can do beyond the protocol's first version."""
    connect_seconds: float = 30.0
    """How long the first connection may take, and how long a lost one is tried again."""
    silence_factor: float = 5.0
    """Heartbeat intervals without a word after which the coordinator counts as lost."""


@dataclass(slots=True)
class _Session:
    """What outlives a stream: the epoch, what runs, and the replies already made."""

    role: WorkerRole
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    epoch: int = 0
    preparing: asyncio.Task[pb.Ready] | None = None
    ready: pb.Ready | None = None
    offering: asyncio.Task[None] | None = None
    """Of a role whose slots come and go."""
    slots: pb.Slots | None = None
    """The last that was said; every stream begins with it."""
    config_json: str = ""
    outbox: Outbox[pb.SessionRequest] = field(default_factory=Outbox)
    """Bounded by the coordinator's credits: one reply per command, plus heartbeats while the stream lives."""
    running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    replies: OrderedDict[str, tuple[Key, pb.SessionRequest]] = field(default_factory=OrderedDict)
    """The last reply of each recent assignment: the coordinator has seen the ones before it."""
    welcomed: float = 0.0
    """When the last Welcome came (monotonic seconds)."""

    def say(self, slots: pb.Slots) -> None:
        self.slots = slots
        self.outbox.put(pb.SessionRequest(slots=slots))


async def serve(role: WorkerRole, options: WorkerOptions, stop: asyncio.Event) -> str:
    """Work until Bye; returns its reason. `stop` set: say Bye and end.

    Raises UserError when the coordinator cannot be reached or rejects this worker, and whatever the role raises.
    """
    session = _Session(role)
    try:
        async with asyncio.TaskGroup() as tasks:
            reason = await _keep_connected(session, options, stop, tasks)
            for task in [*session.running.values(), *filter(None, [session.preparing, session.offering])]:
                task.cancel()
        return reason
    except* UserError as errors:
        leaf: BaseException = errors
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        raise leaf from None
    finally:
        await role.close()


async def _keep_connected(
    session: _Session, options: WorkerOptions, stop: asyncio.Event, tasks: asyncio.TaskGroup
) -> str:
    """Stream after stream until one ends with Bye; gives up when dialling fails for `connect_seconds`."""
    deadline = time.monotonic() + options.connect_seconds
    delay = _FIRST_DELAY_SECONDS
    while True:
        dialled = time.monotonic()
        try:
            return await _stream(session, options, stop, tasks)
        except StreamLostError as error:
            if error.code == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(
                    f"coordinator {options.dial.address} refused the token: set DART_TOKEN to this role's token"
                ) from None
            if session.welcomed >= dialled:
                deadline = time.monotonic() + options.connect_seconds
                delay = _FIRST_DELAY_SECONDS
                log.warning("stream to %s lost (%s); dialling again", options.dial.address, error)
            if time.monotonic() > deadline:
                raise UserError(
                    f"coordinator {options.dial.address} was not reached for {options.connect_seconds:.0f} s "
                    f"({error}): check --coordinator HOST:PORT and that `dart coordinator` runs there"
                ) from None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), delay * random.uniform(0.5, 1.0))
            return "stopped"
        delay = min(delay * 1.6, 3.0)


async def _stream(session: _Session, options: WorkerOptions, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> str:
    """One connection's life. Returns the reason of a Bye; raises StreamLostError when it breaks."""
    async with options.dial.channel() as channel:
        call = _session_call(channel)(metadata=options.dial.metadata)
        stream = Stream(call)
        hello = pb.Hello(
            worker_id=options.worker_id,
            instance_id=session.instance_id,
            role=session.role.role,
            capabilities=[*options.capabilities, BATCHES],
            last_epoch=session.epoch,
            protocol_version=PROTOCOL_VERSION,
            rank=options.rank,
            world_size=options.world_size,
        )
        await stream.write(pb.SessionRequest(hello=hello).SerializeToString())
        first = _parsed(await stream.read())
        if first.WhichOneof("body") == "reject":
            raise UserError(f"coordinator {options.dial.address}: {first.reject.reason}: {first.reject.remedy}")
        await _welcomed(session, first.welcome)
        return await _converse(session, stream, first.welcome.heartbeat_seconds, options, stop, tasks)


def _session_call(channel: grpc.aio.Channel) -> Any:
    """As the generated stub's Session, but it takes and gives encoded messages.

    What is written is encoded already (`dart.wire.outbox`), and grpc would turn a message that it cannot parse into
    None.
    """
    name = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    return channel.stream_stream(f"/{name}/Session", None, None)


def _parsed(encoded: bytes) -> pb.SessionResponse:
    try:
        return pb.SessionResponse.FromString(encoded)
    except DecodeError:
        raise StreamLostError("the coordinator sent what is no message of this protocol") from None


async def _welcomed(session: _Session, welcome: pb.Welcome) -> None:
    session.outbox = Outbox(BATCHES in welcome.capabilities)
    session.welcomed = time.monotonic()
    if session.epoch and not welcome.resumed:
        # Another coordinator, or one that gave this worker up: what was held is void.
        await _cancel_all(session)
        session.replies.clear()
        if session.preparing is not None:
            for task in filter(None, (session.preparing, session.offering)):
                task.cancel()
                await asyncio.wait({task})
            await session.role.close()
            session.preparing = session.ready = session.offering = session.slots = None
    session.epoch = welcome.epoch
    session.config_json = welcome.config_json


async def _cancel_all(session: _Session) -> None:
    running = list(session.running.values())
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _converse(
    session: _Session,
    ends: Stream,
    heartbeat_seconds: float,
    options: WorkerOptions,
    stop: asyncio.Event,
    tasks: asyncio.TaskGroup,
) -> str:
    stream = _Stream(session, ends, heartbeat_seconds, heartbeat_seconds * options.silence_factor, tasks)
    alongside = (stream.write(), stream.prepare(), stream.beat(), stream.listen())
    return await first_result(stream.read(), stream.stopped(stop), alongside=alongside)


@dataclass(slots=True)
class _Stream:
    """The parts of one connection that run side by side."""

    session: _Session
    ends: Stream
    heartbeat_seconds: float
    silence_seconds: float
    tasks: asyncio.TaskGroup
    said_goodbye: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    written: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    async def write(self) -> None:
        while True:
            encoded, goodbye = await self.session.outbox.take()
            try:
                await self.ends.write(encoded)
            except StreamLostError:
                return  # the reader knows better what this means: a goodbye may be on its way
            self.written = time.monotonic()
            if goodbye:
                self.said_goodbye.set()

    async def beat(self) -> None:
        """Something is written at least every `heartbeat_seconds`. A timer per message would cost more than it."""
        outbox, interval = self.session.outbox, self.heartbeat_seconds
        while True:
            await asyncio.sleep(max(0.0, self.written + interval - time.monotonic()) or interval)
            if time.monotonic() - self.written >= interval and not outbox:
                outbox.put(pb.SessionRequest(heartbeat=pb.Heartbeat(sent_unix_seconds=time.time())))

    async def listen(self) -> None:
        """Raises StreamLostError when the coordinator has been silent for too long."""
        while True:
            left = self.heard + self.silence_seconds - time.monotonic()
            if left <= 0:
                raise StreamLostError(f"silent for {self.silence_seconds:.0f} s")
            await asyncio.sleep(left)

    async def prepare(self) -> None:
        """Prepare the role once per epoch, however often the stream breaks meanwhile; then say Ready on each stream."""
        session = self.session
        if session.preparing is None:
            session.preparing = self.tasks.create_task(session.role.prepare(session.config_json))
        session.ready = await asyncio.shield(session.preparing)
        session.outbox.put(pb.SessionRequest(ready=session.ready))
        if session.slots is not None:
            session.outbox.put(pb.SessionRequest(slots=session.slots))
        elif session.offering is None and isinstance(session.role, Offering):
            session.offering = self.tasks.create_task(session.role.run(session.say))

    async def read(self) -> str:
        while True:
            try:
                received = _parsed(await self.ends.read())
            except StreamLostError:
                self.ended.set()
                if self.said_goodbye.is_set():
                    return "stopped"
                raise
            self.heard = time.monotonic()
            for message in each(received):
                body = message.WhichOneof("body")
                if body == "bye":
                    return str(message.bye.reason)
                if body not in (None, "heartbeat", "welcome", "reject"):
                    _accept(self.session, getattr(message, body), self.tasks)

    async def stopped(self, stop: asyncio.Event) -> str:
        await stop.wait()
        # Through the outbox: a call takes one write at a time.
        self.session.outbox.put(pb.SessionRequest(bye=pb.Bye(reason="stopped")))
        await self.said_goodbye.wait()
        # The coordinator ends the stream when it has read the goodbye; hanging up first could overtake it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), HANG_UP_SECONDS)
        return "stopped"


async def first_result(*racers: Coroutine[Any, Any, str], alongside: Sequence[Coroutine[Any, Any, None]]) -> str:
    """The first racer's result, or the first end of the stream that any of them met; the others are cancelled.

    What the rest meets after that is no news: when one end says goodbye, the other's write may fail.
    """
    result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def race(part: Coroutine[Any, Any, Any], decides: bool) -> None:
        try:
            value = await part
        except StreamLostError as error:
            if not result.done():
                result.set_exception(error)
        else:
            if decides and not result.done():
                result.set_result(value)

    async with asyncio.TaskGroup() as group:
        started = [group.create_task(race(part, True)) for part in racers]
        started += [group.create_task(race(part, False)) for part in alongside]
        await asyncio.wait({result})
        for task in started:
            task.cancel()
    return result.result()


def _accept(session: _Session, command: Command, tasks: asyncio.TaskGroup) -> None:
    assignment = command.assignment
    if assignment.epoch != session.epoch:
        log.warning("dropped a command of epoch %d; this is epoch %d", assignment.epoch, session.epoch)
        return
    key = (assignment.assignment_id, assignment.attempt, assignment.sequence)
    last_key, last_reply = session.replies.get(assignment.assignment_id, (None, None))
    if last_reply is not None and last_key == key:
        session.outbox.put(last_reply)
    elif key not in session.running:
        session.running[key] = tasks.create_task(_carry_out(session, command, key))


def _wrapped(reply: Reply | pb.Failure) -> pb.SessionRequest:
    """A screenshot's bytes are set in place (`dart.wire.convert` says why)."""
    data = b""
    if isinstance(reply, pb.Observed) and reply.image.data:
        data, reply.image.data = reply.image.data, b""
    body: Any = {_REPLY_FIELDS[type(reply)]: reply}
    message = pb.SessionRequest(**body)
    if data:
        message.observed.image.data = data
    return message


async def _carry_out(session: _Session, command: Command, key: Key) -> None:
    reply: Reply | pb.Failure | None
    try:
        reply = await session.role.handle(command)
    except CommandError as error:
        reply = pb.Failure(code=error.code, message=str(error))
    finally:
        del session.running[key]
    if reply is None:
        return
    reply.assignment.CopyFrom(command.assignment)
    message = _wrapped(reply)
    session.replies[command.assignment.assignment_id] = (key, message)
    session.replies.move_to_end(command.assignment.assignment_id)
    # Twice the credits: everything that can be unanswered, and what has just been answered.
    if len(session.replies) > 2 * max(session.ready.slots if session.ready else 0, 32):
        session.replies.popitem(last=False)
    session.outbox.put(message)
