"""What this process holds in memory, from Linux's /proc."""

from __future__ import annotations

import gc
from pathlib import Path

_SELF = Path("/proc/self")


def resident_mb() -> float:
    """Memory held now, after a garbage collection."""
    gc.collect()
    return _status("VmRSS")


def begin_peak() -> float:
    """Forget the peak so far; returns the memory held now, in MB."""
    (_SELF / "clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def peak_mb() -> float:
    """The most memory held since `begin_peak`."""
    return _status("VmHWM")


def _status(name: str) -> float:
    for line in (_SELF / "status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {name}: this benchmark needs Linux")
