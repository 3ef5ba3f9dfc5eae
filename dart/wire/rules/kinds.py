"""The kinds of rule that a field may have.

`says` completes the sentence "FIELD is VALUE, and must be …". `test` is the rule as a Python expression about the named
variable: `fields` puts those of one message type together into one function, because calling a function for each field
would cost more than all the comparisons. Lists of numbers are compared as a whole, in C, because a prompt has thousands
of them. A `Note` does not refuse: `mended` gives the value that replaces the old one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

SHOWN = 60
"""Characters of a value that a violation shows."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""All control characters but tab and newline."""
_NAMED = re.compile(r"[A-Za-z0-9._:@+/-]*")
WITH = {"isfinite": math.isfinite, "named": _NAMED.fullmatch}
"""The functions that the expressions call, besides Python's own."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A value that breaks a rule. `mended`: it was repaired, and the message is accepted."""

    field: str
    value: str
    rule: str
    mended: bool = False

    def __str__(self) -> str:
        return f"{self.field} is {self.value}, and must be {self.rule}"

    def within(self, outer: str) -> Violation:
        """The same violation, in a message inside that field."""
        return replace(self, field=f"{outer}: {self.field}")


def shortened(value: object) -> str:
    """A value as a violation shows it: at most `SHOWN` characters, without control characters.

    Only the beginning of a long value is read.
    """
    if isinstance(value, (str, bytes)):
        length, unit = len(value), "characters" if isinstance(value, str) else "bytes"
        text = repr(value[:SHOWN])
        return text if length <= SHOWN else f"{text[:SHOWN]}… ({length:,} {unit})"
    return repr(value)[:SHOWN]


def clean(text: str, most: int) -> str:
    """`text` without control characters, cut after `most` characters with a note that says so."""
    cut = _CONTROL.sub("\ufffd", text[:most])
    return cut if len(text) <= most else f"{cut}… (cut: {len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number, or an enum's."""

    least: int
    most: int
    why: str = ""

    @property
    def says(self) -> str:
        return f"from {self.least:,} to {self.most:,}{self.why and ': '}{self.why}"

    def test(self, v: str) -> str:
        return f"{self.least} <= {v} <= {self.most}"


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number. NaN fails both comparisons."""

    least: float
    most: float

    @property
    def says(self) -> str:
        return f"a finite number from {self.least:g} to {self.most:g}"

    def test(self, v: str) -> str:
        return f"{self.least!r} <= {v} <= {self.most!r}"


@dataclass(frozen=True, slots=True)
class Yes:
    """True or false: nothing to check."""

    says: str = "true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """A one-line string that something depends on, so that it cannot be cut."""

    most: int
    least: int = 0

    @property
    def says(self) -> str:
        return f"{self.least} to {self.most:,} characters, without control characters"

    def test(self, v: str) -> str:
        return f"{self.least} <= len({v}) <= {self.most} and {v}.isprintable()"


@dataclass(frozen=True, slots=True)
class Words:
    """A string of any characters: what a policy or a page wrote."""

    most: int

    @property
    def says(self) -> str:
        return f"at most {self.most:,} characters"

    def test(self, v: str) -> str:
        return f"len({v}) <= {self.most}"


@dataclass(frozen=True, slots=True)
class Name:
    """An identifier that is shown, logged and stored."""

    most: int = 128
    least: int = 1

    @property
    def says(self) -> str:
        return f"{self.least} to {self.most} of the characters A-Z a-z 0-9 . _ : @ + / -"

    def test(self, v: str) -> str:
        return f"{self.least} <= len({v}) <= {self.most} and named({v})"


@dataclass(frozen=True, slots=True)
class Note:
    """A string for people to read: long ones are cut, control characters are replaced, and nothing is refused."""

    most: int

    @property
    def says(self) -> str:
        return f"text, of which the first {self.most:,} characters are kept"

    def mended(self, value: str) -> str:
        return clean(value, self.most)


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes of one of these lengths."""

    lengths: tuple[int, ...]

    @property
    def says(self) -> str:
        return f"{' or '.join(map(str, self.lengths))} bytes long"

    def test(self, v: str) -> str:
        return f"len({v}) in {self.lengths!r}"


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes bounded only by the size of a message. They are checked where they are read."""

    says: str


@dataclass(frozen=True, slots=True)
class One:
    """A nested message, checked by the rules of its own type."""

    says: str = "a message whose fields keep their rules"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids. If the run's vocabulary is known, `answers` checks that ids are below its size."""

    most: int
    most_id: int

    @property
    def says(self) -> str:
        return f"at most {self.most:,} ids, each below the size of the vocabulary"


@dataclass(frozen=True, slots=True)
class Many:
    """A repeated field: at most `most` entries, and `each` holds for every one of them."""

    most: int
    each: Whole | Real | Name | Text | Words | One

    @property
    def says(self) -> str:
        return f"at most {self.most:,} entries, each {self.each.says}"

    def test(self, v: str) -> str:
        few, each = f"len({v}) <= {self.most}", self.each
        if isinstance(each, One):
            return few
        if isinstance(each, Real):
            # The sum is finite if all entries are: float32 numbers cannot add up to more than a double holds.
            return f"{few} and (not {v} or isfinite(sum(all_ := {v}[:])) and max(all_) <= {each.most!r})"
        return f"{few} and all({each.test('one')} for one in {v})"


@dataclass(frozen=True, slots=True)
class Table:
    """A map with at most `most` entries. Values that break their rule are left out, and the message is accepted."""

    most: int
    keys: Name | Text
    values: Text | Real

    @property
    def says(self) -> str:
        return f"at most {self.most:,} entries; keys {self.keys.says}; values {self.values.says}"


Scalar = Whole | Real | Text | Words | Name | Octets
Rule = Scalar | Yes | Note | Payload | One | Tokens | Many | Table
