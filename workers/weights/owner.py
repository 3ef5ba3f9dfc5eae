"""Makes an engine process end with the worker process that owns it. Linux only; imports nothing heavy.

Without this, vLLM's engine process outlives a parent that was killed. PR_SET_PDEATHSIG is no substitute: it fires when
the *thread* that started the process ends.
"""

from __future__ import annotations

import os
import select
import threading

OWNER_VARIABLE = "DART_ENGINE_OWNER"
"""Environment variable with the owner's pid."""
EXIT_CODE = 17


def own_engines() -> None:
    """Make this process the owner of the engine processes that it starts from now on."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())


def end_with_owner() -> None:
    """Watch the owner from a thread and end this process as soon as it is gone. Does nothing without an owner."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if not owner or owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(EXIT_CODE)

    def watch() -> None:
        select.select([handle], [], [])  # Readable when the owner has ended.
        os._exit(EXIT_CODE)

    threading.Thread(target=watch, daemon=True, name="owner-watch").start()
