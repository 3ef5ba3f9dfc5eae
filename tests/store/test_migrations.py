"""A database of an older schema becomes one of this schema, in place, and what it holds is used as before."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from store_samples import TASK, shape, trajectory

from dart.cli import main
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store import tables
from dart.store.database import Database, sqlite_url
from dart.store.migrations import versions
from dart.store.records import GroupState
from dart.store.schema import OlderSchema

OLD = Path(__file__).parent / "schema_0002.sql"
"""A run that was interrupted, as the dart before migrations left it: one group consumed, one released, one open."""


def made(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.path.mkdir()
    with closing(sqlite3.connect(run.database)) as connection:
        connection.executescript(OLD.read_text(encoding="utf-8"))
    return run


@pytest.fixture
def old(tmp_path: Path) -> RunDirectory:
    return made(tmp_path / "old-run")


async def test_every_step_of_the_way_leads_to_the_schema_that_is_made_anew(old: RunDirectory, tmp_path: Path) -> None:
    await (await old.open_to_work()).close()
    await (await Database.open(sqlite_url(tmp_path / "new.db"), tmp_path / "blobs")).close()
    assert shape(sqlite_url(old.database)) == shape(sqlite_url(tmp_path / "new.db"))
    with closing(sqlite3.connect(old.database)) as connection:
        assert connection.execute("SELECT version FROM dart_schema").fetchall() == [(tables.SCHEMA_VERSION,)]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [
            (f"{tables.SCHEMA_VERSION:04d}",)
        ]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_several_runs_are_migrated_at_once(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"old-{number}") for number in range(6)]
    for database in await asyncio.gather(*(run.open_to_work() for run in runs)):
        await database.close()
    await (await Database.open(sqlite_url(tmp_path / "new.db"), tmp_path / "blobs")).close()
    for run in runs:
        assert shape(sqlite_url(run.database)) == shape(sqlite_url(tmp_path / "new.db"))


def test_there_is_a_step_for_every_version() -> None:
    steps = sorted(file.name[1:5] for file in Path(versions.__path__[0]).glob("v*.py"))
    assert steps == [f"{number:04d}" for number in range(tables.OLDEST_MIGRATED, tables.SCHEMA_VERSION + 1)]


async def test_an_old_run_goes_on(old: RunDirectory) -> None:
    async with await old.open_to_work() as database:
        groups = {group.id: group for group in await database.unfinished_groups()}
        assert {name: group.state for name, group in groups.items()} == {
            "g000002": GroupState.RELEASED,
            "g000003": GroupState.OPEN,
        }
        assert [one.advantages for one in groups["g000002"].trajectories] == [(1.0, 1.0), (-1.0, -1.0)]
        (stored,) = groups["g000003"].trajectories
        assert stored.advantages == ()
        assert stored.screenshots_kept
        as_written = trajectory("g000003-0", "g000003", TASK, 4.0, steps=2)
        assert [step.generation for step in stored.trajectory.steps] == [s.generation for s in as_written.steps]
        await database.add_trajectory(trajectory("g000003-1", "g000003"))
        assert await database.release_again(0) == 1
    with closing(sqlite3.connect(old.database)) as connection:
        counts = "SELECT trajectory_id, count(*) FROM screenshots GROUP BY trajectory_id ORDER BY trajectory_id"
        assert connection.execute(counts).fetchall() == [
            ("g000001-0", 2), ("g000001-1", 2), ("g000002-0", 2), ("g000002-1", 2), ("g000003-0", 2), ("g000003-1", 3),
        ]  # fmt: skip


async def test_a_step_that_fails_changes_nothing(old: RunDirectory) -> None:
    with closing(sqlite3.connect(old.database)) as connection:
        connection.execute("CREATE TABLE screenshots (in_the_way INTEGER)")
    before = shape(sqlite_url(old.database))
    with pytest.raises(UserError, match="screenshots already exists"):
        await old.open_to_work()
    assert shape(sqlite_url(old.database)) == before
    with closing(sqlite3.connect(old.database)) as connection:
        assert connection.execute("SELECT version FROM dart_schema").fetchall() == [(2,)]


def test_a_command_that_only_reads_migrates_a_run_that_nobody_works_on(old: RunDirectory) -> None:
    told = CliRunner().invoke(main, ["status", str(old.path)])
    assert told.exit_code == 0, told.output
    assert "old-run: interrupted" in told.output


async def test_a_command_that_only_reads_leaves_a_running_run_alone(old: RunDirectory) -> None:
    with old.lock(), pytest.raises(UserError, match=r"is in use by process .*: stop it first"):
        await old.open()
    with pytest.raises(OlderSchema, match="schema version 2: an older dart wrote it"):
        await Database.open(sqlite_url(old.database), old.blobs)
