"""What this process may use of the machine that it is on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = "sys/fs/cgroup"
LIMITS = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
"""A controller's name in /proc/self/cgroup (of version 2, none) → its folder in GROUPS, and its file with a limit."""


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or the least that the control group of this process and those around it may use: a
    container or a cluster's job may have a limit (cgroups(7), versions 1 and 2).

    root: the folder with proc and sys. Without a limit a file says "max", or a number beyond any machine's memory.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = PurePosixPath(path.lstrip("/"))
        for name in controllers.split(","):
            if name in LIMITS:
                folder, file = LIMITS[name]
                # Within a container the path may be the host's, and its own group is at the top.
                told = (_text(root / GROUPS / folder / one / file) for one in (group, *group.parents))
                yield from (int(text) for text in told if text.isdigit())


def _text(path: Path) -> str:
    """Empty if there is no such file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
