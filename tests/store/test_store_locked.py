"""A database that another program has locked, a backup for example, is waited for; its write-ahead log stays small."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from store_samples import TASK, trajectory

from dart.store import engine
from dart.store.database import Database, sqlite_url
from dart.store.engine import DatabaseFailed


@pytest.fixture
async def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    monkeypatch.setattr(engine, "_SQLITE_SETTINGS", ("PRAGMA busy_timeout=20", *engine._SQLITE_SETTINGS[1:]))
    async with await Database.open(sqlite_url(tmp_path / "run.db"), tmp_path / "blobs") as opened:
        await opened.start_run("run", "run", {}, started=1.0)
        await opened.open_group("g", TASK, 8, 1.0)
        yield opened


@pytest.fixture
def backup(tmp_path: Path, database: Database) -> Iterator[sqlite3.Connection]:
    """Another program's connection, which holds the write lock."""
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


async def test_a_write_waits_until_the_lock_is_given_back(database: Database, backup: sqlite3.Connection) -> None:
    told: asyncio.Queue[tuple[float, bool]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    database.patience.told = lambda seconds, over: loop.call_soon_threadsafe(told.put_nowait, (seconds, over)) and None
    writing = asyncio.create_task(database.add_trajectory(trajectory("t", "g")))
    first, over = await told.get()
    assert first > 0 and not over
    assert (await told.get())[0] > first
    assert await database.group_count() == 1, "readers go on"
    assert not writing.done()
    backup.execute("ROLLBACK")
    await writing
    while not over:
        _, over = await told.get()
    (group,) = await database.unfinished_groups()
    assert [one.trajectory.id for one in group.trajectories] == ["t"], "once"


async def test_patience_ends(database: Database, backup: sqlite3.Connection) -> None:
    database.patience.seconds = 0.05
    with pytest.raises(DatabaseFailed, match=r"database is locked: fix that \(a program that has locked it\)"):
        await database.add_trajectory(trajectory("t", "g"))


async def test_the_log_is_cut_when_nobody_reads(database: Database, tmp_path: Path) -> None:
    log = tmp_path / "run.db-wal"
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM trajectories").fetchone() == (0,)
        for number in range(30):
            await database.add_trajectory(trajectory(f"t-{number}", "g"))
        assert not await database.fold_wal()
        assert log.stat().st_size > 0
        reader.execute("ROLLBACK")
    assert await database.fold_wal()
    assert log.stat().st_size == 0
    await database.add_trajectory(trajectory("after", "g"))
