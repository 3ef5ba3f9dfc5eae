"""Screenshots that a power failure or a failing disk has damaged cost the groups that need them, and never the run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from run_processes import killed_run
from run_processes.told import events
from sqlalchemy import create_engine
from store_samples import image

from dart.rundir import RunDirectory
from dart.screenshots.directory import ScreenshotDirectory, file_name
from dart.store.blobs import BlobCorrupt, BlobMissing, BlobStore
from dart.store.database import sqlite_url

ONE = image("one")


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def changed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "lost+found").write_bytes(b"?")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


DAMAGES: list[Callable[[Path], None]] = [emptied, changed, folder, pipe, endless, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_screenshot_is_found_and_can_be_stored_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store, whole = BlobStore(tmp_path), image("whole")
    store.put_many([ONE, whole])
    damage(tmp_path / file_name(ONE.sha256))
    async with asyncio.timeout(60):  # hang guard
        with pytest.raises((BlobMissing, BlobCorrupt)):
            await store.get_async(ONE.sha256)
        assert await store.damaged([ONE.sha256, whole.sha256]) == {ONE.sha256}
        await store.put_async(ONE)
        assert await store.get_async(ONE.sha256) == ONE.data
    store.close()


@pytest.mark.parametrize("damage", [folder, pipe, endless])
def test_what_is_no_file_is_neither_held_nor_swept(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    directory, name = ScreenshotDirectory(tmp_path), file_name(ONE.sha256)
    directory.prepare()
    directory.write(name, ONE.data)
    damage(tmp_path / name)
    assert not directory.holds(name) and not directory.holds(name, (tmp_path / name).stat().st_size)
    assert directory.files(ONE.sha256[0]) == [] and directory.remove(ONE.sha256, 1e12) == 0
    directory.write(name, ONE.data)
    assert directory.read(name) == ONE.data


def test_a_run_whose_screenshots_are_damaged_drops_their_groups_and_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert killed_run.process(run, 8, "batch-trained:3").returncode == -signal.SIGKILL
    chance = random.Random(0)
    files = sorted(path for path in run.blobs.glob("??/*") if path.parent.name != "id")
    hit = chance.sample(files, len(files) // 2)
    for number, file in enumerate(hit):
        DAMAGES[number % len(DAMAGES)](file)
    went_on = killed_run.process(run, 6)
    assert went_on.returncode == 0, went_on.stdout[-2000:] + went_on.stderr[-2000:]
    (damaged,) = events(run.metrics, "screenshots_damaged")
    assert damaged["files"] and str(run.blobs) in str(damaged["why"])
    engine = create_engine(sqlite_url(run.database))
    with engine.connect() as connection:
        needed = "SELECT t.group_id, hex(s.sha256) FROM screenshots s JOIN trajectories t ON t.id = s.trajectory_id"
        affected = {group for group, digest in connection.exec_driver_sql(needed)
                    if digest.lower() in {file.name for file in hit}}  # fmt: skip
        states = dict(tuple(row) for row in connection.exec_driver_sql("SELECT id, state FROM groups"))
    engine.dispose()
    lines = killed_run.told(run)
    resumed = max(number for number, line in enumerate(lines) if "resumed" in line)
    trained = {name for line in lines[resumed:] if "trained" in line for name in line["groups"]}
    dropped = set(json.loads(json.dumps(damaged["groups"])))
    assert dropped <= affected and not trained & affected, "the trainer never sees them"
    assert {states[name] for name in dropped} == {"dropped"}
