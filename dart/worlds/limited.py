"""Runs a program that does not outlive the worker: `python -I -S limited.py PARENT CPU_SECONDS MEGABYTES PROGRAM ...`.

The program is killed when the thread that started it ends, as it does when the worker dies in any way. With 0 for both
numbers it has no limits. The standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
MOST_FILE_BYTES = 64 << 20


def main() -> None:
    parent, cpu_seconds, megabytes = (int(word) for word in sys.argv[1:4])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before this was asked for
        sys.exit(1)
    if cpu_seconds or megabytes:
        _limit(cpu_seconds, megabytes)
    os.execvp(sys.argv[4], sys.argv[4:])


def _limit(cpu_seconds: int, megabytes: int) -> None:
    # A second between the two: what has used its time up ends with SIGXCPU, which tells it apart from other ends.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    limits = {
        resource.RLIMIT_AS: megabytes << 20,
        resource.RLIMIT_FSIZE: MOST_FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))


if __name__ == "__main__":
    main()
