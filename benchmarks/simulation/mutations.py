"""Every way in which one message of a worker can be wrong, drawn at random: its fields, its kind, its assignment, its
bytes.

The fields are found by walking the protobuf descriptors, so a new one is mutated without a line here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dart.v1 import session_pb2 as pb
from dart.wire.session import assignment_of

WHOLE = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**16, 2**24, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**32, 2**53 + 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 3, 5, 8, 9, 99, -1, 2**31 - 1),
}
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, 1.0000001, 7.0, 1e-320, 1e38, 1e308, -1e308, math.nan, math.inf, -math.inf)
TEXTS = ("", "x", "\x00", "\x1b[2J\r\n", "[/bold]", "NaN", "\u2028\ud7ff", "a/../../b", "x" * 300, "x" * 70_000)
OCTETS = (b"", b"x", b"12345", bytes(31), bytes(32), bytes(33), b"\x89PNG\r\n\x1a\n", b"\xff" * 5000)
LONG_TEXT, LONG_LIST = 2_000_000, 70_000
RARE = 0.01
"""The share of mutations that make something long."""

KINDS = [field.name for field in pb.SessionRequest.DESCRIPTOR.oneofs_by_name["body"].fields]
Sent = pb.SessionRequest | bytes
"""A message, or what takes its place on the wire."""


def mutated(message: pb.SessionRequest, chance: random.Random) -> list[Sent]:
    """What is sent instead of this message."""
    made = pb.SessionRequest()
    made.CopyFrom(message)
    draw: Callable[[pb.SessionRequest, random.Random], list[Sent]] = chance.choices(
        (_field, _kind, _assignment, _bytes, _order), (60, 10, 10, 15, 5)
    )[0]
    return draw(made, chance)


def mutated_message(message: Message, chance: random.Random) -> None:
    """One field of it, or of a message in it, becomes something else."""
    places = _places(message, [])
    if places:
        holder, field = chance.choice(places)
        _set(holder, field, chance)


def _field(message: pb.SessionRequest, chance: random.Random) -> list[Sent]:
    body = message.WhichOneof("body")
    if body:
        mutated_message(getattr(message, body), chance)
    return [message]


Place = tuple[Message, FieldDescriptor]


def _places(message: Message, found: list[Place]) -> list[Place]:
    """Every field, also those that are not set; those of the assignment have a mutation of their own."""
    for field in message.DESCRIPTOR.fields:
        inner = field.message_type
        if inner is not None and inner.name == "Assignment":
            continue
        found.append((message, cast(FieldDescriptor, field)))
        if inner is None or inner.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for one in list(getattr(message, field.name))[:3]:
                _places(one, found)
        elif message.HasField(field.name):
            _places(getattr(message, field.name), found)
    return found


def _set(message: Message, field: FieldDescriptor, chance: random.Random) -> None:
    if field.is_repeated:
        _set_list(message, field, chance)
    elif field.message_type is not None:
        if chance.random() < 0.5:
            message.ClearField(field.name)
        else:
            getattr(message, field.name).SetInParent()
            mutated_message(getattr(message, field.name), chance)
    else:
        setattr(message, field.name, _value(field, chance))


def _set_list(message: Message, field: FieldDescriptor, chance: random.Random) -> None:
    values = getattr(message, field.name)
    what = chance.random()
    if what < 0.25:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for number in range(LONG_LIST // 10 if chance.random() < RARE else 1):
            values[chance.choice(TEXTS) + str(number)] = _map_value(field, chance)
    elif field.message_type is not None:
        for _ in range(LONG_LIST if chance.random() < RARE else 1):
            values.add()
        mutated_message(values[chance.randrange(len(values))], chance)
    elif what < 0.5 and values:
        values[chance.randrange(len(values))] = _value(field, chance)
    elif what < 0.75 and values:
        del values[chance.randrange(len(values)) :]
    else:
        value, many = _value(field, chance), LONG_LIST if chance.random() < RARE else chance.choice((1, 2, 50))
        long = isinstance(value, str | bytes) and len(value) == LONG_TEXT
        values.extend([value] * (1 if long else many))  # both at once would take tens of gigabytes, and here


def _map_value(field: FieldDescriptor, chance: random.Random) -> object:
    assert field.message_type is not None
    return _value(field.message_type.fields_by_name["value"], chance)


def _value(field: FieldDescriptor, chance: random.Random) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT:
            return max(-3e38, min(3e38, value)) if math.isfinite(value := chance.choice(REAL)) else value
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return chance.choice(REAL)
        case FieldDescriptor.CPPTYPE_STRING:
            long = chance.random() < RARE
            if field.type == FieldDescriptor.TYPE_BYTES:
                return bytes(LONG_TEXT) if long else chance.choice(OCTETS)
            return "x" * LONG_TEXT if long else chance.choice(TEXTS)
        case kind:
            return chance.choice(WHOLE[kind])


def _kind(message: pb.SessionRequest, chance: random.Random) -> list[Sent]:
    """Another message in the place of this one, with the same assignment."""
    assignment = pb.Assignment()
    assignment.CopyFrom(assignment_of(message) or assignment)
    other = pb.SessionRequest()
    body = getattr(other, chance.choice(KINDS))
    body.SetInParent()
    if "assignment" in body.DESCRIPTOR.fields_by_name:
        body.assignment.CopyFrom(assignment)
    if chance.random() < 0.5:
        mutated_message(body, chance)
    return [other]


def _assignment(message: pb.SessionRequest, chance: random.Random) -> list[Sent]:
    """The answer to another command, or to none; sometimes the true answer comes as well."""
    assignment = assignment_of(message)
    if assignment is None:
        return [message]
    honest = message.SerializeToString()
    name = chance.choice(("assignment_id", "attempt", "epoch", "sequence"))
    if name == "assignment_id":
        assignment.assignment_id = chance.choice((*TEXTS, "q1", "u1", "g000001-1"))
    else:
        near = getattr(assignment, name) + chance.choice((-1, 1))
        setattr(assignment, name, chance.choice((max(0, near), 0, 2**32 - 1)))
    return [message, honest] if chance.random() < 0.3 else [message]


def _bytes(message: pb.SessionRequest, chance: random.Random) -> list[Sent]:
    data = bytearray(message.SerializeToString())
    what = chance.random()
    if what < 0.35 and data:
        for _ in range(chance.choice((1, 2, 16))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif what < 0.6:
        del data[chance.randrange(len(data) + 1) :]
    elif what < 0.8:
        data = bytearray(chance.randbytes(chance.choice((0, 1, 3, 50, 2000))))
    elif what < 0.8 + 2 * RARE:
        empty = chance.choice((b"\xc2\x02\x00", b"\xa2\x01\x00", b"\x0a\x00"))
        data += empty * chance.choice((100, 20_000, 1_000_000))
    else:
        data += chance.randbytes(chance.choice((1, 4, 100)))
    return [bytes(data)]


def _order(message: pb.SessionRequest, chance: random.Random) -> list[Sent]:
    """Twice, not at all, in a batch, in a batch in a batch, or empty."""
    batch = pb.SessionRequest(batch=[message] * chance.choice((1, 2, 30)))
    choices: list[list[Sent]] = [
        [message, message], [], [batch], [pb.SessionRequest(batch=[batch])], [pb.SessionRequest()], [b""],
    ]  # fmt: skip
    return chance.choice(choices)
