"""Log files that other processes write to, kept within a bound.

A worker, its engine and its browser write to the file's descriptor themselves, so the file cannot be exchanged: its end
is copied to `NAME.1`, and it is cut to nothing. All of them append, so they go on at its new beginning. What one writes
between the copy and the cut, a fraction of a millisecond, is lost.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

END_BYTES = 64 << 10
"""A log's last line is looked for in so much of its end."""


def elder(log: Path) -> Path:
    """The part before the last cut."""
    return log.with_name(f"{log.name}.1")


def bound(log: Path, most_bytes: int) -> bool:
    """Cut the log if it is longer than that, keeping its last `most_bytes` as its elder; whether it was."""
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return False
    if size <= most_bytes:
        return False
    temporary = log.with_name(f"{log.name}.tmp")
    with log.open("rb") as source, temporary.open("wb") as into:
        source.seek(size - most_bytes)
        shutil.copyfileobj(source, into)
        into.flush()
        os.truncate(log, 0)
    temporary.replace(elder(log))
    return True


def last_line(log: Path, pattern: str = r"\S") -> str:
    """The last line with the pattern, also from before the last cut; empty where there is none.

    Only the end of each part is read, because the event loop waits for it.
    """
    for part in (log, elder(log)):
        if not part.exists():
            continue
        with part.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines()]
        if said := next((line for line in reversed(lines) if re.search(pattern, line)), ""):
            return said
    return ""
