"""What a machine runs out of, in one place: open files, threads, memory, room on a disk.

As a rule that passes, so whoever meets it waits and says what there is too little of (`dart.store.patience`), or ends
with `shortage` as its last words. Where waiting is no help, what is needed is taken at the start: threads
(`ready_threads`), and descriptors for the end (`spare`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MOST_OPEN_FILES = 1 << 20
"""Programs that close every descriptor they may have take minutes where a container allows a thousand million."""
SPARE = 16
FEW_OPEN_FILES = 1024
_PROBE_BYTES = 64 << 10


def shortage(error: BaseException | None) -> str:
    """What there is too little of, and the remedy; "" if the error means something else."""
    while error is not None:
        if told := _told(error):
            return told
        error = error.__cause__
    return ""


def _told(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return _threads()
    if not isinstance(error, OSError):
        return ""
    where = f" of {error.filename}" if isinstance(error.filename, str) else ""
    match error.errno:
        case errno.EMFILE:
            return f"too many open files: the limit of this process is {open_files()}: raise `ulimit -n`"
        case errno.ENFILE:
            return "too many open files on this machine: raise fs.file-max (sysctl), or end other programs"
        case errno.EAGAIN:
            return _threads()
        case errno.ENOMEM | errno.ENOBUFS:
            return _MEMORY
        case errno.ENOSPC:
            return f"the disk{where} is full: make room there"
        case errno.EDQUOT:
            return f"the quota on the disk{where} is used up: make room there, or have it raised"
    return ""


def of_program(error: BaseException, said: str = "") -> str:
    """The same of a program that did not start, also by what it printed itself; "" if neither names a shortage."""
    if short := shortage(error):
        return short
    for number in _PRINTED:
        if os.strerror(number).lower() in said.lower():
            return shortage(OSError(number, ""))
    return _threads() if _NO_THREAD in said else ""


def tight() -> str:
    """The limits of this process that large programs seldom start under, and the remedy; "" if there are none."""
    limits = []
    if (files := open_files()) < FEW_OPEN_FILES:
        limits.append(f"this process may have only {files} files open: raise `ulimit -n`")
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(f"this process may have only {space / (1 << 30):.3g} GiB of address space: lift `ulimit -v`")
    return "; ".join(limits)


_PRINTED = (errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
_NO_THREAD = "can't start new thread"
_MEMORY = "too little memory: end other programs, or give this machine or container more"
_THREADS = (
    "no more threads or processes may be started: raise `ulimit -u`, or the pids limit of this container, or end other "
    "programs"
)


def _threads() -> str:
    """A thread also needs address space for its stack, and the kernel says the same where it is that which lacks."""
    bounded = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return f"{_THREADS}, or lift `ulimit -v`" if bounded else _THREADS


def of_database(error: sqlite3.Error | BaseException | None, file: Path) -> str | None:
    """The same of SQLite's error, which does not say why a file could not be opened or written; "" if it may be a
    shortage that is over by now, and None if it means something else."""
    code = getattr(error, "sqlite_errorcode", None)
    match None if code is None else code & 0xFF:
        case sqlite3.SQLITE_NOMEM:
            return _MEMORY
        case sqlite3.SQLITE_FULL:
            return now(file.parent) or shortage(OSError(errno.ENOSPC, "", str(file)))
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_IOERR:
            return now(file.parent) or ("" if file.is_file() else None)
    return None


def now(folder: Path) -> str:
    """What there is too little of to write a file there at this moment."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, bytes(_PROBE_BYTES))
        finally:
            os.close(descriptor)
    except OSError as error:
        return shortage(error)
    return ""


def open_files() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Let this process, and those that it starts, open as many files as it may: soft limits are 1,024 nearly
    everywhere, and each worker is a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if open_files() < most:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses what it calls infinite
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def ready_threads(number: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads are all started now: one that starts them when there is work fails in the middle of a run
    where the machine has no more. Raises RuntimeError where it has none now."""
    pool, go = ThreadPoolExecutor(number, thread_name_prefix=name), threading.Event()
    try:
        for _ in range(number):
            pool.submit(go.wait)  # none is idle, so that each of these starts one
    except RuntimeError:
        go.set()
        pool.shutdown()
        raise
    go.set()
    return pool


def check_threads() -> None:
    """gRPC crashes or hangs where it does not get its threads, so this is called before it starts them. Raises
    RuntimeError where there are too few."""
    ready_threads(min(16, max(4, os.cpu_count() or 1)) + 6, "check").shutdown()


class Spare:
    """Descriptors that are kept open from the start, and given back when the run ends: to record how it ended, and for
    its last checkpoint, even where there are no others."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def hold(self, number: int = SPARE) -> None:
        self._held += [os.open(os.devnull, os.O_RDONLY) for _ in range(number - len(self._held))]

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop())


spare = Spare()
