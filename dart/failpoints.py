"""Places between two durable steps, where a test kills the process to see that nothing is lost or doubled.

They do nothing unless the environment variable DART_FAILPOINT names one: `closed-group`, or `closed-group:3` for the
third time that the process gets there.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "DART_FAILPOINT"


def _armed() -> tuple[str, int]:
    """(name, on which visit the process is killed), from the environment."""
    name, _, times = os.environ.get(VARIABLE, "").partition(":")
    return name, int(times or 1)


_name, _left = _armed()


def failpoint(name: str) -> None:
    """End the process here, at once and without any clean-up, if this failpoint is due."""
    global _left  # noqa: PLW0603 - one count for the whole process
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
