"""Outgoing messages of one end of a session: they wait here for the stream, and messages that wait together are
batched.

A message on a stream costs some 40 µs whatever its size: a system call, and a hop between gRPC's threads and the event
loop. So all messages that arrived while the last one was written are written as one. Nothing is delayed: a message that
waits alone is sent alone.

A message over the limit would break the stream, again with every resumption, so it is never sent: `too_large` is called
instead, and fails only the command that the message belongs to.

A screenshot or a prompt is encoded already when it is put in, as the `rest` of its message's body, so that protobuf
does not copy it into the message and out again.

Worked example: an Act, a Release and a Generate of 3 MB wait. The first `take` gives Act and Release as one batch; the
Generate would make it larger than FULL_BYTES, so the second `take` gives it alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from dart.v1 import session_pb2 as pb
from dart.wire.channel import MAX_MESSAGE_BYTES
from dart.wire.encoding import tag_of, varint

FULL_BYTES = 1 << 21
"""The most bytes in a batch. Screenshots of 300 KB move 7 % faster than in batches of 1 MB; 4 MB gain nothing more."""
MOST_ENTRIES = 1 << 16
"""The most messages that a worker accepts in a batch: one of FULL_BYTES has fewer, and each costs time to process."""
FULL_ENTRIES = 1_000
"""The most messages in a batch that is sent: the coordinator bounds what it accepts (`dart.wire.rules.table`)."""

Message = TypeVar("Message", pb.SessionRequest, pb.SessionResponse)


class MalformedError(Exception):
    """The other end sent bytes that are not a message of this protocol."""


class Outbox(Generic[Message]):
    """Messages that wait for one stream. `batches`: the other end accepts batches.

    `too_large` is called with a message that is over `limit` bytes, and its size.
    """

    def __init__(
        self,
        batches: bool = False,
        too_large: Callable[[Message, int], None] | None = None,
        limit: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._batches, self._limit = batches, limit
        self._too_large: Callable[[Message, int], None] | None = too_large
        self._waiting: deque[tuple[Message, Sequence[bytes]]] = deque()
        self._encoded: tuple[Message, _Pieces] | None = None
        """The next message, for which the last batch had no room."""
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._encoded is not None)

    def put(self, message: Message, rest: Sequence[bytes] = (), /) -> None:
        """`rest`: further fields of the message's body, encoded."""
        self._waiting.append((message, rest))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Message:
        """The next message, alone. For a single reader, which must not call `take` as well."""
        return whole(*await self._next())

    async def take(self) -> tuple[bytes, bool]:
        """(the next messages, encoded as one, whether the last says goodbye)."""
        taken, self._encoded = self._encoded, None
        while taken is None:
            message, rest = self._waiting.popleft() if self._waiting else await self._next()
            if (content := self._encode(message, rest)) is not None:
                taken = message, content
        message, first = taken
        encoded = [first]
        size = first.size
        while self._batches and self._waiting and len(encoded) < FULL_ENTRIES and not _goodbye(message):
            following, rest = self._waiting.popleft()
            content = self._encode(following, rest)
            if content is None:
                continue
            size += content.size
            if size > FULL_BYTES:
                self._encoded = (following, content)
                break
            message = following
            encoded.append(content)
        return _joined(encoded), _goodbye(message)

    async def _next(self) -> tuple[Message, Sequence[bytes]]:
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()

    def _encode(self, message: Message, rest: Sequence[bytes]) -> _Pieces | None:
        """The encoded message; None if it is too large, after `too_large` has been called."""
        encoded = _pieces(message, rest)
        if encoded.size <= self._limit:
            return encoded
        if self._too_large is not None:
            self._too_large(message, encoded.size)
        return None


def whole(message: Message, rest: Sequence[bytes]) -> Message:
    """The message that the other end receives when these two are put in."""
    return type(message).FromString(b"".join(_pieces(message, rest).pieces)) if rest else message


def too_large(what: str, size: int) -> str:
    """The error text for a message over the limit."""
    return f"the message {what} is {size:,} bytes, and the limit is {MAX_MESSAGE_BYTES:,}"


def messages(encoded: bytes, kind: type[Message]) -> Sequence[Message]:
    """The messages in the bytes from the stream: a single one, or a batch. Raises MalformedError."""
    try:
        message = kind.FromString(encoded)
    except DecodeError as error:
        raise MalformedError(f"{len(encoded):,} bytes that are not a {kind.DESCRIPTOR.name}") from error
    batch = message.batch
    if not batch:
        return (message,)
    if len(batch) > MOST_ENTRIES:
        raise MalformedError(f"a batch of {len(batch):,} messages, and the limit is {MOST_ENTRIES:,}")
    return batch[:]  # a list, which is read twice as fast


def _goodbye(message: pb.SessionRequest | pb.SessionResponse) -> bool:
    return bool(message.WhichOneof("body") == "bye")


class _Pieces(NamedTuple):
    """An encoded message in pieces, and the number of bytes in all of them."""

    pieces: Sequence[bytes]
    size: int


def _pieces(message: pb.SessionRequest | pb.SessionResponse, rest: Sequence[bytes]) -> _Pieces:
    if not rest:
        encoded = message.SerializeToString()
        return _Pieces((encoded,), len(encoded))
    kind = message.WhichOneof("body")
    body: bytes = getattr(message, kind).SerializeToString()
    size = len(body)
    for piece in rest:
        size += len(piece)
    tag, length = _TAGS[type(message)][kind], varint(size)
    return _Pieces((tag, length, body, *rest), len(tag) + len(length) + size)


def _joined(encoded: Sequence[_Pieces]) -> bytes:
    """The only message, or all of them as one batch. Every byte is copied once here."""
    if len(encoded) == 1:
        pieces = encoded[0].pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    joined: list[bytes] = []
    for pieces, size in encoded:
        joined += (_BATCH, varint(size), *pieces)
    return b"".join(joined)


def _tags(message: type[pb.SessionRequest] | type[pb.SessionResponse]) -> dict[str, bytes]:
    """Kind of body → its field's tag."""
    return {field.name: tag_of(message, field.name) for field in message.DESCRIPTOR.oneofs_by_name["body"].fields}


_TAGS: dict[type, dict[str, bytes]] = {kind: _tags(kind) for kind in (pb.SessionRequest, pb.SessionResponse)}
_BATCH = tag_of(pb.SessionRequest, "batch")
assert tag_of(pb.SessionResponse, "batch") == _BATCH
