"""Counts the fields in a message's bytes before anything is parsed.

An empty list entry takes two or three bytes on the wire and 50 to 100 when parsed: 16 MB of them take a second and half
a gigabyte. So the fields of a large message are counted first, including nested ones, and a message with too many is
never parsed. A list of numbers is one field however long it is, because it is packed.

The encoding: https://protobuf.dev/programming-guides/encoding/. A field is a tag (number << 3 | kind) and its value; of
a kind 2 value, the length comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from dart.v1 import session_pb2 as pb
from dart.wire.rules.kinds import Violation
from dart.wire.rules.table import MOST_BATCH

MOST_FIELDS = 200_000
"""For one message. The largest legitimate one is a trainer's list of tensors, each of four fields; a mixture of experts
has some 40,000."""
SMALL_BYTES = 2 * MOST_FIELDS
"""A field takes at least two bytes, so messages up to this size are parsed without counting."""
_ASSIGNMENT_BYTES = 1024
_FIXED = {1: 8, 5: 4}
"""Kind → bytes of the value."""


class Garbled(Exception):
    """The bytes are not a message."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Replaces a message that was not parsed. `assignment`: what it claims to answer, if it says."""

    violation: Violation
    assignment: pb.Assignment | None = None


def parsed(data: bytes) -> pb.SessionRequest | Malformed:
    """The message in these bytes, or `Malformed` if it cannot be parsed or would take too much memory."""
    try:
        if len(data) > SMALL_BYTES and _crowded(data):
            broken = Violation("SessionRequest", f"{len(data):,} bytes", f"of at most {MOST_FIELDS:,} fields")
            return Malformed(broken, _assignment(data))
        message = pb.SessionRequest.FromString(data)
        if len(message.batch) > MOST_BATCH:
            broken = Violation("SessionRequest.batch", f"{len(message.batch):,} entries", f"of at most {MOST_BATCH:,}")
            return Malformed(broken)
        return message
    except (Garbled, DecodeError):
        broken = Violation("SessionRequest", f"{len(data):,} bytes that do not parse", "an encoded SessionRequest")
        return Malformed(broken, _assignment(data))


def _crowded(data: bytes) -> bool:
    """True when there are more than `MOST_FIELDS` fields, or the bytes are not fields.

    It stops when the remaining bytes are too few to hold so many, for example after a screenshot's bytes.
    """
    left, fields, within = len(data), 0, [(0, len(data), _TREE)]
    while within:
        at, end, tree = within.pop()
        while at < end:
            fields += 1
            if fields > MOST_FIELDS:
                return True
            tag, at = _varint(data, at, end) if data[at] > 0x7F else (data[at], at + 1)
            kind = tag & 7
            if kind == 2:
                length, at = _varint(data, at, end)
                if (inner := tree.get(tag >> 3)) is not None:
                    within.append((at, min(at + length, end), inner))
                else:
                    left -= length
                    if left <= SMALL_BYTES:
                        return False
                at += length
            elif kind == 0:
                _, at = _varint(data, at, end)
            elif kind in _FIXED:
                at += _FIXED[kind]
            else:
                raise Garbled
    return False


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, where its bytes begin, where they end) of each field; a number has no bytes (-1). Raises Garbled."""
    while at < end:
        tag, at = _varint(data, at, end)
        start, kind = -1, tag & 7
        if kind == 2:
            length, start = _varint(data, at, end)
            at = start + length
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise Garbled
        if at > end:
            raise Garbled
        yield tag >> 3, start, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """(the number at this position, the position after it). Raises Garbled."""
    number = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise Garbled


def _assignment(data: bytes) -> pb.Assignment | None:
    """The assignment of the body in these bytes, as far as it can be read."""
    try:
        number, start, stop = next(_fields(data, 0, len(data)))
        if number == pb.SessionRequest.BATCH_FIELD_NUMBER or start < 0:
            return None
        number, start, stop = next(_fields(data, start, stop))
        if number != 1 or start < 0 or stop - start > _ASSIGNMENT_BYTES:
            return None
        return pb.Assignment.FromString(data[start:stop])
    except (Garbled, DecodeError, StopIteration):
        return None


_Tree = dict[int, "_Tree"]


def _tree(descriptor: Descriptor, known: dict[str, _Tree]) -> _Tree:
    """Number → the fields of the message that the field holds."""
    if descriptor.full_name in known:
        return known[descriptor.full_name]
    made = known[descriptor.full_name] = {}
    for one in descriptor.fields:
        if one.message_type is not None:
            made[one.number] = _tree(one.message_type, known)
    return made


_TREE = _tree(cast(Descriptor, pb.SessionRequest.DESCRIPTOR), {})
