"""What one end of a session has to say: messages wait here for the stream, and those that wait together go together.

A message on a stream costs some 40 µs whatever its size: a system call, and a hop between gRPC's threads and the event
loop. So whatever has come up while the last one was written is written as one. It waits for nothing: a message that is
alone goes alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from dart.v1 import session_pb2 as pb

BATCHES = "batches"
"""The capability of an end that reads batches."""
FULL_BYTES = 1 << 20
"""Of a batch, at most: larger ones gain nothing, and what is put together must not pass a message's limit."""

Message = TypeVar("Message", pb.SessionRequest, pb.SessionResponse)


class Outbox(Generic[Message]):
    """Of one stream. `batches`: the other end reads them."""

    def __init__(self, batches: bool = False) -> None:
        self._batches = batches
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
        if self._encoded is not None:
            (message, first), self._encoded = self._encoded, None
        else:
            message = await self.get()
            first = message.SerializeToString()
        encoded = [first]
        size = len(first)
        while self._batches and self._waiting and not _goodbye(message):
            following = self._waiting.popleft()
            content = following.SerializeToString()
            size += len(content)
            if size > FULL_BYTES:
                self._encoded = (following, content)
                break
            message = following
            encoded.append(content)
        return (encoded[0] if len(encoded) == 1 else _joined(encoded)), _goodbye(message)


def each(message: Message) -> Iterator[Message]:
    """What a message from the stream brings: itself, or its batch."""
    if message.batch:
        yield from message.batch
    else:
        yield message


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
