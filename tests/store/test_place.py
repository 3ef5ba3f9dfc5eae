"""A run whose database is in PostgreSQL and whose screenshots are in an object store is found from its directory."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import MetaData, create_engine, select, text
from store_samples import TASK, fates, shape, trajectory

from benchmarks.stores.servers import PASSWORD, PostgreSQL, no_postgresql, postgresql
from dart import config
from dart.cli import main
from dart.config import Config, ConfigError
from dart.errors import UserError
from dart.inspection.opening import RunFiles
from dart.inspection.runs import overview
from dart.rundir import Guard, RunDirectory
from dart.store import tables
from dart.store.database import Database, sqlite_url
from dart.store.elsewhere.place import Place, check
from dart.store.elsewhere.text import escaped, unescaped
from dart.store.engine import DatabaseFailed
from dart.store.records import GroupState

OLD = Path(__file__).parent / "schema_0002.sql"


def settings(**run: object) -> Config:
    return config.parse(
        {
            "run": run,
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": ["click-color"]}},
            "stop": {"updates": 1},
        }
    )


def made(path: Path, chosen: Config) -> RunDirectory:
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.settle(chosen)
    return run


async def begun(run: RunDirectory) -> None:
    async with await run.open_to_work(create=True) as database:
        await database.start_run(run.name, "run", {}, started=1.0)
        await database.open_group("g000001", TASK, 1, 1.0)
        await database.add_trajectory(trajectory("g000001-1", "g000001"))


@pytest.mark.parametrize("text", ["[1]", '{"database": 5}', "{", '{"other": "x"}'])
def test_a_damaged_file_is_told(text: str, tmp_path: Path) -> None:
    file = RunDirectory(tmp_path).place_file
    file.write_text(text)
    with pytest.raises(UserError, match=r"place\.json is damaged \(.*\): restore it from a copy"):
        Place.read(file)
    assert Place.read(file / "in_a_file") == Place()


async def test_two_runs_of_one_name_in_one_database(tmp_path: Path, postgresql_server: PostgreSQL, s3_url: str) -> None:
    chosen = settings(database=postgresql_server.url, blobs=s3_url)
    runs = [made(tmp_path / parent / "runs" / "run", chosen) for parent in ("a", "b")]
    for run in runs:
        await begun(run)
        assert not run.database.exists() and not run.blobs.exists()
    assert runs[0].place.key != runs[1].place.key
    for run in runs:
        async with await RunDirectory.existing(run.path).open() as database:
            stored = await database.trajectory("g000001-1", with_images=True)
            assert stored and stored.trajectory == trajectory("g000001-1", "g000001")
            assert await fates(database) == {"pending": 1}
        files = await RunFiles.open(run)
        try:
            told = await overview(files)
            assert told.run.trajectories == 1
            assert not [note for note in told.missing if "not in" in note or "not there" in note]
            digest = trajectory("g000001-1", "g000001").steps[0].images[0].sha256
            assert files.holds(digest.hex()) and not files.holds("0" * 64)
        finally:
            await files.close()
        with run.lock() as hold:
            assert not Guard(run, hold).look()
    (found,) = RunDirectory.all_under(tmp_path / "a" / "runs")
    assert found.path == runs[0].path


def test_commands_find_it(tmp_path: Path, postgresql_server: PostgreSQL, s3_url: str) -> None:
    run = made(tmp_path / "runs" / "run", settings(database=postgresql_server.url, blobs=s3_url))
    asyncio.run(begun(run))
    for arguments in (["status", str(run.path)], ["why", str(run.path)], ["runs", str(run.path.parent)]):
        told = CliRunner().invoke(main, arguments)
        assert told.exit_code == 0, told.output
        assert "interrupted" in told.output


async def test_a_run_does_not_move(tmp_path: Path, postgresql_server: PostgreSQL) -> None:
    chosen = settings(database=postgresql_server.url)
    run = made(tmp_path / "run", chosen)
    await begun(run)
    before = run.place
    run.settle(chosen)
    assert run.place == before
    with pytest.raises(UserError, match=r"run\.database is none, and run .* has begun with postgresql://"):
        run.settle(settings())
    with pytest.raises(UserError, match=r"run\.blobs is s3://b/p, and run .* has begun with none"):
        run.settle(settings(database=postgresql_server.url, blobs="s3://b/p"))


def test_the_password_is_nowhere_but_in_the_environment(
    tmp_path: Path, postgresql_server: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgresql_server.url_by_network
    secret = url.replace("dart@", f"dart:{PASSWORD}@")
    for wrong in (secret, f"{url}?password={PASSWORD}"):
        with pytest.raises(ConfigError, match="has a password: leave it out") as refused:
            settings(database=wrong)
        assert PASSWORD not in str(refused.value)
    with pytest.raises(UserError, match=r"run\.database: .*cannot be used.*PGPASSWORD") as unreached:
        check(settings(database=url).run)
    assert PASSWORD not in str(unreached.value)

    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    check(settings(database=url).run)
    asyncio.run(begun(made(tmp_path / "by-variable", settings(database=url))))
    monkeypatch.delenv("PGPASSWORD")

    monkeypatch.setenv("RUNS_URL", secret)
    named = settings(database="env:RUNS_URL")
    check(named.run)
    run = made(tmp_path / "by-reference", named)
    asyncio.run(begun(run))
    assert json.loads(run.place_file.read_text())["database"] == "env:RUNS_URL"
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and PASSWORD in file.read_text("latin-1")]
    monkeypatch.delenv("RUNS_URL")
    with pytest.raises(UserError, match="RUNS_URL is not set: export it"):
        check(named.run)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("database", "sqlite:///run.db", "is no PostgreSQL URL"),
        ("database", "host/name", "is no PostgreSQL URL"),
        ("blobs", "bucket/prefix", "is no URL: write s3://bucket/prefix"),
    ],
)
def test_a_wrong_place_is_refused_with_the_config(field: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.{field}.*{said}"):
        settings(**{field: value})


def test_a_bucket_that_is_not_there_is_told_before_anything_starts(s3_url: str) -> None:
    with pytest.raises(UserError, match=r"run\.blobs: s3://no-such-bucket/x cannot be written to.*make the bucket"):
        check(settings(blobs="s3://no-such-bucket/x").run)


def test_a_server_that_is_not_there_is_told_before_anything_starts() -> None:
    if why := no_postgresql():
        pytest.skip(why)
    with pytest.raises(UserError, match=r"(?s)run\.database: postgresql.*cannot be used.*start the server"):
        check(settings(database="postgresql://dart@127.0.0.1:1/none").run)


async def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    if why := no_postgresql():
        pytest.skip(why)
    with postgresql("fsync=off") as server:
        run = made(tmp_path / "run", settings(database=server.url))
        await begun(run)
        async with await run.open_to_work() as database:
            database.patience.seconds = 240
            told: list[tuple[float, bool]] = []
            database.patience.told = lambda seconds, over: told.append((seconds, over))
            await database.set_control_address("here:1")
            await asyncio.to_thread(server.stop)
            writing = asyncio.create_task(database.add_trajectory(trajectory("g000001-2", "g000001")))
            while not told:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(server.start)
            await writing
            assert told[-1][1], "the wait is over"
            assert await fates(database) == {"pending": 2}
            database.patience.seconds = 0.0
            await asyncio.to_thread(server.stop)
            with pytest.raises(DatabaseFailed, match="a server that is away"):
                await database.set_control_address("here:2")
            await asyncio.to_thread(server.start)


async def test_every_migration_runs_on_postgresql(tmp_path: Path, postgresql_server: PostgreSQL) -> None:
    """The old run, as SQLite has it, copied as it is; other runs of the database keep their schema."""
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection:
        connection.executescript(OLD.read_text(encoding="utf-8"))
    old, new = (Place.of(name, postgresql_server.url, None).url() for name in ("old", "new"))
    assert old and new
    copied(sqlite_url(tmp_path / "old.db"), old.render_as_string(hide_password=False), ["dart_schema", "runs", "tasks",
           "groups", "trajectories", "steps", "versions", "syncs", "checkpoints", "events"])  # fmt: skip
    await (await Database.open(new, tmp_path / "blobs")).close()
    async with await Database.open(old, tmp_path / "blobs", migrate=True) as database:
        groups = {group.id: group for group in await database.unfinished_groups()}
        assert {name: group.state for name, group in groups.items()} == {
            "g000002": GroupState.RELEASED,
            "g000003": GroupState.OPEN,
        }
        assert [one.advantages for one in groups["g000002"].trajectories] == [(1.0, 1.0), (-1.0, -1.0)]
        version = await database.read(lambda connection: connection.execute(select(tables.schema.c.version)).scalar())
        assert version == tables.SCHEMA_VERSION
        await database.add_trajectory(trajectory("g000003-1", "g000003"))
    assert shape(old) == shape(new)


def copied(source: str, target: str, names: Sequence[str]) -> None:
    schema = target.rpartition("search_path%3D")[2].partition("&")[0]
    read, written, held = create_engine(source), create_engine(target), MetaData()
    held.reflect(read, only=names)
    for column in (column for table in held.tables.values() for column in table.columns):
        column.type = column.type.as_generic()
    with read.connect() as old, written.begin() as new:
        new.execute(text(f'CREATE SCHEMA "{schema}"'))
        held.create_all(new)
        for table in held.sorted_tables:
            if rows := [dict(row) for row in old.execute(select(table)).mappings()]:
                new.execute(table.insert(), rows)
    read.dispose()
    written.dispose()


@pytest.mark.parametrize("value", ["", "plain", "\0", "\x1b", "a\x1b0b\0c\x1b1", "\x1b\x1b\0\0"])
def test_texts_come_back_and_hold_no_nul(value: str) -> None:
    there = escaped(value)
    assert isinstance(there, str) and "\0" not in there
    assert unescaped(there) == value
