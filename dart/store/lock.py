"""One process at a time works on a run.

It holds locks that the system takes back when the process ends, however that comes about (a process id in a file would
be another process's one day): one on the run's directory itself, and one on a file in it that says who holds it. The
file may be removed while the run goes on; the directory cannot be, as long as anything is in it, so a second process is
refused all the same. A file system that cannot lock directories has the file's lock alone, which `Hold.renew` takes
again; one that cannot lock at all refuses with one error or another, and then nobody holds a run there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dart.errors import UserError

log = logging.getLogger(__name__)

_ATTEMPTS, _PAUSE_SECONDS = 20, 0.05
"""Whoever only looks holds the lock too, for a moment."""


class Hold:
    """The locks on a run, held. Made by `held`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._undo = ExitStack()
        self._directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._undo.callback(os.close, self._directory)
        self._descriptor = -1

    def take(self) -> None:
        """Raises UserError when another process holds the run."""
        self._descriptor = self._opened()
        by_directory = self._locked(self._directory)
        if not (self._locked(self._descriptor) or by_directory):
            log.warning("%s cannot be locked on this file system: start no second process on it", self._file.parent)
        # Only the holder writes here, so that a refused process never replaces the holder's name.
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} of {os.uname().nodename}\n".encode(), 0)

    def renew(self) -> bool:
        """Take the file's lock again where the file was removed or replaced; whether that was so. Raises UserError."""
        try:
            if self._file.stat().st_ino == os.fstat(self._descriptor).st_ino:
                return False
        except FileNotFoundError:
            pass
        self.take()
        return True

    def close(self) -> None:
        self._undo.close()

    def _opened(self) -> int:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self._file} cannot be written ({error.strerror}): make the folder writable") from None
        self._undo.callback(os.close, descriptor)
        return descriptor

    def _locked(self, descriptor: int) -> bool:
        """False where the file system has no such locks. Raises UserError when another process holds it."""
        for _ in range(_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_SECONDS)
            except OSError:
                return False
            else:
                return True
        holder = os.read(self._descriptor, 100).decode("utf-8", "replace").strip()
        raise UserError(f"{self._file.parent} is worked on by {holder or 'another process'}: stop it first")


@contextmanager
def held(file: Path) -> Iterator[Hold]:
    """Hold the run whose lock file this is. Raises UserError when another process does, or it cannot be written."""
    try:
        hold = Hold(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): make the folder writable") from None
    try:
        hold.take()
        yield hold
    finally:
        hold.close()


def is_held(file: Path) -> bool:
    """Some process works on the run whose lock file this is."""
    return _is_locked(file.parent, os.O_RDONLY | os.O_DIRECTORY) or _is_locked(file, os.O_RDONLY)


def _is_locked(path: Path, flags: int) -> bool:
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
