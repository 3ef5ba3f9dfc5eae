"""What an OpenEnv server sends, read within bounds: sizes are checked before anything is made of them.

A message may have 100 MB, and a screenshot in it may be rows of pixels: as Python's objects they would take gigabytes,
and the interpreter for seconds at a stretch. So such rows are cut out of the message as text, and read row by row.
These functions run in a thread.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, JsonValue

from dart.core.types import Image
from dart.screenshots.header import check_pixels, size_of
from dart.worlds import from_pixels

MOST_MESSAGE_BYTES = 100 << 20
"""As much as OpenEnv's own client takes: a screenshot may come as a list of numbers."""
MOST_VALUES = 1 << 20
"""Lists, objects and their items in a message, beside its rows of pixels: a second of the interpreter."""
_NUMBERS = re.compile(r"(?<![\d,\s\[\]])[\d,\s\[\]]{65536,}+")
"""A whole stretch of numbers and brackets. It begins where one can and gives nothing back, so that any text, whatever
it is made of, is searched in one pass."""
_MOST_SIDE = 1 << 15
_NEXT_ROW = re.compile(r"\]\s*\]\s*,\s*\[\s*\[")
_NEXT_PIXEL = re.compile(r"\]\s*,\s*\[")
_ENDS = re.compile(r"\s*\[\s*\[\s*\[(.*)\]\s*\]\s*\]\s*", re.DOTALL)


class Answer(BaseModel):
    """A message of the server. `data` is the state or the observation with reward and done, or what went wrong."""

    model_config = ConfigDict(extra="ignore")

    type: str
    data: dict[str, JsonValue] = {}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of pixels as they were written: a JSON list."""

    text: str


def read_answer(text: str | bytes) -> tuple[Answer, Mapping[str, Rows]]:
    """The message, and the long lists of numbers that were in it, by the texts that stand in their places.

    Raises ValueError for a text that is no such message, or that has too many values.
    """
    written = text if isinstance(text, str) else text.decode()
    rows: dict[str, Rows] = {}

    def kept(found: re.Match[str]) -> str:
        numbers = found[0].strip(" \t\r\n,")
        if not numbers.startswith("[") or numbers.count("[") != numbers.count("]"):
            return found[0]
        name = f"rows of numbers, {len(rows)}"
        rows[name] = Rows(numbers)
        return found[0].replace(numbers, json.dumps(name))

    written = _NUMBERS.sub(kept, written)
    values = sum(map(written.count, "[{,"))
    if values > MOST_VALUES:
        raise ValueError(f"{values:,} values, where {MOST_VALUES:,} are read")
    return Answer.model_validate_json(written), rows


def picture(value: object) -> Image:
    """A screenshot as OpenEnv environments send it. Raises ValueError for anything else."""
    if isinstance(value, Rows | list):
        return _picture_of_rows(value.text if isinstance(value, Rows) else json.dumps(value))
    if not isinstance(value, str) or not value:
        raise ValueError(f"is {type(value).__name__}, not a picture: does the environment send screenshots?")
    try:
        data = base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is not base64 ({error})") from None
    size = size_of(data)
    if size is None:
        raise ValueError(f"is neither PNG nor JPEG: it begins with {data[:8]!r}")
    return Image.of(data, "image/png" if data.startswith(b"\x89PNG") else "image/jpeg", *size)


def _picture_of_rows(text: str) -> Image:
    found = _ENDS.fullmatch(text)
    if found is None:
        raise ValueError("is a list, but not of rows of pixels with three numbers each")
    rows = _NEXT_ROW.split(found[1], _MOST_SIDE)
    width, height = len(_NEXT_PIXEL.split(rows[0], _MOST_SIDE)), len(rows)
    check_pixels(width, height)
    return from_pixels(b"".join(_row(row, width) for row in rows), width, height)


def _row(text: str, width: int) -> bytes:
    """The bytes of a row's pixels, written `r, g, b], [r, g, b`."""
    pixels = _NEXT_PIXEL.split(text, width)
    if len(pixels) != width:
        raise ValueError(f"is a list of rows, but one has {len(pixels)} pixels and the first {width}")
    if any(pixel.count(",") != 2 for pixel in pixels):
        raise ValueError("is a list of rows, but not of pixels with three numbers each")
    try:
        return bytes(map(int, ",".join(pixels).split(",")))
    except ValueError:
        raise ValueError("is a list of rows of pixels, but not of whole numbers from 0 to 255") from None
