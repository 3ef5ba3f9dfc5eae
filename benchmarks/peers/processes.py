"""Runs a contender in processes of its own and looks at what they take: memory and processor time, from /proc.

Every process that a contender starts, however far down, inherits one environment variable and is found by it, also when
the system has given it to another parent; or by its parent, where it has written over its variables (Ray's workers do,
to show another name).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.shared import MARK

VARIABLE = "DART_TRANSPORT_CONTENDER"
LOOK_SECONDS = 0.1
"""Between two looks at the memory."""
SLOW_LOOKS = 10
"""So many looks go by between two at what is newly there, and at shares of memory: they cost more."""
END_SECONDS = 15.0
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class ContenderFailed(Exception):
    """It told no result; the message says why, as far as its own output does."""


@dataclass(slots=True)
class Members:
    """The processes of one contender."""

    mark: str
    _known: dict[int, bool] = field(default_factory=dict)

    def look(self) -> list[int]:
        """The processes that there are now."""
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - a Path for each costs more
        self._known = {pid: known for pid, known in self._known.items() if pid in there}
        for pid in sorted(there - self._known.keys()):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes()
                self._known[pid] = self.mark.encode() in variables or self._known.get(_parent(pid), False)
        return [pid for pid, mine in self._known.items() if mine]

    def end(self) -> None:
        """End those that are left, first by asking."""
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            until = time.monotonic() + seconds
            while (left := [pid for pid in self.look() if not _zombie(pid)]) and time.monotonic() < until:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.2)


@dataclass(slots=True)
class Usage:
    """Peaks in bytes, sums over all processes. What processes share counts in each for `rss`, and once for `pss`."""

    rss: int = 0
    pss: int = 0
    processes: int = 0

    def look(self, pids: Sequence[int], shares: bool) -> None:
        self.rss = max(self.rss, sum(_rss(pid) for pid in pids))
        self.processes = max(self.processes, len(pids))
        if shares:
            self.pss = max(self.pss, sum(_pss(pid) for pid in pids))


def run(command: Sequence[str], folder: Path, limit_seconds: float) -> dict[str, Any]:
    """What the contender tells in the end, with what it took: peaks since it began, processor time while it measured.

    `folder`: its working directory. What it puts into temporary files is deleted. Raises ContenderFailed; ends all of
    its processes in any case.
    """
    value = secrets.token_hex(8)
    members = Members(f"{VARIABLE}={value}")
    with tempfile.TemporaryDirectory(prefix="transport-", ignore_cleanup_errors=True) as temporary:
        child = subprocess.Popen(
            command, cwd=folder, env=dict(os.environ) | {VARIABLE: value, "TMPDIR": temporary},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            told = _watch(child, members, limit_seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            return told
        finally:
            members.end()
            child.wait()


def _watch(child: subprocess.Popen[str], members: Members, limit_seconds: float) -> dict[str, Any]:
    lines: queue.Queue[str | None] = queue.Queue()
    assert child.stdout is not None
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    usage, spent = Usage(), 0.0
    others: list[str] = []
    until = time.monotonic() + limit_seconds
    look = 0
    pids: list[int] = []
    while True:
        told, ended = _next(lines, others)
        state = told.pop("state", "")
        if state == "measuring":
            spent = -_processor_seconds(members.look())
        elif state == "measured":
            pids = members.look()
            spent += _processor_seconds(pids)
            usage.look(pids, shares=True)
        elif state == "result":
            return told | {
                "peak_rss_mb": round(usage.rss / 1e6, 1),
                "peak_pss_mb": round(usage.pss / 1e6, 1),
                "processes": usage.processes,
                "processor_seconds": round(spent, 3),
            }
        elif ended:
            raise ContenderFailed(f"it ended with {child.wait()} before it told a result: {_last(others)}")
        elif time.monotonic() > until:
            raise ContenderFailed(f"no result after {limit_seconds:.0f} s: {_last(others)}")
        if look % SLOW_LOOKS == 0:
            pids = members.look()
        usage.look(pids, shares=look % SLOW_LOOKS == 0)
        look += 1


def _next(lines: queue.Queue[str | None], others: list[str]) -> tuple[dict[str, Any], bool]:
    """(what the contender tells, if it does by the next look, whether it has ended)."""
    try:
        line = lines.get(timeout=LOOK_SECONDS)
    except queue.Empty:
        return {}, False
    if line is None:
        return {}, True
    if line.startswith(MARK):
        told: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return told, False
    others.append(line.rstrip())
    return {}, False


def _read(source: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def _last(lines: Sequence[str]) -> str:
    return " | ".join([line.strip() for line in lines if line.strip()][-3:]) or "it said nothing"


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _processor_seconds(pids: Sequence[int]) -> float:
    return sum(sum(int(value) for value in _stat(pid)[11:13]) for pid in pids) / TICKS


def _parent(pid: int) -> int:
    return int((_stat(pid)[1:2] or ["0"])[0])


def _zombie(pid: int) -> bool:
    return _stat(pid)[:1] in ([], ["Z"])


def _stat(pid: int) -> list[str]:
    """From the process's state on: before it stands its name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
