"""Watches a run's database from outside, to compare what it once held with what it holds at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LOOK_SECONDS = 2.0


@dataclass
class Witness:
    """Everything ever seen in `run.db`, and what is wrong with it.

    A trajectory that was stored must stay. A group that an update consumed may be consumed again only after a later
    resume from a checkpoint that is older than that update.
    """

    database: Path
    trajectories: set[str] = field(default_factory=set)
    consumed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Group → the update that consumed it, and how many resumes there had been when that was first seen."""
    resumed_from: list[int] = field(default_factory=list)
    """The version that each later start of the coordinator began with."""
    wrong: list[str] = field(default_factory=list)

    async def watch(self) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        if not self.database.exists():
            return
        with contextlib.suppress(sqlite3.OperationalError), self._open() as database:
            now = {row[0] for row in database.execute("SELECT id FROM trajectories")}
            consumed = dict(
                database.execute("SELECT id, consumed_by_update FROM groups WHERE consumed_by_update IS NOT NULL")
            )
            self.wrong += [f"trajectory {name} is gone" for name in sorted(self.trajectories - now)]
            self.trajectories |= now
            for group, update in consumed.items():
                before, resumes = self.consumed.get(group, (update, len(self.resumed_from)))
                if before != update:
                    if not any(version < before for version in self.resumed_from[resumes:]):
                        self.wrong.append(f"group {group} was consumed by update {before}, then by {update}")
                    resumes = len(self.resumed_from)
                self.consumed[group] = update, resumes

    def resumed(self) -> None:
        """Note that the coordinator starts again. What the last one did until its end came before that."""
        self.look()
        self.resumed_from.append(self.newest_checkpoint())

    def newest_checkpoint(self) -> int:
        """The version with which a resume would begin now."""
        if not self.database.exists():
            return 0
        with contextlib.suppress(sqlite3.OperationalError), self._open() as database:
            found = database.execute("SELECT max(version) FROM checkpoints WHERE kept").fetchone()[0]
            return int(found or 0)
        return 0

    def verdict(self) -> list[str]:
        """Check the whole database once more; returns everything that is wrong."""
        self.look()
        with self._open() as database:
            counts = Counter(dict(database.execute("SELECT group_id, count(*) FROM trajectories GROUP BY group_id")))
            planned = dict(database.execute("SELECT id, planned FROM groups"))
            pooled = Counter(
                dict(
                    database.execute(
                        "SELECT group_id, count(*) FROM trajectories WHERE pooled_from != '' GROUP BY group_id"
                    )
                )
            )
            for group, count in counts.items():
                if count - pooled[group] > planned[group]:
                    self.wrong.append(f"group {group} has {count} trajectories of {planned[group]} planned")
            orphans = database.execute(
                "SELECT count(*) FROM trajectories WHERE id NOT IN (SELECT trajectory_id FROM steps)"
            ).fetchone()[0]
            if orphans:
                self.wrong.append(f"{orphans} trajectories have no steps")
            self.wrong += [
                json.loads(row[0])["why"]
                for row in database.execute("SELECT json FROM events WHERE kind = 'sync_failed'")
                if "holds other weights" in row[0]
            ]
            if database.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                self.wrong.append("SQLite's integrity check failed")
        return self.wrong

    def success(self, parts: int = 3, first: int | None = None) -> list[tuple[int, float]]:
        """(trajectories, success rate) of each part of the run's training trajectories, or of the first of them, in
        order of time."""
        with self._open() as database:
            rows = database.execute(
                "SELECT t.success FROM trajectories t JOIN groups g ON g.id = t.group_id "
                "WHERE g.kind = 'training' AND t.pooled_from = '' ORDER BY t.finished"
            ).fetchall()[:first]
        size = max(1, len(rows) // parts)
        cut = [rows[start : start + size] for start in range(0, size * parts, size)]
        return [(len(part), sum(row[0] for row in part) / max(1, len(part))) for part in cut]

    def compared(self, since: float = 0.0) -> Counter[str]:
        """Replica → how often its weights were compared with the trainer's by checksum, and equal, since that Unix
        time."""
        with self._open() as database:
            rows = database.execute("SELECT json FROM events WHERE kind = 'sync' AND unix_seconds > ?", (since,))
            events = [json.loads(row[0]) for row in rows]
        return Counter(event["replica"] for event in events if event["checksum"] != "0")

    def updates(self) -> int:
        with contextlib.suppress(sqlite3.OperationalError), self._open() as database:
            return int(database.execute('SELECT coalesce(max("update"), 0) FROM versions').fetchone()[0])
        return 0

    def _open(self) -> contextlib.closing[sqlite3.Connection]:
        return contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10))
