"""Screenshots from a world's PNG bytes or pixels. Uses only the standard library."""

from __future__ import annotations

import struct
import zlib

from dart.core.types import Image

NO_IMAGE = Image(b"", "", 0, 0)
"""The picture of an observation that ends an episode and has none."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def from_png(data: bytes) -> Image:
    """A screenshot that is a PNG already; its size is read from its header. Raises ValueError for anything else."""
    if not data.startswith(_SIGNATURE) or len(data) < 24:
        raise ValueError(f"a screenshot of {len(data)} bytes is not a PNG: it begins with {data[:8]!r}")
    width, height = struct.unpack(">II", data[16:24])
    return Image.of(data, "image/png", width, height)


def from_pixels(pixels: bytes, width: int, height: int) -> Image:
    """A screenshot from RGB pixels, row by row from the top (`array.tobytes()` of a uint8[height, width, 3]).

    Raises ValueError unless there are width × height × 3 bytes.
    """
    if width < 1 or height < 1 or len(pixels) != width * height * 3:
        raise ValueError(f"{len(pixels)} bytes are not {width} x {height} RGB pixels: those take {width * height * 3}")
    row = width * 3
    lines = b"".join(b"\0" + pixels[start : start + row] for start in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines, 1)), _chunk(b"IEND", b""))
    return Image.of(_SIGNATURE + b"".join(chunks), "image/png", width, height)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
