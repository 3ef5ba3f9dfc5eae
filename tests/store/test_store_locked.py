"""A database that another program has locked, a backup for example, is waited for, and so is a PostgreSQL server that
is away, unless it was lost during a commit. SQLite's write-ahead log stays small."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.exc import OperationalError
from store_samples import TASK, trajectory

from dart.store import engine
from dart.store.database import Database, sqlite_url
from dart.store.engine import DatabaseFailed, Lane
from dart.store.patience import Patience


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


@pytest.mark.parametrize(("reached", "lost_in", "tries"), [(True, "work", 2), (True, "commit", 1), (False, "work", 1)])
async def test_a_transaction_is_repeated_unless_nobody_knows_whether_it_was_committed(
    monkeypatch: pytest.MonkeyPatch, reached: bool, lost_in: str, tries: int
) -> None:
    """The connection to a PostgreSQL server is lost, once. One that was never reached is not waited for either."""
    monkeypatch.setattr(engine, "_AWAY_SECONDS", 0.0)
    server = create_engine("sqlite://")
    server.dialect.name = "postgresql"
    lane, told = Lane(server, 1, "lane", Patience(60.0)), list[str]()

    def lose(where: str) -> None:
        told.append(where)
        if where == lost_in and told.count(where) == 1:
            raise OperationalError("", None, Exception("the server closed it"), connection_invalidated=True)

    if reached:
        await lane.run(lambda connection: None)
    event.listen(server, "commit", lambda connection: lose("commit"))
    if tries == 2:
        await lane.run(lambda connection: lose("work"))
    else:
        with pytest.raises(DatabaseFailed, match=r"the server closed it: .* a server that is away"):
            await lane.run(lambda connection: lose("work"))
    assert told.count("work") == tries
    lane.close()


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
