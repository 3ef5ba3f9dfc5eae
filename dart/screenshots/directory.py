"""The directory of a run's screenshots, by the SHA-256 of their bytes, for every process that sees it.

What always holds: a file is whole or not there (a temporary name, then a rename). Layout: `ab/abcdef…`. A file is not
forced onto the disk, so a power failure may leave the newest ones short or empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import time
from pathlib import Path

from dart.errors import UserError

_TEMPORARY = "tmp"
_TEMPORARY_SECONDS = 3600.0
_MARK = "id"


def file_name(digest: bytes) -> str:
    """Where a digest's bytes lie, below the root. Raises ValueError for what is no SHA-256."""
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"a blob's digest has 32 raw bytes, this one {len(digest)}")
    text = digest.hex()
    return f"{text[:2]}/{text}"


class ScreenshotDirectory:
    """Plain file calls: several times faster than through fsspec for files of a few KB. `read` and `size` raise
    FileNotFoundError, all of them OSError. Call `prepare` before the first `write`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._prefix = f"{self.root}/"
        self._writer = secrets.token_hex(8)  # a process id is not unique: two stores in one, two machines on one share
        self._counter = itertools.count()

    def prepare(self) -> None:
        """Make it, and remove what writers that died have left. Raises UserError."""
        temporary = self.root / _TEMPORARY
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            oldest = time.time() - _TEMPORARY_SECONDS  # a living writer's file is younger
            for path in temporary.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process swept it
                    if path.stat().st_mtime < oldest:
                        path.unlink()
        except OSError as error:
            raise UserError(
                f"blob directory {self.root} cannot be made ({error.strerror}): name a writable one"
            ) from None

    def mark(self) -> str:
        """Write a new word into it: whoever reads that word there sees this directory, and no copy of it.

        Folders are made, too, so that they belong to one user, whoever writes first.
        """
        for number in range(256):
            (self.root / f"{number:02x}").mkdir(exist_ok=True)
        word = secrets.token_hex(16)
        self.write(_MARK, word.encode())
        return word

    def marked(self, word: str) -> bool:
        """Is this the directory that was marked so? Touches nothing."""
        try:
            return (self.root / _MARK).read_text(encoding="ascii") == word
        except (OSError, ValueError):
            return False

    def write(self, name: str, data: bytes) -> None:
        temporary = f"{self._prefix}{_TEMPORARY}/{self._writer}-{next(self._counter)}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            self._rename(temporary, self._prefix + name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108 - as below
            raise

    def read(self, name: str) -> bytes:
        return Path(self._prefix + name).read_bytes()

    def size(self, name: str) -> int:
        return os.stat(self._prefix + name).st_size  # noqa: PTH116 - as below

    @staticmethod
    def _rename(temporary: str, target: str) -> None:
        try:
            os.rename(temporary, target)  # noqa: PTH104 - a Path costs more than the call
        except FileNotFoundError:
            Path(target).parent.mkdir(exist_ok=True)
            os.rename(temporary, target)  # noqa: PTH104
