"""The run's record of itself: every event in order, in metrics.jsonl, in the database and for watchers.

An event goes to metrics.jsonl at once, to the database in batches (`write_events`), and to all watchers. In memory are
those that the database, or the file, has not got yet, and the last `KEPT_EVENTS`; a watcher of older ones reads them in
the database. Every line and every row is valid JSON; numbers that are not finite become null.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from dart.core.json_text import to_json
from dart.store import lines
from dart.store.database import Database
from dart.store.patience import patiently
from dart.store.records import Event

KEPT_EVENTS = 2_000
PAGE_EVENTS = 1_000
"""Read from the database at once, for a watcher."""


def ends_within_a_line(path: Path) -> bool:
    """Whether the last line is cut off, as a full disk or a killed process may have left it."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Journal:
    """`first_sequence`: the number of the next event; earlier processes of the run used those before it."""

    def __init__(self, path: Path, first_sequence: int = 1) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._lines = bytearray(b"\n" if ends_within_a_line(path) else b"")
        """Those that are not in the file yet: a disk that is full for a while must cost none of them."""
        self._next = first_sequence
        self._events: deque[Event] = deque()
        self._unwritten: list[Event] = []
        self._news = asyncio.Event()
        self._flushing = asyncio.Lock()

    def event(self, kind: str, /, **fields: object) -> None:
        """Record an event. Raises TypeError for a field of a type that JSON lacks."""
        now = time.time()
        event = Event(self._next, now, kind, to_json(fields))
        self._next += 1
        self._lines += (to_json({"event": kind, "unix_seconds": round(now, 3), **fields}) + "\n").encode()
        self._events.append(event)
        self._unwritten.append(event)
        self._news.set()
        self._news = asyncio.Event()

    @property
    def bytes(self) -> int:
        """Length of metrics.jsonl."""
        return self._file.tell() + len(self._lines)

    def begin_anew(self) -> bool:
        """Set metrics.jsonl aside and begin a new one. Returns False if an earlier one is not folded yet. Raises
        OSError; the old file then stays in use."""
        self.flush_lines()
        if not lines.set_aside(self._path):
            return False
        try:
            new = self._path.open("ab", buffering=0)
        except OSError:
            lines.take_back(self._path)
            raise
        old, self._file = self._file, new
        old.close()
        return True

    def flush_lines(self) -> None:
        """Let readers of metrics.jsonl see the last lines now. Raises OSError, and writes the rest with the next."""
        while self._lines:
            del self._lines[: self._file.write(self._lines)]

    @property
    def _oldest(self) -> int:
        """Number of the oldest event in memory. The database has all before it."""
        return self._events[0].sequence if self._events else self._next

    async def watch(self, from_sequence: int, database: Database) -> AsyncIterator[Event]:
        """Events from a sequence number on, then live ones. Left out are those that `retention` has removed."""
        at = from_sequence
        while True:
            news = self._news
            while at < (oldest := self._oldest):
                page = await database.events_since(at, PAGE_EVENTS)
                at = page[-1].sequence + 1 if page else oldest
                for event in page:
                    yield event
            for event in [e for e in self._events if e.sequence >= at]:
                at = event.sequence + 1
                yield event
            if not news.is_set():
                await news.wait()

    async def write_events(self, database: Database) -> None:
        """Move events to the database as they come. Runs until cancelled; `flush` writes the rest."""
        while True:
            news = self._news
            await self.flush(database)
            if not news.is_set():
                await news.wait()

    async def flush(self, database: Database) -> None:
        """Raises UserError if the database takes nothing, and OSError where metrics.jsonl cannot be written; the next
        call writes these events too."""

        async def write_lines() -> None:
            self.flush_lines()

        await patiently(write_lines, database.patience)
        async with self._flushing:
            # They stay until they are confirmed: a transaction whose caller is cancelled may complete, or fail.
            batch = list(self._unwritten)
            await database.append_events(batch)
            if batch:
                self._unwritten = [event for event in self._unwritten if event.sequence > batch[-1].sequence]
            while len(self._events) > KEPT_EVENTS + len(self._unwritten):
                self._events.popleft()

    def close(self) -> None:
        """Raises OSError if the last lines cannot be written."""
        with contextlib.closing(self._file):
            if not self._file.closed:
                self.flush_lines()
