"""One process at a time works on a run. It holds a lock on a file in the run's directory, which the system takes back
when the process ends, however that comes about; a process id in its place would be another process's one day."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dart.errors import UserError

log = logging.getLogger(__name__)

NAME = "run.lock"
_ATTEMPTS, _PAUSE_SECONDS = 20, 0.05
"""Whoever only looks holds the lock too, for a moment."""

# A file system without locks refuses them with one error or another: then nobody holds a run there.


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the run. Raises UserError when another process does, or the directory cannot be written."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{directory / NAME} cannot be written ({error.strerror}): make the folder writable") from None
    try:
        for _ in range(_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_SECONDS)
                continue
            except OSError as error:
                log.warning("%s cannot be locked (%s): start no second process on it", directory, error.strerror)
            break
        else:
            holder = os.read(descriptor, 100).decode("utf-8", "replace").strip()
            raise UserError(f"{directory} is worked on by {holder or 'another process'}: stop it first")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} of {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(directory: Path) -> bool:
    """Some process works on the run now."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY)
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
