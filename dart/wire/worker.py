"""A worker's end of the session: dial, Hello, prepare, Ready, then one reply per command until Bye.

Invariants: a command is carried out at most once per epoch, however often it arrives (`dart.wire.session`). After a
lost stream, however it broke, the worker dials again; if the coordinator remembers this instance, work in progress
continues, else the work is cancelled and the role is prepared again. Heartbeats continue during long work; silence from
the coordinator counts as a lost stream. `serve` returns when either end says Bye.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc

from dart.errors import USER_ERROR, UserError, ungrouped
from dart.failpoints import failpoint
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import BATCHES, NOTICES, has
from dart.wire.channel import PROTOCOL_VERSION, Dial
from dart.wire.outbox import MalformedError, Outbox, messages, too_large
from dart.wire.role import Command, CommandError, Offering, Reply, WorkerRole
from dart.wire.session import LEAST_KEPT, Key, WorkerEnd
from dart.wire.stream import Conversation, Pulse, Stream, StreamLostError

STOPPED = "stopped"
"""Why a session ended that this end was told to end."""
log = logging.getLogger(__name__)

UNREACHED_EXIT = 3
"""Exit code of a worker that was connected once and cannot reach its coordinator any more, or that was ready once and
cannot be again. Its supervisor may try it again: the command line was right."""
_FIRST_DELAY_SECONDS = 0.2
_CLOSED = re.compile("Socket closed|Connection reset")
"""In gRPC's words, where the other end has accepted a connection and closed it before it said anything."""
_ABSENT = "check --coordinator HOST:PORT and that `dart coordinator` runs there"
_FULL = (
    "connections are closed as soon as they are made, as a coordinator does with those beyond its limit of open files: "
    "raise `ulimit -Hn` where it starts, or check that --coordinator HOST:PORT is a coordinator's"
)


@dataclass(slots=True)
class WorkerOptions:
    dial: Dial
    worker_id: str
    connect_seconds: float = 30.0
    """How long to try to connect after a lost connection, at least; longer if the coordinator remembers this worker for
    longer. And at first, too, unless `first_seconds` says otherwise."""
    first_seconds: float | None = None
    address_now: Callable[[], str] | None = None
    """Where the coordinator is now; asked before each dial, because the next one may listen elsewhere."""
    silence_factor: float = 5.0
    """Heartbeat intervals of silence after which the coordinator counts as lost."""


