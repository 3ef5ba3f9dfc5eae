"""The directory of a run's screenshots, by the SHA-256 of their bytes, for every process with access to it.

Invariant: a file is whole or absent (a temporary name, then a rename). Layout: `ab/abcdef…`. A file is not
forced onto the disk, so a power failure may leave the newest ones short or empty.

A writer whose bytes are already stored touches the file (`holds`), and `remove` keeps files that were touched lately.
It first sets the file aside and checks its time again, so that a writer always wins against a simultaneous remover,
without a lock: the writer either touched the file, which is then put back, or found none and wrote it. The writer
looks for the file after touching it: the system may find the file, lose it to the remover, and touch it all the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from dart.errors import UserError, unwritable
from dart.failpoints import failpoint

_TEMPORARY = "tmp"
_TEMPORARY_SECONDS = 3600.0
_MARK = "id"
_REMOVED, _DAMAGED = "removed", "damaged"
SHARDS = 256


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`touched`: when it was last written, or stored again (Unix seconds)."""

    digest: bytes
    bytes: int
    touched: float


def file_name(digest: bytes) -> str:
    """Where a digest's bytes lie, below the root. Raises ValueError if it is not a SHA-256."""
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError(f"a screenshot's digest has 32 raw bytes, this one {len(digest)}")
    text = digest.hex()
    return f"{text[:2]}/{text}"


class ScreenshotDirectory:
    """Plain file calls: several times faster than through fsspec for files of a few KB. `read` and `size` raise
    FileNotFoundError, all of them OSError. Call `prepare` before the first `write`.

    What a damaged file system leaves in a file's place, a folder or a pipe for example, is not a file: it is not there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._prefix = f"{self.root}/"
        self._writer = secrets.token_hex(8)  # a process id would not be unique: two stores in a process, two machines
        self._counter = itertools.count()

    def prepare(self) -> None:
        """Make the directory, and remove what dead writers have left. Raises UserError."""
        temporary = self.root / _TEMPORARY
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            oldest = time.time() - _TEMPORARY_SECONDS  # a live writer's file is younger
            for path in temporary.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    if path.stat().st_mtime < oldest:
                        path.unlink()
        except OSError as error:
            raise UserError(
                f"screenshot directory {self.root} cannot be made {unwritable(error, 'name a writable one')}"
            ) from None

    def mark(self) -> str:
        """Write a new word into it: a process that reads that word there sees this directory, not a copy.

        The subfolders are made, too, so that they belong to one user, whichever process writes first.
        """
        for number in range(SHARDS):
            (self.root / f"{number:02x}").mkdir(exist_ok=True)
        word = secrets.token_hex(16)
        self.write(_MARK, word.encode())
        return word

    def marked(self, word: str) -> bool:
        """Whether this is the directory with that mark. Changes nothing."""
        try:
            return (self.root / _MARK).read_text(encoding="ascii") == word
        except (OSError, ValueError):
            return False

    def write(self, name: str, data: bytes) -> None:
        temporary = f"{self._prefix}{_TEMPORARY}/{self._writer}-{next(self._counter)}"
        try:
            failpoint("screenshot-write")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            try:
                self._rename(temporary, self._prefix + name)
            except IsADirectoryError:
                self.set_aside(name)
                self._rename(temporary, self._prefix + name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108 - as below
            raise

    def read(self, name: str) -> bytes:
        descriptor = os.open(self._prefix + name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no pipe
        try:
            _regular(os.fstat(descriptor))
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        return _regular(os.stat(self._prefix + name)).st_size  # noqa: PTH116 - as below

    def set_aside(self, name: str) -> None:
        """Make room for the bytes of this name: what is there is damaged, and is kept in `damaged`."""
        aside = self.root / _DAMAGED / f"{Path(name).name}-{self._writer}-{next(self._counter)}"
        aside.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._prefix + name, aside)  # noqa: PTH104 - as below

    def holds(self, name: str, size: int | None = None) -> bool:
        """Whether there are bytes of this name (and size). If so they are touched, which keeps them for a while."""
        path = self._prefix + name
        try:
            os.utime(path)  # first: a file seen after it was touched is seen as touched by a remover, too
            held = self.size(name)
        except FileNotFoundError:
            return False
        return held == size if size is not None else held > 0

    # ---- removing ----

    def files(self, shard: int) -> list[StoredFile]:
        """The files in one of the `SHARDS` folders."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._prefix}{shard:02x}") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, ValueError):  # gone meanwhile, or not one of our files
                    digest = bytes.fromhex(entry.name)
                    file_name(digest)  # raises ValueError, too
                    status = _regular(entry.stat(follow_symlinks=False))
                    found.append(StoredFile(digest, status.st_size, status.st_mtime))
        return found

    def remove(self, digest: bytes, untouched_since: float) -> int:
        """Remove the bytes, unless stored again since then (Unix seconds). Returns the number of bytes freed."""
        target = self._prefix + file_name(digest)
        aside = f"{self._prefix}{_REMOVED}/{digest.hex()}"
        try:
            if _regular(os.stat(target)).st_mtime >= untouched_since:  # noqa: PTH116 - as below
                return 0
            self._rename(target, aside)
        except FileNotFoundError:
            return 0
        failpoint("screenshot-aside")
        status = os.stat(aside)  # noqa: PTH116 - as below
        if status.st_mtime >= untouched_since:
            self._rename(aside, target)  # replaces the same bytes if they were written again meanwhile
            return 0
        os.unlink(aside)  # noqa: PTH108 - as below
        return status.st_size

    def put_back(self) -> int:
        """Put back files that a killed process had set aside, and return their number. Call before removing
        anything."""
        waiting = list((self.root / _REMOVED).glob("*"))
        for file in waiting:
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._rename(str(file), self._prefix + file_name(bytes.fromhex(file.name)))
        return len(waiting)

    @staticmethod
    def _rename(temporary: str, target: str) -> None:
        try:
            os.rename(temporary, target)  # noqa: PTH104 - a Path costs more than the call
        except FileNotFoundError:
            Path(target).parent.mkdir(exist_ok=True)
            os.rename(temporary, target)  # noqa: PTH104


def _regular(status: os.stat_result) -> os.stat_result:
    """The same. Raises FileNotFoundError for anything but a file."""
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "what is there is not a file")
    return status
