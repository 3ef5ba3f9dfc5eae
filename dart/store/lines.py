"""A file of lines that stays within a size bound, however long it is written to: metrics.jsonl.

When it is too large, it is set aside and a new one is begun at once. What was set aside then replaces the older file,
`NAME.1`, from which only the important lines are kept. So the two together hold every important line, and the newest of
the others. `fold` may be killed at any moment and is then repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from dart.store.regular import is_regular


def elder(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.2")


def set_aside(path: Path) -> bool:
    """Make room for a new file at `path`, with one rename. Returns False if an earlier one is not folded yet."""
    if _aside(path).exists():
        return False
    path.rename(_aside(path))
    return True


def take_back(path: Path) -> None:
    """Undo `set_aside`, because no new file could be begun."""
    _aside(path).rename(path)


def fold(path: Path, important: Callable[[str], bool]) -> None:
    """Replace the older file with its own important lines, followed by what was set aside."""
    aside, old = _aside(path), elder(path)
    if not aside.exists():
        return
    if not _ends_alike(old, aside):  # else the process was killed just before the last line of this function
        temporary = path.with_name(f"{path.name}.tmp")
        with temporary.open("w", encoding="utf-8") as into:
            into.writelines(line for line in _whole_lines(old) if important(line))
            into.writelines(_whole_lines(aside))
        temporary.replace(old)
    aside.unlink()


def read_lines(path: Path) -> Iterator[str]:
    """Every line that is kept, oldest first, without a last line that was cut off."""
    parts = [elder(path), _aside(path), path]
    if _ends_alike(elder(path), _aside(path)):
        del parts[1]
    for part in parts:
        yield from _whole_lines(part)


def _whole_lines(path: Path) -> Iterator[str]:
    if not is_regular(path):
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def _ends_alike(first: Path, second: Path) -> bool:
    """Their last bytes are the same: an event has its time in it, so no two end alike by chance."""
    ends = []
    for path in (first, second):
        if not is_regular(path) or not path.stat().st_size:
            return False
        with path.open("rb") as file:
            file.seek(-min(path.stat().st_size, 4096), os.SEEK_END)
            ends.append(file.read().rstrip(b"\n").rpartition(b"\n")[2])
    return ends[0] == ends[1]
