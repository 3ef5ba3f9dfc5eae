"""A run whose database this dart cannot read in place: of an older schema, or in a folder that cannot be written to."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from dashboards.made import execute, opened

from dart.dashboard.library import Library
from dart.inspection import opening
from dart.rundir import RunDirectory

OLD = Path(__file__).parents[1] / "store" / "schema_0002.sql"


def of_an_older_dart(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    run.path.mkdir()
    with closing(sqlite3.connect(run.database)) as connection:
        connection.executescript(OLD.read_text(encoding="utf-8"))
    return run


async def test_a_run_of_an_older_schema_is_shown_from_a_copy(tmp_path: Path) -> None:
    old = of_an_older_dart(tmp_path / "old-run")
    before = old.database.read_bytes()
    async with opened(old) as it:
        overview = await it.overview()
        assert any("schema version 2" in note for note in overview.missing)
        assert (await it.trajectories()).rows
        assert await it.tasks()
    assert old.database.read_bytes() == before


async def test_a_run_in_a_folder_that_cannot_be_written_to_is_opened_anew_when_it_changes(tmp_path: Path) -> None:
    run = of_an_older_dart(tmp_path / "run")
    async with await run.open_to_work():
        pass
    index = run.database.with_name(f"{run.database.name}-shm")
    index.symlink_to(tmp_path / "none" / "index")  # SQLite cannot make the index of the write-ahead log
    async with await opening.RunFiles.open(run) as files:
        assert (await files.record()).name == "old" and not files.outdated()
        os.utime(run.database, (1, 1))  # as if written to by another process
        assert files.outdated()
    index.unlink()
    execute(run, ("update runs set name = 'changed'", ()))
    async with await opening.RunFiles.open(run) as files:
        assert (await files.record()).name == "changed" and not files.outdated()


async def test_the_list_reads_a_run_of_an_older_schema_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = of_an_older_dart(tmp_path / "old-run")
    copies: list[Path] = []
    copy = opening._copy
    monkeypatch.setattr(opening, "_copy", lambda source, target: (copies.append(source), copy(source, target)))
    monkeypatch.setattr("dart.dashboard.library.LISTED_SECONDS", -1.0)
    library = Library([tmp_path])
    async with library.run("old-run"):
        ((first,), (second,)) = await asyncio.gather(library.rows(), library.rows())
    assert (first.name, second) == ("old", first)
    assert len(copies) == 2, "one for the list and one for the run's own pages"
    execute(old, ("update runs set name = 'changed'", ()))
    (changed,) = await library.rows()
    assert (changed.name, len(copies)) == ("changed", 3)
    with old.lock():
        (held,) = await library.rows()
    (free,) = await library.rows()
    assert (changed.state, held.state, free.state) == ("interrupted", "running", "interrupted")
    await library.close()
