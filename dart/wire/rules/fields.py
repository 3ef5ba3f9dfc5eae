"""Applies the table: checks the fields of a message against their rules.

One `Checker` is made for each message type. Its function `first_broken` is generated from the rules' expressions, as
`dataclasses` generates `__init__`: it reads each field once, and skips fields that cannot break a rule, because reading
a field of a message costs more than most comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from dart.v1 import control_pb2 as cpb
from dart.v1 import session_pb2 as pb
from dart.wire.rules.kinds import (
    WITH,
    Many,
    Note,
    One,
    Payload,
    Scalar,
    Table,
    Tokens,
    Violation,
    Yes,
    shortened,
)
from dart.wire.rules.table import RULES

COMPARED = "Assignment"
"""Not checked here: the session compares it number by number with those of the commands it waits for."""
Field = tuple[str, object]
Test = Callable[[object], bool]


def _nothing_broken(_: Message) -> Field | None:
    return None


@dataclass(slots=True)
class Checker:
    """The rules of one message type."""

    name: str
    first_broken: Callable[[Message], Field | None] = _nothing_broken
    """(name, value) of the first field that is a number, a string or a list of them and breaks its rule."""
    says: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, Note]] = field(default_factory=list)
    tables: list[tuple[str, Table, Test, Test]] = field(default_factory=list)
    """Maps, with the tests of a key and of a value."""
    nested: list[tuple[str, Checker]] = field(default_factory=list)
    repeated: list[tuple[str, Checker]] = field(default_factory=list)

    def violation(self, message: Message) -> Violation | None:
        """The first rule that a field breaks. Repairable values are repaired, and reported if nothing else is
        broken."""
        if found := self.first_broken(message):
            name, value = found
            return Violation(f"{self.name}.{name}", _shown(value), self.says[name])
        for name, inner in self.nested:
            if message.HasField(name) and (broken := inner.violation(getattr(message, name))):
                return broken.within(f"{self.name}.{name}")
        for name, inner in self.repeated:
            for one in getattr(message, name):
                if broken := inner.violation(one):
                    return broken.within(f"{self.name}.{name}")
        for name, note in self.notes:
            value = getattr(message, name)
            if (mended := note.mended(value)) != value:
                setattr(message, name, mended)
        return self._tables(message) if self.tables else None

    def _tables(self, message: Message) -> Violation | None:
        mended = None
        for name, table, key_holds, value_holds in self.tables:
            where, entries = f"{self.name}.{name}", getattr(message, name)
            if len(entries) > table.most:
                return Violation(where, f"{len(entries):,} entries", table.says)
            for key, value in list(entries.items()):
                if not key_holds(key):
                    return Violation(where, shortened(key), f"keys {table.keys.says}")
                if not value_holds(value):
                    del entries[key]
                    mended = Violation(f"{where}[{key}]", shortened(value), f"{table.values.says}", mended=True)
        return mended


def _shown(value: object) -> str:
    """Shows at most a list's first entries, because it may have millions."""
    if isinstance(value, (str, bytes, int, float)):
        return shortened(value)
    entries = cast(Sequence[object], value)
    return f"{len(entries):,} entries, {shortened(list(entries[:8]))}"


_made: dict[str, Checker] = {}


def checker(descriptor: Descriptor) -> Checker:
    """The rules of a type. A field missing from the table is not checked; a test ensures that none is missing."""
    if (known := _made.get(descriptor.full_name)) is not None:
        return known
    made = _made[descriptor.full_name] = Checker(descriptor.name)
    rules = RULES.get(descriptor.name, {})
    tests: dict[str, str] = {}
    for one in descriptor.fields:
        rule, inner = rules.get(one.name), one.message_type
        if rule is None:
            continue
        made.says[one.name] = rule.says
        match rule:
            case One() if inner is not None and inner.name != COMPARED:
                made.nested.append((one.name, checker(inner)))
            case Many() if inner is not None:
                tests[one.name] = rule.test("v")
                made.repeated.append((one.name, checker(inner)))
            case Table():
                made.tables.append((one.name, rule, _test(rule.keys), _test(rule.values)))
            case Note():
                made.notes.append((one.name, rule))
            case One() | Yes() | Payload() | Tokens():
                pass
            case _:
                tests[one.name] = rule.test("v")
    if tests:
        made.first_broken = _first_broken(tests)
    return made


def _first_broken(tests: dict[str, str]) -> Callable[[Message], Field | None]:
    lines = ["def first_broken(message):"]
    for name, test in tests.items():
        lines += [f"    v = message.{name}", f"    if not ({test}):", f"        return {name!r}, v"]
    made: dict[str, Callable[[Message], Field | None]] = {}
    exec("\n".join(lines), dict(WITH), made)
    return made["first_broken"]


def _test(rule: Scalar) -> Test:
    made: Test = eval(f"lambda v: {rule.test('v')}", dict(WITH))
    return made


BODIES: dict[str, Checker] = {
    one.name: checker(cast(Descriptor, one.message_type))
    for one in pb.SessionRequest.DESCRIPTOR.oneofs_by_name["body"].fields
}
"""Checkers by the name of the body's field."""
REQUESTS: dict[str, Checker] = {
    method.input_type.name: checker(method.input_type)
    for method in cpb.DESCRIPTOR.services_by_name["ControlService"].methods
}
"""Checkers of Control's requests, by the type's name."""
