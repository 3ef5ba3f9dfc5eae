"""One gRPC stream as bytes in and bytes out, and one event for every way in which it can break.

What grpc.aio raises on a stream that is over depends on which call noticed first, and most of it is no RpcError
(grpc/aio/_call.py and _cython/_cygrpc/aio of grpcio 1.85):

- `AioRpcError`: a read after the peer or the network ended the call; a write that the core refused.
- `asyncio.InvalidStateError`: a write after the call has ended, or after `done_writing`.
- `grpc.aio.BaseError`: on the server, a read or write after the call has ended (`UsageError`), of a server that has
  stopped, or that the core refused (`ExecuteBatchError`).
- `asyncio.CancelledError`: a read after this end cancelled the call, though nobody cancelled the task that reads.
- `OSError`, `EOFError`: nothing in grpc.aio raises them today; a stream that is not gRPC's does.

All of them come out of `Stream` as StreamLostError, and so does a call's own end. Cancelling the task passes through.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc

BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, OSError, EOFError)


class StreamLostError(Exception):
    """The stream broke, ended without a goodbye or went silent. `code`: the status of the call, where it has one."""

    def __init__(self, why: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(why)
        self.code = code


class Call(Protocol):
    """The part of a gRPC call that is used here: the client's, or the server's context. Both give and take bytes."""

    async def read(self) -> object: ...

    async def write(self, encoded: bytes, /) -> None: ...


class Stream:
    """Reads and writes encoded messages. One reader and one writer at a time."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> bytes:
        """The next message. Raises StreamLostError when there is none any more."""
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
        """Raises StreamLostError when the other end cannot be told anything any more."""
        try:
            await self._call.write(encoded)
        except BROKEN as error:
            raise lost(error) from error
        except asyncio.CancelledError as error:
            raise _cancelled(error) from error


def lost(error: BaseException) -> StreamLostError:
    """The one event, in the words of whatever was raised."""
    if isinstance(error, grpc.aio.AioRpcError):
        return StreamLostError(error.details() or error.code().name, error.code())
    return StreamLostError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _cancelled(error: asyncio.CancelledError) -> BaseException:
    """The cancellation itself when it is meant for this task, else the end of the stream."""
    task = asyncio.current_task()
    return error if task is None or task.cancelling() else StreamLostError("the call was cancelled")
