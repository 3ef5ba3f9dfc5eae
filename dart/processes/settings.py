"""Settings of a process: its memory, its garbage, the signals that end it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES, _LARGE_BYTES = 512 << 20, 32 << 20


def collect_seldom() -> None:
    """Collect garbage cycles rarely, and never among the objects that exist now.

    Trajectories are many small records that live for minutes and are in no cycles. Going through them as often as
    Python does by itself takes a sixth of the coordinator's time, and a pass over those of thousands of environments
    holds every step up for a second. So old objects are hardly ever looked at, and new ones by the five thousand, which
    takes 13 ms: by fifty thousand it is ten times that, and every step behind it waits.
    """
    gc.freeze()
    gc.set_threshold(5_000, 10_000, 1_000)


def keep_memory() -> None:
    """Keep freed memory for the next screenshot. Where the C library is not glibc, nothing happens.

    A screenshot is copied several times on its way through gRPC and protobuf. glibc gives such blocks back to the
    system as soon as they are free, and then the system has to clear every page again for the next one. All threads
    share one arena: with one for each, a process grows for hours, whenever a thread has its first burst of work.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def release_free_memory() -> None:
    """Give the kernel back what malloc holds free; blocks for milliseconds. Call it about once a minute.

    With the settings of `keep_memory`, freed blocks among living ones would otherwise stay until the process ends.
    """
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def ending_signals() -> list[signal.Signals]:
    """The signals that mean "stop cleanly": Ctrl-C, SIGTERM, and a closing terminal, but not under nohup."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hung_up]
