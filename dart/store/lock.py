"""Locks that let only one process at a time work on a run.

It holds locks that the system releases when the process ends for any reason (a process id in a file could later belong
to another process): one on the run's directory itself, and one on a file in it that names the holder. The file may be
removed during the run; the directory cannot be while anything is in it, so a second process is still refused. On a file
system that cannot lock directories there is only the file's lock, which `Hold.renew` takes again; one that cannot lock
at all raises some error, and runs there are not locked.
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
"""A process that only checks the lock also holds it for a moment."""


class Hold:
    """The held locks on a run. Made by `held`."""

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
        # Only the holder writes here, so a refused process never replaces the holder's name.
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} of {os.uname().nodename}\n".encode(), 0)

    def renew(self) -> bool:
        """Take the file's lock again if the file was removed or replaced. Returns True if so. Raises UserError."""
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
        """Returns False if the file system has no such locks. Raises UserError if another process holds it."""
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
        raise UserError(f"{self._file.parent} is in use by {holder or 'another process'}: stop it first")


@contextmanager
def held(file: Path) -> Iterator[Hold]:
    """Hold the run with this lock file. Raises UserError if another process holds it, or it cannot be written."""
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
    """Whether some process works on the run with this lock file."""
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
