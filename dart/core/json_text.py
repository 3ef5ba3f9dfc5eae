"""JSON that every reader accepts. Standard JSON has no NaN or infinity, so numbers that are not finite become null.

What was stored may have been written by anybody: it is read with the same rule (`read_json`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

JSON = Mapping[str, "JSON"] | Sequence["JSON"] | str | float | bool | None

_STRICT = json.JSONEncoder(allow_nan=False)
"""`json.dumps` would make one for each call, which takes as long as the encoding of an event."""


def to_json(value: object, *, indent: int | None = None) -> str:
    """The value as JSON, with null for numbers that are not finite. Raises TypeError for types that JSON lacks."""
    encode = _STRICT.encode if indent is None else json.JSONEncoder(allow_nan=False, indent=indent).encode
    try:
        return encode(value)
    except ValueError:
        return encode(finite(value))


def finite(value: object) -> object:
    """The same value with None instead of NaN and the infinities."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


# ---- reading ----

MOST_DEPTH = 100
MOST_VALUES = 200_000
"""As many as a message has fields. Python's decoder stops every thread until it has read all of them."""
_READER = json.JSONDecoder(parse_constant=lambda _: None)
_ODD = re.compile(r"\\u[dD][89a-fA-F]|\d[eE]\+?\d{3}")
"""Half a character, or a number that may be infinite."""


def read_json(text: str) -> Any:
    """What a stored JSON text says, as values that can be written again: null for numbers that are not finite, and
    U+FFFD for half a character. Raises ValueError for what is no JSON, is nested deeper than `MOST_DEPTH`, or may have
    more than `MOST_VALUES` values."""
    if not isinstance(text, str):
        raise ValueError(f"JSON is a text, and this is of type {type(text).__name__}")
    if sum(map(text.count, "[{,")) > MOST_VALUES:
        raise ValueError(f"its JSON has more than {MOST_VALUES:,} values")
    try:
        value = _READER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    if _ODD.search(text) or text.count("[") + text.count("{") > MOST_DEPTH:
        return _clean(value, MOST_DEPTH)
    return value


def read_object(text: str) -> dict[str, Any]:
    """`read_json` for an object. Raises ValueError, also for anything else."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, and not {text[:40]!r}")
    return value


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise _too_deep()
    if isinstance(value, list):
        return [_clean(item, depth - 1) for item in value]
    return {_clean(name, depth): _clean(item, depth - 1) for name, item in value.items()}


def _too_deep() -> ValueError:
    return ValueError(f"its JSON is nested deeper than {MOST_DEPTH} levels")
