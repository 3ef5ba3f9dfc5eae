"""The size of a PNG or a JPEG, from its first bytes, without decoding it and without Pillow.

A picture of a few bytes may claim any number of pixels, and a decoder takes memory for all of them. So the size is
checked before decoding, and a picture above `MAX_PIXELS` is refused.
"""

from __future__ import annotations

import struct

MAX_PIXELS = 1 << 26
"""67 million: twice an 8K screen."""

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"IEND"
_JPEG = b"\xff\xd8"
_JPEG_END = b"\xff\xd9"
_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of a frame's header; the numbers missing from the range mean other things."""
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length."""

_MOST_STEPS = 1 << 16
"""Parts of a file that are walked through: a peer's megabytes of empty chunks take no time of the event loop."""


class BadHeader(ValueError):
    """The bytes begin as a PNG or JPEG but are invalid, cut short, or claim too many pixels."""


def size_of(data: bytes) -> tuple[int, int] | None:
    """(width, height) in pixels; None if this is neither PNG nor JPEG. Raises BadHeader."""
    if data.startswith(_PNG):
        size = _png_size(data)
    elif data.startswith(_JPEG):
        size = _jpeg_size(data)
    else:
        return None
    check_pixels(*size)
    return size


def check_pixels(width: int, height: int) -> None:
    """Raises BadHeader unless there are 1 to `MAX_PIXELS` pixels."""
    if not 0 < width * height <= MAX_PIXELS:
        raise BadHeader(f"claims {width}×{height} pixels: between 1 and {MAX_PIXELS} are accepted")


def _png_size(data: bytes) -> tuple[int, int]:
    """Follows the chunks by their lengths, so that a file that is cut short is noticed."""
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise BadHeader("is a PNG without a header")
    width, height = struct.unpack_from(">II", data, 16)
    at = len(_PNG)
    for _ in range(_MOST_STEPS):
        if data[at + 4 : at + 8] == _PNG_END:
            return width, height
        if at + 8 > len(data):
            raise BadHeader(f"is a PNG that is cut short after {len(data)} bytes")
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    raise BadHeader(f"is a PNG of more than {_MOST_STEPS} chunks")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    if _JPEG_END not in data[-64:]:  # a few bytes may follow the end
        raise BadHeader(f"is a JPEG that is cut short after {len(data)} bytes")
    at = len(_JPEG)
    for _ in range(_MOST_STEPS):
        if at + 4 > len(data):
            break
        if data[at] != 0xFF:
            raise BadHeader(f"is a JPEG with no marker at byte {at}")
        marker = data[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
        elif marker in _JPEG_ALONE:
            at += 2
        elif marker in _JPEG_FRAMES:
            if at + 9 > len(data):
                break
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise BadHeader("is a JPEG without a frame")
