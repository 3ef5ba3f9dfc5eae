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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dart.errors import UserError, unwritable
from dart.store.regular import open_regular

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.05
_PATIENCE_SECONDS = 1.0
"""A process that only checks the lock also holds it for a moment."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
LEASE_SECONDS = 120.0
"""A file server that loses one of its machines keeps that machine's locks for a while: NFS usually for 90 s."""


class Hold:
    """The held locks on a run. Made by `held`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._undo = ExitStack()
        self._directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._undo.callback(os.close, self._directory)
        self._descriptor = -1

    def take(self, lease: float = LEASE_SECONDS) -> None:
        """`lease`: seconds for which a holder on another machine may be gone already. Raises UserError when another
        process holds the run."""
        self._descriptor = self._opened()
        by_directory = self._locked(self._directory, lease)
        if not (self._locked(self._descriptor, lease) or by_directory):
            log.warning("%s cannot be locked on this file system: start no second process on it", self._file.parent)
        # Only the holder writes here, so a refused process never replaces the holder's name.
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} of {os.uname().nodename}\n{_boot()}\n".encode(), 0)

    def renew(self) -> bool:
        """Take the file's lock again if the file was removed or replaced. Returns True if so. Raises UserError."""
        try:
            if self._file.stat().st_ino == os.fstat(self._descriptor).st_ino:
                return False
        except FileNotFoundError:
            pass
        self.take(0.0)
        return True

    def close(self) -> None:
        self._undo.close()

    def _opened(self) -> int:
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self._file} cannot be written {unwritable(error, 'make the folder writable')}") from None
        self._undo.callback(os.close, descriptor)
        return descriptor

    def _locked(self, descriptor: int, lease: float) -> bool:
        """Returns False if the file system has no such locks. Raises UserError if another process holds it."""
        began, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                waited = time.monotonic() - began
            except OSError:
                return False
            told_by_holder = os.pread(self._descriptor, 400, 0).decode("utf-8", "replace")
            holder, _, boot = (part.strip() for part in told_by_holder.partition("\n"))
            elsewhere = bool(boot) and boot != _boot()
            if waited > (max(lease, _PATIENCE_SECONDS) if elsewhere else _PATIENCE_SECONDS):
                raise UserError(f"{self._file.parent} is in use by {holder or 'another process'}: stop it first")
            if elsewhere and waited > _PATIENCE_SECONDS and not told:
                told = True
                log.warning(
                    "%s is in use by %s: waiting up to %g s, in case that machine is gone and its lock is not yet",
                    self._file.parent, holder, lease,
                )  # fmt: skip
            time.sleep(_PAUSE_SECONDS)


def _boot() -> str:
    """Names this machine since its last start, also in its containers, which have names of their own."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


@contextmanager
def held(file: Path, lease: float = LEASE_SECONDS) -> Iterator[Hold]:
    """Hold the run with this lock file; `lease` as of `Hold.take`.

    Raises UserError if another process holds it, or it cannot be written.
    """
    try:
        hold = Hold(file)
    except OSError as error:
        raise UserError(f"{file} cannot be written {unwritable(error, 'make the folder writable')}") from None
    try:
        hold.take(lease)
        yield hold
    finally:
        hold.close()


def is_held(file: Path) -> bool:
    """Whether some process works on the run with this lock file."""
    return _is_locked(lambda: os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)) or _is_locked(
        lambda: open_regular(file.parent, file.name)
    )


def _is_locked(opened: Callable[[], int]) -> bool:
    try:
        descriptor = opened()
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