@dataclass(slots=True)
class _Service:
    """What outlives a stream: the role, this instance's name and end of the session, and running commands.

    The outbox is bounded by the coordinator's credits: one reply per command, and one heartbeat.
    """

    role: WorkerRole
    options: WorkerOptions
    tasks: asyncio.TaskGroup
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    end: WorkerEnd = field(default_factory=lambda: WorkerEnd(Outbox()))
    preparing: asyncio.Task[pb.Ready] | None = None
    was_ready: bool = False
    had_slots: bool = False
    """Both also in an earlier epoch."""
    offering: asyncio.Task[None] | None = None
    """The task of a role whose slots come and go."""
    slots: pb.Slots | None = None
    """The last report; every stream begins with it."""
    config_json: str = ""
    running: dict[Key, asyncio.Task[None]] = field(default_factory=dict)
    welcomed_at: float = 0.0
    """When the last Welcome came (monotonic seconds)."""
    remembered_seconds: float = 0.0
    """How long its coordinator remembers a worker that is silent."""

    def hello(self) -> pb.Hello:
        return pb.Hello(
            worker_id=self.options.worker_id,
            instance_id=self.instance_id,
            role=self.role.role,
            capabilities=[*self.role.capabilities, BATCHES, NOTICES],
            last_epoch=self.end.epoch,
            protocol_version=PROTOCOL_VERSION,
            rank=self.role.rank,
            world_size=self.role.world_size,
        )

    async def welcomed(self, welcome: pb.Welcome) -> Outbox[pb.SessionRequest]:
        """A stream has begun. If the coordinator does not know this instance, what was held is void.

        Returns what the stream writes next.
        """
        self.welcomed_at, self.remembered_seconds = time.monotonic(), welcome.lost_after_seconds
        outbox: Outbox[pb.SessionRequest] = Outbox(has(welcome, BATCHES), self._too_large)
        self.config_json = welcome.config_json
        if self.end.welcomed(welcome, outbox):
            await self.cancel_commands()
            if self.preparing is not None:
                for task in filter(None, (self.preparing, self.offering)):
                    task.cancel()
                    await asyncio.wait({task})
                await self.role.close()
                self.preparing = self.offering = self.slots = None
        return outbox

    async def prepare(self) -> None:
        """Prepare the role once per epoch, however often the stream breaks meanwhile; then send Ready on each
        stream."""
        if self.preparing is None:
            self.preparing = self.tasks.create_task(self._prepared())
        ready = await asyncio.shield(self.preparing)
        self.end.kept = max(LEAST_KEPT, 2 * ready.slots)
        self.end.outbox.put(pb.SessionRequest(ready=ready))
        if self.slots is not None:
            self.say(self.slots)
        elif self.offering is None and isinstance(self.role, Offering):
            self.offering = self.tasks.create_task(self._offered(self.role))

    async def _prepared(self) -> pb.Ready:
        try:
            ready = await self.role.prepare(self.config_json)
        except UserError as error:
            if self.was_ready and error.exit_code == USER_ERROR:  # memory that is not free yet, for example
                error.exit_code = UNREACHED_EXIT
            raise
        self.was_ready = True
        return ready

    async def _offered(self, role: Offering) -> None:
        try:
            await role.run(self.say)
        except UserError as error:
            if self.had_slots and error.exit_code == USER_ERROR:  # one of its machines, which may be mended
                error.exit_code = UNREACHED_EXIT
            raise

    def say(self, slots: pb.Slots) -> None:
        self.slots, self.had_slots = slots, self.had_slots or slots.count > 0
        self.end.outbox.put(pb.SessionRequest(slots=slots))

    def receive(self, message: pb.SessionResponse) -> None:
        """Begin to carry out a command, unless it has been already."""
        body = message.WhichOneof("body")
        if body == "notice":
            log.warning("the coordinator says that this worker broke a rule: %s", message.notice.reason)
            return
        if body in (None, "heartbeat", "welcome", "reject"):
            return
        command: Command = getattr(message, body)
        assignment = command.assignment
        if self.end.accept(assignment):
            key = (assignment.assignment_id, assignment.attempt, assignment.sequence)
            self.running[key] = self.tasks.create_task(self._carry_out(command, key))

    async def cancel_commands(self) -> None:
        running = list(self.running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _carry_out(self, command: Command, key: Key) -> None:
        reply: Reply | pb.Failure | None
        try:
            reply = await self.role.handle(command)
            failpoint(f"before-{type(reply).__name__}")
        except CommandError as error:
            reply = pb.Failure(code=error.code, message=str(error), trajectory_ids=error.trajectories)
        finally:
            self.running.pop(key, None)
        self.end.reply(command.assignment, reply)

    def _too_large(self, message: pb.SessionRequest, size: int) -> None:
        why = too_large(message.WhichOneof("body") or "", size)
        log.error("%s: the command has failed", why)
        self.end.refused(message, why)


class NotYet(Exception):
    """The coordinator will have this worker again after so many seconds."""

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.seconds = seconds


async def serve(role: WorkerRole, options: WorkerOptions, stop: asyncio.Event) -> str:
    """Work until Bye, and return its reason. Setting `stop` makes it say Bye and end.

    Raises UserError if the coordinator cannot be reached or rejects this worker, and whatever the role raises.
    """
    try:
        with ungrouped(UserError):
            async with asyncio.TaskGroup() as tasks:
                service = _Service(role, options, tasks)
                reason = await _keep_connected(service, stop)
                for task in [*service.running.values(), *filter(None, [service.preparing, service.offering])]:
                    task.cancel()
        return reason
    finally:
        await role.close()


async def _keep_connected(service: _Service, stop: asyncio.Event) -> str:
    """Run stream after stream until one ends with Bye; give up when dialling fails for too long."""
    options = service.options
    patience = options.first_seconds or options.connect_seconds
    deadline = time.monotonic() + patience
    delay = _FIRST_DELAY_SECONDS
    while True:
        dialled = time.monotonic()
        if options.address_now is not None:
            with contextlib.suppress(OSError):  # no coordinator has told one yet
                options.dial = replace(options.dial, address=options.address_now())
        wait = delay * random.uniform(0.5, 1.0)
        try:
            return await _stream(service, stop)
        except NotYet as error:
            log.warning("coordinator %s: %s; dialling again in %.0f s", options.dial.address, error, error.seconds)
            wait, patience = error.seconds, options.connect_seconds
            deadline = time.monotonic() + wait + patience
        except StreamLostError as error:
            if error.code == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(
                    f"coordinator {options.dial.address} refused the token: set DART_TOKEN to this role's token"
                ) from None
            if service.welcomed_at >= dialled:
                patience = max(options.connect_seconds, service.remembered_seconds)
                deadline = time.monotonic() + patience
                delay = _FIRST_DELAY_SECONDS
                log.warning("stream to %s lost (%s); dialling again", options.dial.address, error)
            if not service.welcomed_at and delay == _FIRST_DELAY_SECONDS:
                log.warning("coordinator %s is not there yet (%s)", options.dial.address, error)
            if time.monotonic() > deadline:
                raise UserError(
                    f"coordinator {options.dial.address} could not be reached for {patience:.0f} s "
                    f"({error}): {_FULL if _CLOSED.search(str(error)) else _ABSENT}",
                    exit_code=UNREACHED_EXIT if service.welcomed_at else USER_ERROR,
                ) from None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), wait)
            return STOPPED
        delay = min(delay * 1.6, 3.0)


