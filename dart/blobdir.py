"""Byte strings by their SHA-256 in a directory: where a run's screenshots lie, for every process that sees it.

What always holds: a file is whole or not there (a temporary name, then a rename). Layout: `ab/abcdef…`. A file is not
forced onto the disk, so a power failure may leave the newest ones short or empty.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import time
from pathlib import Path

from dart.errors import UserError

_TEMPORARY = "tmp"
_TEMPORARY_SECONDS = 3600.0
_IDENTITY = "id"


def blob_name(digest: bytes) -> str:
    """Where a digest's bytes lie, below the root. Raises ValueError for what is no SHA-256."""
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"a blob's digest has 32 raw bytes, this one {len(digest)}")
    text = digest.hex()
    return f"{text[:2]}/{text}"


class BlobDirectory:
    """Plain file calls: several times faster than through fsspec for files of a few KB. `read` and `size` raise
    FileNotFoundError."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._prefix = f"{self.root}/"
        self._temporary = self.root / _TEMPORARY
        self._writer = secrets.token_hex(8)  # a process id is not unique: two stores in one, two machines on one share
        self._counter = itertools.count()
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"blob directory {root} cannot be made ({error.strerror}): name a writable one") from None
        self._sweep()

    def identity(self) -> str:
        """A word that is in this directory and in no other: who reads it there sees the same directory."""
        path = self.root / _IDENTITY
        if not path.exists():
            self.write(_IDENTITY, secrets.token_hex(16).encode())
        return path.read_text(encoding="ascii")

    def write(self, name: str, data: bytes) -> None:
        temporary = f"{self._temporary}/{self._writer}-{next(self._counter)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)
        target = self._prefix + name
        try:
            os.rename(temporary, target)  # noqa: PTH104 - a Path costs more than the call
        except FileNotFoundError:
            Path(target).parent.mkdir(exist_ok=True)
            os.rename(temporary, target)  # noqa: PTH104

    def read(self, name: str) -> bytes:
        return Path(self._prefix + name).read_bytes()

    def size(self, name: str) -> int:
        return os.stat(self._prefix + name).st_size  # noqa: PTH116 - as above

    def _sweep(self) -> None:
        """Removes what writers that died have left; a living writer's file is younger."""
        oldest = time.time() - _TEMPORARY_SECONDS
        for path in self._temporary.iterdir():
            try:
                if path.stat().st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process swept it
