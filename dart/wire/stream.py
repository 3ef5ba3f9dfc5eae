"""One gRPC stream: bytes in and out, one exception for every way in which it can break, and the loop of both ends.

What grpc.aio raises when a stream is over depends on which call noticed first, and most of it is not an RpcError
(grpc/aio/_call.py and _cython/_cygrpc/aio of grpcio 1.85):

- `AioRpcError`: a read after the peer or the network ended the call; a write that the core refused.
- `asyncio.InvalidStateError`: a write after the call has ended, or after `done_writing`.
- `grpc.aio.BaseError`: on the server, a read or write after the call has ended (`UsageError`), after the server has
  stopped, or that the core refused (`ExecuteBatchError`).
- `asyncio.CancelledError`: a read after this end cancelled the call, though nobody cancelled the task that reads.
- `OSError`, `EOFError`: nothing in grpc.aio raises them today; streams other than gRPC's do.

`Stream` turns all of them into StreamLostError, and also the end of the call. Cancellation of the task passes through.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import grpc

from dart.v1 import session_pb2 as pb
from dart.wire.outbox import MalformedError, Outbox, messages

Sent = TypeVar("Sent", pb.SessionRequest, pb.SessionResponse)
Received = TypeVar("Received", pb.SessionRequest, pb.SessionResponse)

BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, OSError, EOFError)


class StreamLostError(Exception):
    """The stream broke, ended without a goodbye or went silent. `code`: the status of the call, if it has one."""

    def __init__(self, why: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(why)
        self.code = code


class Call(Protocol):
    """The part of a gRPC call used here: the client's call or the server's context. Both read and write bytes."""

    async def read(self) -> object: ...

    async def write(self, encoded: bytes, /) -> None: ...


class Stream:
    """Reads and writes encoded messages. One reader and one writer at a time."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> bytes:
        """The next message. Raises StreamLostError when the stream is over."""
        try:
            received = await self._call.read()
        except BROKEN as error:
            raise lost(error) from error
        except asyncio.CancelledError as error:
            raise _cancelled(error) from error
        if not isinstance(received, bytes):
            raise StreamLostError("closed without a goodbye")
        return received

    async def write(self, encoded: bytes) -> None:
        """Raises StreamLostError when nothing can be sent to the other end any more."""
        try:
            await self._call.write(encoded)
        except BROKEN as error:
            raise lost(error) from error
        except asyncio.CancelledError as error:
            raise _cancelled(error) from error


def lost(error: BaseException) -> StreamLostError:
    """The exception for a lost stream, with the text of whatever was raised."""
    if isinstance(error, grpc.aio.AioRpcError):
        return StreamLostError(error.details() or error.code().name, error.code())
    return StreamLostError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _cancelled(error: asyncio.CancelledError) -> BaseException:
    """The cancellation itself if it is meant for this task, else StreamLostError."""
    task = asyncio.current_task()
    return error if task is None or task.cancelling() else StreamLostError("the call was cancelled")


AT_ONCE = 32
"""Messages of a batch that are received before everything else has its turn. What they lead to is on its way while the
rest of the batch is read: with 64 environments that answer at once, a quarter more steps get through than without a
pause. With 16 it is a tenth, as batches become smaller. What is not received when the stream breaks is repeated."""
HANG_UP_SECONDS = 2.0
"""How long an end that said goodbye, or can no longer write, waits for a last message or the end of the stream."""


@dataclass(slots=True)
class Pulse:
    """When to send something, and how long the other end has been silent. Times are monotonic seconds."""

    interval: float
    """Something is written at least this often, in seconds."""
    silence: float = math.inf
    """Seconds without a message after which the other end counts as lost."""
    written: float = 0.0
    heard: float = 0.0

    def beat_in(self, now: float) -> float:
        """Seconds until a heartbeat is due; 0 when it is."""
        return max(0.0, self.written + self.interval - now)

    def lost_in(self, now: float) -> float:
        """Seconds until the other end counts as lost; 0 when it is."""
        return max(0.0, self.heard + self.silence - now)


class Goodbye(NamedTuple):
    """How a stream ended on purpose. `heard`: the other end said so; `reason` is its reason. `refused`: as in Bye."""

    reason: str
    heard: bool
    refused: bool = False


