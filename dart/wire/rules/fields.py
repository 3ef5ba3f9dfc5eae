"""Applies the table: checks the fields of a message against their rules.

The check of each message type is one function, generated from the rules' expressions as `dataclasses` generates
`__init__`. It reads each field once, and skips fields that cannot break a rule: it runs for every answer of every
worker, and reading a field costs more than most comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
"""Not checked here: the session compares it, number by number, with the commands it waits for."""
Test = Callable[[object], bool]


def _nothing_broken(_: Message) -> Violation | None:
    return None


@dataclass(slots=True)
class Checker:
    """The rules of one message type."""

    name: str
    violation: Callable[[Message], Violation | None] = _nothing_broken
    """The first rule that a field breaks. Repairable values are repaired, and reported if nothing else is broken."""
    says: dict[str, str] = field(default_factory=dict)
    """What the value of each field must be, in words."""

    def broken(self, name: str, value: object) -> Violation:
        return Violation(f"{self.name}.{name}", _shown(value), self.says[name])

    def within(self, name: str, broken: Violation) -> Violation:
        return broken.within(f"{self.name}.{name}")


def _tables(where: str, tables: Sequence[tuple[str, Table, Test, Test]], message: Message) -> Violation | None:
    """Checks maps, each with the tests of a key and of a value. Entries whose value breaks its rule are left out."""
    mended = None
    for name, table, key_holds, value_holds in tables:
        path, entries = f"{where}.{name}", getattr(message, name)
        if len(entries) > table.most:
            return Violation(path, f"{len(entries):,} entries", table.says)
        for key, value in list(entries.items()):
            if not key_holds(key):
                return Violation(path, shortened(key), f"keys {table.keys.says}")
            if not value_holds(value):
                del entries[key]
                mended = Violation(f"{path}[{key}]", shortened(value), f"{table.values.says}", mended=True)
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
    fields = [(one.name, rules[one.name], one.message_type) for one in descriptor.fields if one.name in rules]
    made.says = {name: rule.says for name, rule, _ in fields}
    # Numbers and strings first, because they are the cheapest; what repairs values last, when nothing else is broken.
    plain, nested, mending = [], [], []
    known_as: dict[str, object] = {"broken": made.broken, "within": made.within}
    tables: list[tuple[str, Table, Test, Test]] = []
    for name, rule, inner in fields:
        match rule:
            case One() if inner is not None and inner.name != COMPARED:
                known_as[f"rules_of_{name}"] = checker(inner)
                nested += [f"if m.HasField({name!r}) and (b := rules_of_{name}.violation(m.{name})) is not None:"]
                nested += [f"    return within({name!r}, b)"]
            case Many() if inner is not None:
                known_as[f"rules_of_{name}"] = checker(inner)
                plain += _unless(rule.test("v"), name)
                nested += [f"for one in m.{name}[:]:"]  # a slice is a list, which is read twice as fast
                nested += [f"    if (b := rules_of_{name}.violation(one)) is not None:"]
                nested += [f"        return within({name!r}, b)"]
            case Table():
                tables.append((name, rule, _test(rule.keys), _test(rule.values)))
            case Note():
                known_as[f"mended_{name}"] = rule.mended
                mending += [f"if (now := mended_{name}(v := m.{name})) != v:", f"    m.{name} = now"]
            case One() | Yes() | Payload() | Tokens():
                pass
            case _:
                plain += _unless(rule.test("v"), name)
    if tables:
        known_as["tables"] = partial(_tables, made.name, tables)
        mending += ["return tables(m)"]
    if lines := [*plain, *nested, *mending]:
        made.violation = _function(lines, known_as)
    return made


def _unless(test: str, name: str) -> list[str]:
    return [f"v = m.{name}", f"if not ({test}):", f"    return broken({name!r}, v)"]


def _function(lines: Sequence[str], known_as: dict[str, object]) -> Callable[[Message], Violation | None]:
    made: dict[str, Callable[[Message], Violation | None]] = {}
    exec("\n    ".join(["def violation(m):", *lines, "return None"]), dict(WITH) | known_as, made)
    return made["violation"]


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
