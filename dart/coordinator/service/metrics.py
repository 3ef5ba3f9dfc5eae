"""The run's record of itself: numbers kept up to date, events in order, metrics.jsonl.

`Metrics` owns both. An event goes to metrics.jsonl at once, to the database in batches (`write_events`), and to
whoever watches; the last `KEPT_EVENTS` stay in memory, so that a watcher may resume from any of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from dart.core.curation.feed import ReleasedGroup, samples_of
from dart.core.types import Trajectory
from dart.store.database import Database
from dart.store.records import Event, Totals

KEPT_EVENTS = 10_000


def ends_within_a_line(path: Path) -> bool:
    """A full disk or a killed process may have left a part of one."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Metrics:
    def __init__(self, path: Path, window: int, first_sequence: int = 1) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        if ends_within_a_line(path):
            self._file.write("\n")
        self._next = first_sequence
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._unwritten: list[Event] = []
        self._news = asyncio.Event()
        self.phase = "starting"
        self.trajectories = 0
        self.env_steps = 0
        self.updates = 0
        self.version = 0
        self.weight_syncs = 0
        self.infrastructure_failures = 0
        self.unparsable = 0
        self.pooled = 0
        """Copies of pooled successes that stood in for failures: they are no roll-outs, but have fates."""
        self.fates: Counter[str] = Counter()
        """Trajectories by what became of them: "trained", or "dropped: " and the cause."""
        self.staleness_sum = 0
        self.staleness_count = 0
        self.staleness_max = 0
        self.trained_steps = 0
        self.trained_tokens = 0
        """Prompts and responses."""
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_by_task: dict[str, deque[bool]] = {}

    def counted(self, trajectory: Trajectory) -> None:
        """A finished training trajectory."""
        self.trajectories += 1
        self.env_steps += len(trajectory.steps)
        self.unparsable += trajectory.termination == "unparsable"
        self._recent.append(trajectory.success)
        self._recent_by_task.setdefault(trajectory.task.name, deque(maxlen=128)).append(trajectory.success)

    def consumed(self, batch: Sequence[ReleasedGroup], staleness: list[int]) -> None:
        """An update trained on the batch. `staleness`: of each of its trajectories, in versions."""
        samples = samples_of(batch)
        self.trained_steps += len(samples)
        self.trained_tokens += sum(sample.tokens for sample in samples)
        self.fates["trained"] += len(staleness)
        self.staleness_sum += sum(staleness)
        self.staleness_count += len(staleness)
        self.staleness_max = max(self.staleness_max, *staleness)

    @property
    def success_rate(self) -> float:
        """Of the last `window` training trajectories."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def window_full(self) -> bool:
        return len(self._recent) == self._recent.maxlen

    @property
    def success_by_task(self) -> dict[str, float]:
        return {name: sum(recent) / len(recent) for name, recent in sorted(self._recent_by_task.items())}

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.staleness_count if self.staleness_count else 0.0

    def totals(self) -> dict[str, Any]:
        """Everything that is counted over the whole run, as JSON; `restore` takes it back."""
        return {
            "update": self.updates,
            "updates": self.updates,
            "version": self.version,
            "trajectories": self.trajectories,
            "env_steps": self.env_steps,
            "weight_syncs": self.weight_syncs,
            "infrastructure_failures": self.infrastructure_failures,
            "unparsable": self.unparsable,
            "pooled": self.pooled,
            "trained_steps": self.trained_steps,
            "trained_tokens": self.trained_tokens,
            "fates": dict(self.fates),
            "staleness": {
                "mean": round(self.staleness_mean, 4),
                "max": self.staleness_max,
                "trajectories": self.staleness_count,
            },
        }

    def restore(self, stored: Totals, totals: dict[str, Any] | None) -> None:
        """Go on counting where an earlier process ended.

        `stored`: what the database counts, exactly; `totals`: the rest, as of the last update, or None before any.
        Updates and version come from the checkpoint.
        """
        totals = totals or self.totals()
        self.trajectories, self.env_steps = stored.trajectories, stored.env_steps
        self.unparsable, self.pooled, self.fates = stored.unparsable, stored.pooled, Counter(stored.fates)
        self.weight_syncs = totals["weight_syncs"]
        self.infrastructure_failures = totals["infrastructure_failures"]
        self.trained_steps = stored.trained_steps
        # What an update after the last checkpoint had trained is not trained any more; tokens are not stored by step.
        share = stored.trained_steps / totals["trained_steps"] if totals["trained_steps"] else 0.0
        self.trained_tokens = round(totals["trained_tokens"] * share)
        before = totals["staleness"]
        self.staleness_count, self.staleness_max = before["trajectories"], before["max"]
        self.staleness_sum = round(before["mean"] * before["trajectories"])

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event; `fields` must be JSON."""
        now = time.time()
        event = Event(self._next, now, kind, json.dumps(fields))
        self._next += 1
        self._file.write(json.dumps({"event": kind, "unix_seconds": round(now, 3), **fields}) + "\n")
        self._events.append(event)
        self._unwritten.append(event)
        self._news.set()
        self._news = asyncio.Event()

    async def watch(self, from_sequence: int) -> AsyncIterator[Event]:
        """Events from a sequence number on, then live ones. Those that are no longer kept are left out."""
        at = from_sequence
        while True:
            news = self._news
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
        self._file.flush()
        batch, self._unwritten = self._unwritten, []
        await database.append_events(batch)

    def close(self) -> None:
        self._file.close()
