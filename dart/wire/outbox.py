"""What one end of a session has to say: messages wait here for the stream, and those that wait together go together.

A message on a stream costs some 40 µs whatever its size: a system call, and a hop between gRPC's threads and the event
loop. So whatever has come up while the last one was written is written as one. It waits for nothing: a message that is
alone goes alone.

A message over the limit never reaches the stream, which it would break, again with every resumption: `too_large` is
told instead, and fails the one command that it belongs to.

Worked example: an Act, a Release and a Generate of 2 MB wait. The first `take` gives Act and Release as one batch; the
Generate would make it larger than FULL_BYTES, so the second `take` gives it alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from dart.v1 import session_pb2 as pb
from dart.wire.channel import MAX_MESSAGE_BYTES

FULL_BYTES = 1 << 20
"""A batch holds at most so much: larger ones gain nothing, and must not pass a message's limit."""
MOST_ENTRIES = 1 << 16
"""A batch that is read has at most so many messages: one of FULL_BYTES has fewer, and each costs time to look at."""

Message = TypeVar("Message", pb.SessionRequest, pb.SessionResponse)


class MalformedError(Exception):
    """The other end sent bytes that are no message of this protocol."""


class Outbox(Generic[Message]):
    """What waits for one stream. `batches`: the other end reads them.

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
        self._waiting: deque[Message] = deque()
        self._encoded: tuple[Message, bytes] | None = None
        """The next message, which the last batch had no room for."""
        self._reader: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._encoded is not None)

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Message:
        """The next message, alone. One reader at a time, which does not `take` as well."""
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()

    async def take(self) -> tuple[bytes, bool]:
        """(the next messages, encoded as one, whether the last says goodbye)."""
        taken, self._encoded = self._encoded, None
        while taken is None:
            message = self._waiting.popleft() if self._waiting else await self.get()
            if (content := self._encode(message)) is not None:
                taken = message, content
        message, first = taken
        encoded = [first]
        size = len(first)
        while self._batches and self._waiting and not _goodbye(message):
            following = self._waiting.popleft()
            content = self._encode(following)
            if content is None:
                continue
            size += len(content)
            if size > FULL_BYTES:
                self._encoded = (following, content)
                break
            message = following
            encoded.append(content)
        return (encoded[0] if len(encoded) == 1 else _joined(encoded)), _goodbye(message)

    def _encode(self, message: Message) -> bytes | None:
        """None when the message is too large, which has been told then."""
        encoded = message.SerializeToString()
        if len(encoded) <= self._limit:
            return encoded
        if self._too_large is not None:
            self._too_large(message, len(encoded))
        return None


def too_large(what: str, size: int) -> str:
    """What is said of a message that is over the limit."""
    return f"the message {what} is {size:,} bytes, and the limit is {MAX_MESSAGE_BYTES:,}"


def messages(encoded: bytes, kind: type[Message]) -> Sequence[Message]:
    """What a message from the stream brings: itself, or its batch. Raises MalformedError."""
    try:
        message = kind.FromString(encoded)
    except DecodeError as error:
        raise MalformedError(f"{len(encoded):,} bytes that are no {kind.DESCRIPTOR.name}") from error
    batch = message.batch
    if not batch:
        return (message,)
    if len(batch) > MOST_ENTRIES:
        raise MalformedError(f"a batch of {len(batch):,} messages, and {MOST_ENTRIES:,} are the most")
    return batch


def _goodbye(message: pb.SessionRequest | pb.SessionResponse) -> bool:
    return bool(message.WhichOneof("body") == "bye")


def _joined(encoded: list[bytes]) -> bytes:
    """A message whose batch these are: a list field is, for each entry, a tag, its length and its bytes.

    Put together here because a message that is put into another message is copied twice over (`wire.convert`).
    """
    pieces: list[bytes] = []
    for one in encoded:
        pieces += (_TAG, _varint(len(one)), one)
    return b"".join(pieces)


def _varint(number: int) -> bytes:
    """Seven bits to a byte, the lowest first; the top bit says that more follow."""
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)


_TAG = _varint(pb.SessionRequest.BATCH_FIELD_NUMBER << 3 | 2)
assert pb.SessionRequest.BATCH_FIELD_NUMBER == pb.SessionResponse.BATCH_FIELD_NUMBER
