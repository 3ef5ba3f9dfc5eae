"""JSON that every reader accepts. Standard JSON has no NaN or infinity, so numbers that are not finite become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

JSON = Mapping[str, "JSON"] | Sequence["JSON"] | str | float | bool | None


def to_json(value: object, *, indent: int | None = None) -> str:
    """The value as JSON, with null for numbers that are not finite. Raises TypeError for types that JSON lacks."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, indent=indent)


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
