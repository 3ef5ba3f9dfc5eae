"""Screenshots in the run's own directory, for workers with access to it: none of their bytes go over the wire.

The coordinator names the directory and the word in it (`dart.config.SharedBlobs`). A worker that reads that word there
sees the same directory, on the same machine or over a network file system, and says so in Ready. An env worker then
writes each screenshot itself and sends its digest; replicas and the trainer read those that arrive by digest alone.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Self

from dart.config import SharedBlobs
from dart.core.types import Image
from dart.errors import UserError
from dart.screenshots.directory import ScreenshotDirectory, file_name

log = logging.getLogger(__name__)


class SharedScreenshots:
    """Its methods block for the duration of a file call, and may be called from any thread."""

    def __init__(self, directory: ScreenshotDirectory) -> None:
        self._directory = directory

    @classmethod
    def seen(cls, shared: SharedBlobs | None, *, writes: bool = False) -> Self | None:
        """None if the coordinator shares no directory, or this process cannot read it (or write it, where asked)."""
        directory = ScreenshotDirectory(shared.directory) if shared else None
        if shared is None or directory is None or not directory.marked(shared.id):
            return None
        try:
            if writes:
                directory.prepare()
        except UserError:
            return None
        return cls(directory)

    def put(self, image: Image) -> Image:
        """Write the image, and return it without its bytes; it keeps them if they cannot be written."""
        try:
            name = file_name(image.sha256)
            if not self._directory.holds(name, len(image.data)):
                self._directory.write(name, image.data)
        except OSError as error:
            log.warning("screenshot %s cannot be written to %s (%s): the coordinator gets it", image.sha256.hex()[:12],
                        self._directory.root, error)  # fmt: skip
            return image
        return replace(image, data=b"")

    def get(self, digest: bytes) -> bytes:
        """The bytes in the directory, which may not hash to the digest; b"" if there are none."""
        try:
            return self._directory.read(file_name(digest))
        except (OSError, ValueError):
            return b""

    def has(self, digest: bytes, size: int | None = None) -> bool:
        """Whether there are bytes of this digest (and size)."""
        try:
            held = self._directory.size(file_name(digest))
        except (OSError, ValueError):
            return False
        return held == size if size is not None else held > 0
