"""The journal of ordered machines: an append-only file that survives the worker, so that no machine is forgotten.

An order is written before it is sent, and the machine's id as soon as it is known. A worker that starts on the journal
of one that was killed therefore knows which machines are its own. A lock keeps a second worker off the same token.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

Event = Literal["ordered", "made", "failed", "deleted"]


class _Line(BaseModel):
    event: Event
    order: str = ""
    machine: str = ""
    at: float = 0.0


class JournalInUse(Exception):
    """Another worker holds this journal."""


class Journal:
    """Open it for as long as machines are ordered. Raises JournalInUse."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise JournalInUse(str(path)) from None
        self.machines: set[str] = set()
        """Machines that were made and have not been deleted."""
        self.orders: dict[str, float] = {}
        """Orders of which it is not known whether they made a machine, and when they were sent (Unix seconds)."""
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                self._apply(_Line.model_validate_json(line))
            except ValidationError:  # the line that was being written when the worker was killed
                continue

    def ordered(self, order: str) -> None:
        """Before the order is sent."""
        self._write(_Line(event="ordered", order=order))

    def made(self, order: str, machine: str) -> None:
        self._write(_Line(event="made", order=order, machine=machine))

    def failed(self, order: str) -> None:
        """The order made no machine, or none that is not listed as a stranger by now."""
        self._write(_Line(event="failed", order=order))

    def deleted(self, machine: str) -> None:
        """The server said that there is no such machine any more."""
        self._write(_Line(event="deleted", machine=machine))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: _Line) -> None:
        line.at = time.time()
        # A line break first: a line that was cut off by a kill must not swallow this one.
        os.write(self._file, b"\n" + line.model_dump_json(exclude_defaults=True).encode() + b"\n")
        os.fsync(self._file)
        self._apply(line)

    def _apply(self, line: _Line) -> None:
        if line.event == "ordered":
            self.orders[line.order] = line.at
            return
        self.orders.pop(line.order, None)
        if line.event == "made":
            self.machines.add(line.machine)
        else:
            self.machines.discard(line.machine)
