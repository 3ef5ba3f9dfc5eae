"""JSON that every reader accepts. Standard JSON has no NaN or infinity, so numbers that are not finite become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

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