async def _stream(service: _Service, stop: asyncio.Event) -> str:
    """Run one connection. Returns the reason of a Bye; raises StreamLostError if it breaks in any way.

    Raises UserError if the coordinator cannot use this worker.
    """
    options = service.options
    async with options.dial.channel() as channel:
        stream = Stream(_session_call(channel)(metadata=options.dial.metadata))
        try:
            async with asyncio.timeout(options.connect_seconds):
                await stream.write(pb.SessionRequest(hello=service.hello()).SerializeToString())
                welcome = _welcome(await stream.read(), options)
        except TimeoutError:
            raise StreamLostError(f"no welcome within {options.connect_seconds:.0f} s") from None
        outbox = await service.welcomed(welcome)
        pulse = Pulse(welcome.heartbeat_seconds, welcome.heartbeat_seconds * options.silence_factor)
        talk = Conversation(stream, outbox, pb.SessionRequest, pb.SessionResponse, service.receive, pulse)
        goodbye = await talk.run(service.prepare(), _say_goodbye(outbox, stop))
        if goodbye.refused:
            raise UserError(f"coordinator {options.dial.address}: {goodbye.reason}")
        return goodbye.reason if goodbye.heard else STOPPED


def _welcome(encoded: bytes, options: WorkerOptions) -> pb.Welcome:
    """The Welcome in the first message. Raises UserError if the coordinator rejects this worker, NotYet if only for a
    while, StreamLostError for anything else."""
    try:
        first = messages(encoded, pb.SessionResponse)[0]
    except MalformedError as error:
        raise StreamLostError(str(error)) from None
    match first.WhichOneof("body"):
        case "welcome":
            return first.welcome
        case "reject" if first.reject.retry_after_seconds > 0:
            raise NotYet(first.reject.reason, first.reject.retry_after_seconds)
        case "reject":
            raise UserError(f"coordinator {options.dial.address}: {first.reject.reason}: {first.reject.remedy}")
        case other:
            raise StreamLostError(f"the coordinator began with {other or 'nothing'}, not with a welcome")


def _session_call(channel: grpc.aio.Channel) -> grpc.aio.StreamStreamMultiCallable[bytes, bytes]:
    """Like the generated stub's Session, but with encoded messages.

    Outgoing messages are encoded already (`dart.wire.outbox`), and grpc would turn a message that it cannot parse into
    None.
    """
    name = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    return channel.stream_stream(f"/{name}/Session", None, None)


async def _say_goodbye(outbox: Outbox[pb.SessionRequest], stop: asyncio.Event) -> None:
    """Send a message through the outbox, because a call takes one write at a time."""
    await stop.wait()
    outbox.put(pb.SessionRequest(bye=pb.Bye(reason=STOPPED)))
