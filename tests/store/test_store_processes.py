"""The database and other processes: kill -9, readers beside the writer, cancelled tasks, other schemas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_samples
from store_samples import TASK, trajectory
from store_servers import Stores

from dart.errors import UserError
from dart.store.database import Database, sqlite_url
from dart.store.tables import SCHEMA_VERSION

HANG_SECONDS = 600


async def opened(directory: Path, create: bool = True) -> Database:
    return await Database.open(sqlite_url(directory / "dart.db"), directory / "blobs", create=create)


@contextlib.contextmanager
def writing(stores: Stores) -> Iterator[subprocess.Popen[str]]:
    """Another process, which writes until it is killed, in the end at the latest."""
    command = [sys.executable, store_samples.__file__, *stores.arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            yield writer
        finally:
            writer.kill()


@pytest.mark.parametrize("confirmed_first", [1, 10, 77])
async def test_what_was_confirmed_outlives_kill_9(stores: Stores, confirmed_first: int) -> None:
    with writing(stores) as writer:
        assert writer.stdout
        confirmed = [writer.stdout.readline().strip() for _ in range(confirmed_first)]
        os.kill(writer.pid, signal.SIGKILL)
        confirmed += [line.strip() for line in writer.stdout if line.endswith("\n")]
    assert writer.returncode == -signal.SIGKILL
    async with await stores.open(create=False) as database:
        (group,) = await database.unfinished_groups()
        stored = {one.trajectory.id: (await database.with_images(one)).trajectory for one in group.trajectories}
        assert set(confirmed) <= set(stored)
        assert len(stored) <= len(confirmed) + 4  # at most one more per writing coroutine
        assert all(one == trajectory(name, "group-1") for name, one in stored.items())
        await database.add_trajectory(trajectory("after", "group-1"))
    if isinstance(stores.database, str):
        with sqlite3.connect(stores.database.removeprefix("sqlite:///")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_two_readers_beside_a_writer_in_another_process(stores: Stores) -> None:
    with writing(stores) as writer:
        assert writer.stdout
        writer.stdout.readline()

        async def read() -> list[int]:
            counts = list[int]()
            async with asyncio.timeout(HANG_SECONDS), await stores.open(create=False) as database:
                while len(counts) < 4 or counts[0] == counts[-1]:
                    (newest, *_) = await database.list_trajectories(limit=1)
                    seen = await database.trajectory(newest.id, with_images=True)
                    assert seen and seen.trajectory == trajectory(newest.id, "group-1")
                    (group,) = await database.unfinished_groups()
                    assert all(len(one.trajectory.steps) == 3 for one in group.trajectories)
                    counts.append(len(group.trajectories))
            return counts

        many = await asyncio.gather(read(), read())
        assert writer.poll() is None
    assert all(counts == sorted(counts) for counts in many)


async def test_a_cancelled_write_leaves_the_database_whole(stores: Stores) -> None:
    dice = random.Random(5)
    async with await stores.open() as database:
        await database.start_run("run-1", "demo", {}, started=1.0)
        await database.open_group("group-1", TASK, 8, 1.0)
        written = {f"first-{number}" for number in range(10)}
        began = time.monotonic()
        for name in sorted(written):
            await database.add_trajectory(trajectory(name, "group-1"))
        usual = (time.monotonic() - began) / len(written)
        for number in range(60):
            task = asyncio.ensure_future(database.add_trajectory(trajectory(f"t-{number}", "group-1")))
            await asyncio.wait([task], timeout=dice.random() * 2 * usual)
            task.cancel()
            try:
                await task
                written.add(f"t-{number}")
            except asyncio.CancelledError:
                pass
        assert len(written) < 70, "some were cancelled"
        await database.add_trajectory(trajectory("last", "group-1"))
        (group,) = await database.unfinished_groups()
        stored = {one.trajectory.id for one in group.trajectories}
        assert written | {"last"} <= stored
        assert all(len(one.trajectory.steps) == 3 for one in group.trajectories)


async def test_two_processes_that_make_the_same_database(stores: Stores) -> None:
    first, second = await asyncio.gather(stores.open(), stores.open())
    await first.start_run("run-1", "demo", {}, started=1.0)
    await second.bind_newest()
    assert second.run_id == "run-1"
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(99, "a newer dart wrote it; upgrade"), (1, "a dart that is too old to migrate from wrote it")],
)
async def test_another_schema_version_is_told(tmp_path: Path, version: int, remedy: str) -> None:
    await (await opened(tmp_path)).close()
    with sqlite3.connect(tmp_path / "dart.db") as connection:
        connection.execute("UPDATE dart_schema SET version = ?", (version,))
    told = rf"dart\.db has schema version {version}, this dart has {SCHEMA_VERSION}: {remedy}"
    with pytest.raises(UserError, match=told):
        await opened(tmp_path)


async def test_what_is_no_database_of_ours_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist: name the run directory"):
        await opened(tmp_path, create=False)
    assert not (tmp_path / "dart.db").exists()

    (tmp_path / "dart.db").write_text("this is a text file, not a database, and long enough to be read as one")
    with pytest.raises(UserError, match="cannot be opened"):
        await opened(tmp_path)

    (tmp_path / "dart.db").unlink()
    with sqlite3.connect(tmp_path / "dart.db") as connection:
        connection.execute("CREATE TABLE runs (id TEXT)")
    with pytest.raises(UserError, match="tables that are not dart's"):
        await opened(tmp_path)

    with pytest.raises(UserError, match="cannot be opened"):
        await opened(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("runs/dart.db", "is not a URL"),
        ("sqlite://", "in memory only"),
        ("oracle9://x/y", "install its driver"),
        ("postgresql+nodriver://user:secret@host/name", "install its driver"),
    ],
)
async def test_a_wrong_url_is_told(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        await Database.open(url, tmp_path / "blobs")
    assert "secret" not in str(caught.value)


async def test_a_database_without_a_run_says_so(stores: Stores) -> None:
    async with await stores.open() as database:
        with pytest.raises(UserError, match="holds no run"):
            await database.totals()
