"""The picture of an Xvfb screen, read from the file into which Xvfb maps its frame buffer (`-fbdir`, format XWD)."""

from __future__ import annotations

import io
import mmap
import struct
import time
from pathlib import Path
from typing import Literal

from PIL import Image as Picture

from dart.core.types import Image
from dart.worlds import EnvironmentFailure

Format = Literal["png", "jpeg"]
TICK_SECONDS = 0.015


class Screen:
    """A screen of 24 bits a pixel. Raises EnvironmentFailure if the file is not what Xvfb writes."""

    def __init__(self, file: Path, size: tuple[int, int]) -> None:
        with file.open("rb") as opened:
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        head = self._map[:100]
        # The byte order is the server's own; the header's own size, its first number, is a few hundred bytes.
        order = "<" if struct.unpack("<I", head[:4])[0] < 1 << 16 else ">"
        fields = struct.unpack(f"{order}25I", head)
        self.size, self._row = (fields[4], fields[5]), fields[12]
        self._start, bits = fields[0] + 12 * fields[19], fields[11]
        if self.size != size or bits != 32:
            raise EnvironmentFailure(f"Xvfb shows {self.size} with {bits} bits a pixel, not {size} with 32")

    def pixels(self) -> bytes:
        """A copy of the screen: BGRX, row by row from the top."""
        return self._map[self._start : self._start + self._row * self.size[1]]

    def settled(self, still: float, most: float) -> bytes:
        """The pixels once they have not changed for `still` seconds, or after `most` seconds."""
        began = changed = time.monotonic()
        last = self.pixels()
        while (now := time.monotonic()) - changed < still and now - began < most:
            time.sleep(min(TICK_SECONDS, still))
            if (current := self.pixels()) != last:
                last, changed = current, time.monotonic()
        return last

    def encode(self, pixels: bytes, form: Format, quality: int) -> Image:
        """The screenshot, of exactly the screen's size."""
        picture = Picture.frombuffer("RGB", self.size, pixels, "raw", "BGRX", self._row, 1)
        out = io.BytesIO()
        if form == "png":
            picture.save(out, "PNG", compress_level=1)
        else:
            picture.save(out, "JPEG", quality=quality)
        return Image.of(out.getvalue(), f"image/{form}", *self.size)

    def close(self) -> None:
        self._map.close()
