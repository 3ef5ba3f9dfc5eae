"""The journal: every line is valid JSON, whatever a worker reports; watchers and the database see each event once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import NoReturn

from dart.commands.plot import read_metrics
from dart.coordinator.service.journal import Journal
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url


def strict(text: str) -> dict[str, object]:
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    parsed: dict[str, object] = json.loads(text, parse_constant=refuse)
    return parsed


async def test_every_line_and_every_row_is_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    nan, infinite = float("nan"), float("inf")
    journal.event("update", update=1, trainer={"loss": nan, "gradient_norm": infinite, "seconds": 0.5})
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "test", {}, started=0.0)
        await journal.flush(database)
        (row,) = await database.newest_events("update")
    journal.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    told = {"loss": None, "gradient_norm": None, "seconds": 0.5}
    assert strict(line)["trainer"] == told == strict(row.json)["trainer"]


def test_a_line_that_was_cut_off_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Journal(path)
    first.event("update", update=1)
    first.close()
    path.write_text(path.read_text() + '{"event": "update", "upd')
    again = Journal(path)
    again.event("update", update=2)
    again.close()
    updates, _ = read_metrics(RunDirectory(tmp_path))
    assert [event["update"] for event in updates] == [1, 2]


async def test_a_watcher_sees_what_was_and_what_comes(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl", first_sequence=5)
    journal.event("phase", phase="training")
    seen: list[tuple[int, str]] = []

    async def watch() -> None:
        async for event in journal.watch(0):
            seen.append((event.sequence, event.kind))
            if len(seen) == 2:
                return

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        await asyncio.sleep(0)
        journal.event("update", update=1)
    journal.close()
    assert seen == [(5, "phase"), (6, "update")]
