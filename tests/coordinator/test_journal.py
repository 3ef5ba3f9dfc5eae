"""The journal: every line is valid JSON, whatever a worker reports; watchers and the database see each event once."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from dart.commands.plot import learning_curve, read_metrics
from dart.coordinator.service.journal import Journal
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store import lines
from dart.store.database import Database, sqlite_url
from dart.store.records import Event


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


def test_the_curve_is_that_of_the_policy_that_went_on(tmp_path: Path) -> None:
    """The run was killed after its fifth update, resumed after its second, and ended after its third."""
    journal = Journal(tmp_path / "metrics.jsonl")
    for number, seconds in ((1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0), (5, 50.0), (3, 60.0)):
        journal.event("update", update=number, train_seconds=seconds)
    journal.close()
    updates, _ = read_metrics(RunDirectory(tmp_path))
    assert [(one["update"], one["train_seconds"]) for one in updates] == [(1, 10.0), (2, 20.0), (3, 60.0)]


def test_a_file_that_cannot_be_begun_anew_leaves_one_to_write_the_end_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.event("update", update=1)

    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(OSError, match="No space left"):
            journal.begin_anew()
    journal.event("failed", why="the disk is full")
    assert journal.begin_anew(), "there is room again"
    journal.event("update", update=2)
    journal.close()
    lines.fold(tmp_path / "metrics.jsonl", lambda line: True)
    told = [json.loads(line)["event"] for line in lines.read_lines(tmp_path / "metrics.jsonl")]
    assert told == ["update", "failed", "update"]


def test_a_curve_is_drawn_whatever_tasks_are_called(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    numbers = {"train_seconds": 1.0, "success_rate": 0.5, "env_utilisation": 0.5, "rollout_utilisation": 0.5}
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.event("update", update=1, **numbers, success_by_task={"pay $5_ or $6": 0.5, r"$\nonsense$": 0.5})
    journal.close()
    picture = learning_curve(RunDirectory(tmp_path))
    assert picture is not None and picture.read_bytes().startswith(b"\x89PNG")


def test_a_curve_for_which_the_disk_has_no_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    numbers = {"train_seconds": 1.0, "success_rate": 0.5, "env_utilisation": 0.5, "rollout_utilisation": 0.5}
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.event("update", update=1, **numbers, success_by_task={})
    journal.close()

    def full(self: object, path: Path, **options: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", full)
    assert learning_curve(RunDirectory(tmp_path)) is None
    assert not (tmp_path / "learning_curve.png").exists()
    assert "learning_curve.png could not be written ([Errno 28] No space left on device)" in capsys.readouterr().err


async def test_events_that_the_database_did_not_take_are_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it took them, and only the answer was lost."""
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "test", {}, started=0.0)
        journal = Journal(tmp_path / "metrics.jsonl")
        for taken in (False, True):

            async def gives_up(events: Sequence[Event], *, taken: bool = taken) -> NoReturn:
                if taken:
                    await Database.append_events(database, events)
                raise UserError("the database is locked")

            journal.event("update", update=1)
            with monkeypatch.context() as patch, pytest.raises(UserError, match="locked"):
                patch.setattr(database, "append_events", gives_up)
                await journal.flush(database)
            journal.event("update", update=2)
            await journal.flush(database)
        journal.close()
        assert [event.sequence for event in await database.events_since(1, 100)] == [1, 2, 3, 4]


async def test_a_watcher_sees_what_was_and_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier process, no longer in memory, not in the database yet, and live."""
    monkeypatch.setattr("dart.coordinator.service.journal.KEPT_EVENTS", 3)
    monkeypatch.setattr("dart.coordinator.service.journal.PAGE_EVENTS", 2)
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as database:
        await database.start_run("run-1", "test", {}, started=0.0)
        earlier = Journal(tmp_path / "metrics.jsonl")
        for update in range(1, 6):
            earlier.event("update", update=update)
        await earlier.flush(database)
        earlier.close()
        journal = Journal(tmp_path / "metrics.jsonl", first_sequence=6)
        for update in range(6, 16):
            journal.event("update", update=update)
            if update == 11:
                await journal.flush(database)
        assert len(journal._events) == 3 + 4
        seen: list[tuple[int, int]] = []

        async def watch() -> None:
            async for event in journal.watch(2, database):
                seen.append((event.sequence, json.loads(event.json)["update"]))
                if event.sequence == 3:  # a watcher that is slower than the run
                    await journal.flush(database)
                if event.sequence == 15:
                    asyncio.get_running_loop().call_soon(lambda: journal.event("update", update=16))
                if event.sequence == 16:
                    return

        async with asyncio.timeout(60):
            await watch()
        journal.close()
    assert seen == [(number, number) for number in range(2, 17)]
