"""How a process keeps memory that it has freed, and gives it back. Nothing happens where malloc is not glibc's."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES, _LARGE_BYTES = 512 << 20, 32 << 20


def keep_memory() -> None:
    """Keep freed memory for the next screenshot.

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
