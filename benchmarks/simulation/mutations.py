"""Mutations of a worker's messages: every field at its bounds and beyond, whatever the message is.

`mutated` walks the message by its protobuf descriptor, picks one field anywhere in it, and gives it a value that is
legal on the wire and may be nonsense: numbers at the ends of their range, not finite, texts that are long or full of
control characters, lists that are empty, doubled or long, answers of another kind, assignments of somebody else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dart.v1 import session_pb2 as pb

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**16, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**32, 2**63, 2**64 - 1),
}
_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 7.0, 1e30)
_TEXTS = ("", "\x00\x1b[31m", "x" * 100_000, "[bold]markup[/bold]", "\u202egnitirw", "é" * 5000)
_MOST_ENTRIES = 20_000

Change = Callable[[], None]


def mutated(message: pb.SessionRequest, chance: random.Random) -> tuple[pb.SessionRequest, str]:
    """A copy with one thing changed, and what was changed."""
    made = pb.SessionRequest()
    made.CopyFrom(message)
    if chance.random() < 0.1:
        return _another_kind(made, chance)
    name, change = chance.choice(list(_changes(made, made.WhichOneof("body") or "", chance)))
    change()
    return made, name


def _another_kind(made: pb.SessionRequest, chance: random.Random) -> tuple[pb.SessionRequest, str]:
    """An answer of another kind, with the same assignment."""
    body = made.WhichOneof("body") or ""
    assignment = pb.Assignment()
    if hasattr(getattr(made, body), "assignment"):
        assignment.CopyFrom(getattr(made, body).assignment)
    kinds = [field for field in made.DESCRIPTOR.oneofs_by_name["body"].fields if field.name not in (body, "bye")]
    kind = chance.choice(kinds).name
    getattr(made, kind).SetInParent()
    if hasattr(getattr(made, kind), "assignment"):
        getattr(made, kind).assignment.CopyFrom(assignment)
    return made, f"{body} becomes {kind}"


def _changes(message: Message, path: str, chance: random.Random) -> Iterator[tuple[str, Change]]:
    """Every field of the message and of what is in it, with one change for each."""
    whole = isinstance(message, pb.SessionRequest) and message.WhichOneof("body")
    inner: Message = getattr(message, path) if whole else message
    for field in inner.DESCRIPTOR.fields:
        name = f"{path}.{field.name}"
        if field.is_repeated:
            yield name, _repeated(inner, field, chance)  # type: ignore[arg-type]
        elif field.message_type is not None:
            if inner.HasField(field.name):
                yield name, _cleared(inner, field.name)
                yield from _changes(getattr(inner, field.name), name, chance)
        else:
            yield name, _scalar(inner, field, chance)  # type: ignore[arg-type]


def _cleared(message: Message, name: str) -> Change:
    return lambda: message.ClearField(name)


def _scalar(message: Message, field: FieldDescriptor, chance: random.Random) -> Change:
    value = chance.choice(_values(field, chance))
    return lambda: setattr(message, field.name, value)


def _values(field: FieldDescriptor, chance: random.Random) -> Sequence[object]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return (b"", b"\x00" * 5, chance.randbytes(32), chance.randbytes(1000))
            return _TEXTS
        case FieldDescriptor.CPPTYPE_BOOL:
            return (True, False)
        case FieldDescriptor.CPPTYPE_ENUM:
            return (0, 99, 2**31 - 1)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return _FLOATS
        case kind:
            return _INTEGERS[kind]


def _repeated(message: Message, field: FieldDescriptor, chance: random.Random) -> Change:
    entries = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return lambda: message.ClearField(field.name)

    def change() -> None:
        how = chance.randrange(4)
        if how == 0:
            del entries[:]
        elif how == 1:
            entries.extend(list(entries))
        elif field.message_type is not None:
            for _ in range(1 if how == 2 else _MOST_ENTRIES):
                entries.add()
        elif how == 2 and len(entries):
            entries[chance.randrange(len(entries))] = chance.choice(_values(field, chance))
        else:
            entries.extend([chance.choice(_values(field, chance))] * _MOST_ENTRIES)

    return change
