"""Rules of lenient reading: what a released model writes that its strict grammar refuses and its own harness accepts.

Each grammar declares its rules in two lists, `TEXT_RULES` and `CALL_RULES`; there is no leniency outside these lists.
A rule is tried only on text that the strict grammar refuses, in the list's order, and changes only what is refused, so
that the rules that were applied are those that were needed. Their names are reported with the action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dart.agent.keys import keysym_of
from dart.agent.parsing import ParseError
from dart.core.action import MOST_HELD_SECONDS

Given = TypeVar("Given")
Made = TypeVar("Made")

OUTSIDE = 28
"""A coordinate at most this far outside the grid is moved to its edge: one image token of UI-TARS. One that is farther
off is not a rounding error."""
LONG_PRESS_SECONDS = 1.0
"""How long a long press that names no time holds the button; half of it is enough for phones."""
EDGE = 1 - 2**-20
"""The far edge of the screen as a fraction: in the last pixel of any screen."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Given, Made]):
    """One way in which text may differ from the strict grammar."""

    slug: str
    """Its name in counters."""
    accepts: str
    """One sentence of the documentation: what is accepted, and as what."""
    example: str
    """An action that needs this rule and no other."""
    apply: Callable[[Given], Made | None]
    """The given with what it refuses mended; None if it has nothing to mend. May raise ParseError."""


def read_mended(
    text: str,
    rules: Iterable[Rule[str, str]],
    parse: Callable[[str], Made],
    refused: ParseError,
    used: list[str],
) -> Made:
    """What `parse` makes of the text after as few of the rules as it takes, in order. Their names go into `used`.

    Raises `refused` if all together do not suffice.
    """
    try:
        return parse(text)
    except ParseError:
        pass
    for rule in rules:
        mended = rule.apply(text)
        if mended is None or mended == text:
            continue
        text = mended
        used.append(rule.slug)
        try:
            return parse(text)
        except ParseError:
            continue
    raise refused


def held_seconds(value: float | None, name: str, written: str) -> float:
    """How long a button is held, or a drag takes. `value` None: not a number. Raises ParseError."""
    if value is None:
        raise ParseError("bad_arguments", f"{name} {written} is not a number of seconds")
    if not 0 <= value <= MOST_HELD_SECONDS:
        raise ParseError("out_of_bounds", f"{name} {written} is not from 0 to {MOST_HELD_SECONDS:g} seconds")
    return value


def onto_grid(number: float, size: float) -> float | None:
    """A coordinate at most `OUTSIDE` off a grid of 0 to `size`, moved to its edge; None if it is farther off."""
    if not -OUTSIDE <= number <= size + OUTSIDE:
        return None
    return max(0.0, min(number, size * EDGE))


def without_plus(keys: Iterable[str]) -> list[str]:
    """Key names without spaces around them, those of chords such as "ctrl+c" taken apart. The keys "+" and " " stay."""
    apart: list[str] = []
    for key in keys:
        if keysym_of(key) is not None:
            apart.append(key)
        elif "+" in key:
            apart += [name.strip() for name in key.split("+") if name.strip()]
            if key.endswith("++"):
                apart.append("+")
        else:
            apart.append(key.strip())
    return apart
