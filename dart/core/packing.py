"""Many numbers as bytes: little-endian, of the size that `array.array`'s type code has on every common platform ("I":
uint32, "f": float32)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any


def pack(typecode: str, values: Sequence[int] | Sequence[float]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(typecode: str, data: bytes) -> array[Any]:
    """Raises ValueError unless the bytes hold a whole number of values."""
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
