"""Runs a contender in processes of its own and measures their memory and processor time, from /proc.

Every process that a contender starts, directly or not, inherits one environment variable and is found by it, even after
it was re-parented; or by its parent, if it has overwritten its variables (as Ray's workers do, to show another name).
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
"""The seconds between two measurements of memory."""
SLOW_LOOKS = 10
"""New processes and shared memory are looked for only once in so many measurements, because that costs more."""
END_SECONDS = 15.0
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class ContenderFailed(Exception):
    """It reported no result; the message says why, as far as its own output does."""


@dataclass(slots=True)
class Members:
    """The processes of one contender."""

    mark: str
    _known: dict[int, bool] = field(default_factory=dict)

    def look(self) -> list[int]:
        """The processes that exist now."""
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - a Path for each costs more
        self._known = {pid: known for pid, known in self._known.items() if pid in there}
        for pid in sorted(there - self._known.keys()):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes()
                self._known[pid] = self.mark.encode() in variables or self._known.get(_parent(pid), False)
        return [pid for pid, mine in self._known.items() if mine]

    def end(self) -> None:
        """End the remaining processes: ask first, then kill."""
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            until = time.monotonic() + seconds
            while (left := [pid for pid in self.look() if not _zombie(pid)]) and time.monotonic() < until:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(0.2)


@dataclass(slots=True)
class Usage:
    """Peaks in bytes, summed over all processes. Shared pages count in each process for `rss`, and once for `pss`."""

    rss: int = 0
    pss: int = 0
    processes: int = 0

    def look(self, pids: Sequence[int], shares: bool) -> None:
        self.rss = max(self.rss, sum(_rss(pid) for pid in pids))
        self.processes = max(self.processes, len(pids))
        if shares:
            self.pss = max(self.pss, sum(_pss(pid) for pid in pids))


def run(command: Sequence[str], folder: Path, limit_seconds: float) -> dict[str, Any]:
    """The contender's final report, with its memory peaks since the start and its processor time while it measured.

    `folder`: its working directory. Its temporary files are deleted. Raises ContenderFailed; ends all of its processes
    in any case.
    """
    value = secrets.token_hex(8)
    members = Members(f"{VARIABLE}={value}")
    with tempfile.TemporaryDirectory(prefix="transport-", ignore_cleanup_errors=True) as temporary:
        child = subprocess.Popen(
            command, cwd=folder, env=dict(os.environ) | {VARIABLE: value, "TMPDIR": temporary},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            report = _watch(child, members, limit_seconds)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            return report
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
        report, ended = _next(lines, others)
        state = report.pop("state", "")
        if state == "measuring":
            spent = -_processor_seconds(members.look())
        elif state == "measured":
            pids = members.look()
            spent += _processor_seconds(pids)
            usage.look(pids, shares=True)
        elif state == "result":
            return report | {
                "peak_rss_mb": round(usage.rss / 1e6, 1),
                "peak_pss_mb": round(usage.pss / 1e6, 1),
                "processes": usage.processes,
                "processor_seconds": round(spent, 3),
            }
        elif ended:
            raise ContenderFailed(f"it ended with {child.wait()} before it reported a result: {_last(others)}")
        elif time.monotonic() > until:
            raise ContenderFailed(f"no result after {limit_seconds:.0f} s: {_last(others)}")
        if look % SLOW_LOOKS == 0:
            pids = members.look()
        usage.look(pids, shares=look % SLOW_LOOKS == 0)
        look += 1


def _next(lines: queue.Queue[str | None], others: list[str]) -> tuple[dict[str, Any], bool]:
    """(what the contender reports before the next measurement, if anything; whether it has ended)."""
    try:
        line = lines.get(timeout=LOOK_SECONDS)
    except queue.Empty:
        return {}, False
    if line is None:
        return {}, True
    if line.startswith(MARK):
        report: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return report, False
    others.append(line.rstrip())
    return {}, False


def _read(source: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def _last(lines: Sequence[str]) -> str:
    return " | ".join([line.strip() for line in lines if line.strip()][-3:]) or "it printed nothing"


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
    """The fields from the process's state on: the name before it may contain anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