class Conversation(Generic[Sent, Received]):
    """Runs one stream, the same way for both ends: reads, writes, sends heartbeats and watches for silence.

    `receive` is called with each message except a goodbye. Messages to send are put into `outbox`, including a Bye.
    `parse` returns the messages in what was read; without it, bytes that are not a message end the stream.
    """

    def __init__(
        self,
        stream: Stream,
        outbox: Outbox[Sent],
        sends: type[Sent],
        reads: type[Received],
        receive: Callable[[Received], None],
        pulse: Pulse,
        parse: Callable[[bytes], Sequence[Received]] | None = None,
    ) -> None:
        self._stream, self.pulse = stream, pulse
        self._parse: Callable[[bytes], Sequence[Received]] = parse or (lambda encoded: messages(encoded, reads))
        self._outbox: Outbox[Sent] = outbox
        self._sends: type[Sent] = sends
        self._receive: Callable[[Received], None] = receive
        self._next_beat: asyncio.TimerHandle | None = None
        self.parted = False
        """Either end has said goodbye, even if the stream has since ended in another way."""

    async def run(self, *alongside: Coroutine[object, None, None]) -> Goodbye:
        """Run until a goodbye. A StreamLostError from the stream or from one of `alongside` is raised.

        Other exceptions in `alongside` are raised in an exception group.
        """
        self.pulse.written = self.pulse.heard = time.monotonic()
        parts: list[Coroutine[object, None, Goodbye | None]] = [self._read(), self._write(), *alongside]
        if self.pulse.silence < math.inf:
            parts.append(self._listen())
        self._beat()
        try:
            return await first_end(parts)
        finally:
            if self._next_beat is not None:
                self._next_beat.cancel()

    async def _read(self) -> Goodbye:
        while True:
            try:
                encoded = await self._stream.read()
            except StreamLostError:
                if self.parted:
                    return Goodbye("", heard=False)
                raise
            self.pulse.heard = time.monotonic()
            try:
                received = self._parse(encoded)
            except MalformedError as error:
                raise StreamLostError(str(error), grpc.StatusCode.INVALID_ARGUMENT) from None
            for number, message in enumerate(received, 1):
                if message.WhichOneof("body") == "bye":
                    self.parted = True
                    return Goodbye(message.bye.reason, heard=True, refused=message.bye.refused)
                self._receive(message)
                if number % AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _write(self) -> Goodbye:
        while True:
            encoded, goodbye = await self._outbox.take()
            try:
                await self._stream.write(encoded)
            except StreamLostError:
                # Let the reader decide what this means: a goodbye from the other end may be on its way.
                await asyncio.sleep(HANG_UP_SECONDS)
                raise
            self.pulse.written = time.monotonic()
            if goodbye:
                # The other end hangs up when it has read this. Ending the stream here could overtake the message.
                self.parted = True
                await asyncio.sleep(HANG_UP_SECONDS)
                return Goodbye("", heard=False)

    def _beat(self) -> None:
        """Send a heartbeat if one is due. One timer for each stream: one for each message would cost more than the
        message, and a task for each stream several times what a timer does."""
        due_in = self.pulse.beat_in(time.monotonic())
        if not due_in and not self._outbox:
            self._outbox.put(self._sends(heartbeat=pb.Heartbeat(sent_unix_seconds=time.time())))
        self._next_beat = asyncio.get_running_loop().call_later(due_in or self.pulse.interval, self._beat)

    async def _listen(self) -> None:
        while True:
            left = self.pulse.lost_in(time.monotonic())
            if not left:
                raise StreamLostError(f"silent for {self.pulse.silence:.0f} s")
            await asyncio.sleep(left)


async def first_end(parts: Sequence[Coroutine[object, None, Goodbye | None]]) -> Goodbye:
    """Run the parts until the first goodbye, or the first loss of the stream; then cancel the others.

    Later errors of the other parts are ignored: when one end says goodbye, the other's write may fail.
    """
    ends: list[Goodbye | StreamLostError] = []
    ended = asyncio.Event()

    async def watch(part: Coroutine[object, None, Goodbye | None]) -> None:
        try:
            end: Goodbye | StreamLostError | None = await part
        except StreamLostError as error:
            end = error
        if end is not None:
            ends.append(end)
            ended.set()

    async with asyncio.TaskGroup() as group:
        started = [group.create_task(watch(part)) for part in parts]
        await ended.wait()
        for task in started:
            task.cancel()
    if isinstance(ends[0], StreamLostError):
        raise ends[0]
    return ends[0]
