"""A run of weeks: screenshots, events and files stay within their bounds, and nothing that is needed is removed."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import TASK, fates, image, trajectory

from dart.commands.plot import read_metrics
from dart.config import Retention
from dart.coordinator.fleet.environments import Underway
from dart.coordinator.service import housekeeping
from dart.coordinator.service.housekeeping import Housekeeping
from dart.coordinator.service.journal import Journal
from dart.core.types import Image, Task
from dart.errors import UserError
from dart.rundir import Guard, RunDirectory
from dart.screenshots.directory import ScreenshotDirectory, StoredFile, file_name
from dart.store import records as r
from dart.store.blobs import BlobMissing
from dart.store.database import Database
from dart.store.upkeep import Upkeep

OLD = 1_000_000.0
STEPS = 3
BYTES = 1000 * STEPS
"""Of a trajectory's screenshots."""


class Rig:
    """A run's directory with its housekeeping, which the tests drive by hand."""

    def __init__(self, run: RunDirectory, database: Database, guard: Guard) -> None:
        self.run, self.database, self.guard = run, database, guard
        self.journal, self.underway = Journal(run.metrics), Underway()
        assert database.blobs.directory is not None
        self.screenshots: ScreenshotDirectory = database.blobs.directory

    def keeping(self, pooled: int = 0, **retention: object) -> Housekeeping:
        settings = Retention().model_copy(update=retention)  # bounds smaller than a config may have
        return Housekeeping(
            settings, self.guard, self.database, self.journal, self.underway, pooled=pooled, checkpoints=2,
            bounded=True,
        )  # fmt: skip

    async def group(
        self, name: str, state: r.GroupState, *, update: int | None = None,
        kind: r.GroupKind = r.GroupKind.TRAINING, task: Task = TASK, last_image: Image | None = None,
    ) -> None:  # fmt: skip
        """A group of one trajectory, whose screenshots are long there."""
        await self.database.open_group(name, task, 1, 1.0, kind=kind)
        number = int(name.rpartition("-")[2])
        one = trajectory(name, name, task, finished=float(number), steps=STEPS)
        if last_image is not None:
            one = replace(one, last_image=last_image)
        await self.database.add_trajectory(one)
        if state is not r.GroupState.OPEN:
            closed = r.GroupState.RELEASED if state is r.GroupState.CONSUMED else state
            await self.database.close_group(name, closed, "why", "fate", {name: (1.0, 1.0, 1.0)}, 2.0)
        if update is not None:
            await self.database.consume_groups([name], update)
        for step in one.steps:
            self.age(step.images[-1].sha256)
        if last_image is not None:
            self.age(last_image.sha256)

    def age(self, digest: bytes) -> None:
        os.utime(self.screenshots.root / file_name(digest), (OLD, OLD))

    async def kept(self) -> set[str]:
        """Trajectories that have their screenshots, which are then all there; those of the others are all gone."""
        found = set()
        for summary in await self.database.list_trajectories():
            stored = await self.database.trajectory(summary.id)
            assert stored is not None
            if stored.screenshots_kept:
                await self.database.with_images(stored)
                found.add(summary.id)
            else:
                with pytest.raises(BlobMissing):
                    await self.database.with_images(stored)
        return found


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(housekeeping, "SHARD_PAUSE_SECONDS", 0.0)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with run.lock() as hold:
        async with await run.open_to_work(create=True) as database:
            await database.start_run("run", "run", {}, started=1.0)
            yield Rig(run, database, Guard(run, hold))


async def test_screenshots_of_attempts_that_failed_go_after_a_while(rig: Rig) -> None:
    await rig.group("g-1", r.GroupState.OPEN)
    failed, fresh = image("of an attempt that failed"), image("of one that runs")
    rig.database.blobs.put_many([failed, fresh])
    rig.age(failed.sha256)
    done = await rig.keeping().sweep(rig.screenshots)
    assert (done.removed, done.unused, done.freed, done.trajectories) == (1, 1, 1000, 0)
    assert done.bytes == BYTES + 1000
    assert not rig.database.blobs.has(failed.sha256)
    assert rig.database.blobs.has(fresh.sha256)
    assert await rig.kept() == {"g-1"}


async def test_a_last_image_stays_as_long_as_its_trajectory_has_screenshots(rig: Rig) -> None:
    last = [image("after the last action of 1"), image("of 2")]
    await rig.group("g-1", r.GroupState.DROPPED, last_image=last[0])
    await rig.group("g-2", r.GroupState.OPEN, last_image=last[1])
    every = [rig.screenshots.root / file_name(one.sha256) for one in last]
    await rig.keeping().sweep(rig.screenshots)
    assert [file.exists() for file in every] == [True, True]
    await rig.keeping(screenshot_bytes=1).sweep(rig.screenshots)
    assert [file.exists() for file in every] == [False, True]
    assert await rig.kept() == {"g-2"}


async def test_an_episode_keeps_what_it_has_seen_for_as_long_as_it_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = image("seen at its first step")
    with rig.underway.episode():
        rig.database.blobs.put(seen)
        later = time.time() + 7200
        keeping = rig.keeping()
        monkeypatch.setattr(time, "time", lambda: later)
        assert (await keeping.sweep(rig.screenshots)).removed == 0
    assert (await keeping.sweep(rig.screenshots)).removed == 1


async def test_the_bound_takes_the_oldest_that_nothing_needs(rig: Rig) -> None:
    for version in (2, 4):
        await rig.database.add_checkpoint(r.CheckpointRecord(f"checkpoints/v{version}", version, 1.0))
    await rig.group("dropped-1", r.GroupState.DROPPED)
    await rig.group("trained-2", r.GroupState.CONSUMED, update=1)
    await rig.group("trained-3", r.GroupState.CONSUMED, update=2)
    await rig.group("trained-4", r.GroupState.CONSUMED, update=3)
    await rig.group("waiting-5", r.GroupState.RELEASED)
    await rig.group("open-6", r.GroupState.OPEN)
    await rig.group("evaluated-7", r.GroupState.EVALUATED, kind=r.GroupKind.EVALUATION)
    await rig.group("dropped-8", r.GroupState.DROPPED)
    everything = await rig.kept()
    assert len(everything) == 8

    done = await rig.keeping(screenshot_bytes=8 * BYTES).sweep(rig.screenshots)
    assert (done.removed, done.trajectories) == (0, 0), "within the bound"

    monkeyed = housekeeping.TRAJECTORIES_AT_ONCE
    try:
        housekeeping.TRAJECTORIES_AT_ONCE = 1
        done = await rig.keeping(screenshot_bytes=7 * BYTES).sweep(rig.screenshots)
    finally:
        housekeeping.TRAJECTORIES_AT_ONCE = monkeyed
    assert done.trajectories == 2
    assert done.bytes <= 7 * BYTES * housekeeping.ROOM
    assert await rig.kept() == everything - {"dropped-1", "trained-2"}, "oldest first"

    done = await rig.keeping(screenshot_bytes=1).sweep(rig.screenshots)
    needed = {"trained-4", "waiting-5", "open-6", "evaluated-7"}
    assert await rig.kept() == needed, "v2 may be gone back to, from which update 3 is made again"
    assert done.bytes == len(needed) * BYTES
    await rig.keeping(screenshot_bytes=1, evaluation_screenshots=False).sweep(rig.screenshots)
    assert await rig.kept() == needed - {"evaluated-7"}
    assert len(await rig.database.list_trajectories()) == 8, "trajectories stay"


async def test_the_checkpoint_that_a_resumed_run_started_from_keeps_no_screenshots(rig: Rig) -> None:
    """It is kept to the end of the process, because replicas that restart load it."""
    for version in (2, 6, 8):
        await rig.database.add_checkpoint(r.CheckpointRecord(f"checkpoints/v{version}", version, 1.0))
    for update in (3, 6, 7):
        await rig.group(f"trained-{update}", r.GroupState.CONSUMED, update=update)
    await rig.keeping(screenshot_bytes=1).sweep(rig.screenshots)
    assert await rig.kept() == {"trained-7"}, "v6 may be gone back to, and has the updates up to 6"
    assert await rig.database.release_again(2) == 1, "going back further, what has lost its screenshots is dropped"
    assert (await fates(rig.database))[r.UNKEPT] == 2


async def test_the_pool_keeps_its_successes_and_never_offers_one_without_screenshots(rig: Rig) -> None:
    for number in range(1, 6):
        await rig.group(f"dropped-{number}", r.GroupState.DROPPED)
    await rig.group("other-6", r.GroupState.DROPPED, task=Task("miniwob", "enter-text", 1))
    await rig.keeping(pooled=2, screenshot_bytes=1).sweep(rig.screenshots)
    assert await rig.kept() == {"dropped-4", "dropped-5", "other-6"}
    assert {one.trajectory_id for one in await rig.database.newest_successes(8)} == await rig.kept()


async def test_a_screenshot_that_two_share_stays_until_both_are_forgotten(rig: Rig) -> None:
    await rig.group("dropped-1", r.GroupState.DROPPED)
    await rig.database.open_group("open-2", TASK, 1, 1.0)
    first = await rig.database.trajectory("dropped-1", with_images=True)
    assert first is not None
    await rig.database.add_trajectory(replace(first.trajectory, id="open-2", group_id="open-2"))
    for step in first.trajectory.steps:
        rig.age(step.images[-1].sha256)
    done = await rig.keeping(screenshot_bytes=1).sweep(rig.screenshots)
    assert (done.trajectories, done.removed) == (1, 0)
    stored = await rig.database.trajectory("open-2", with_images=True)
    assert stored is not None and stored.trajectory.steps[0].images[0].data


async def test_killed_between_rows_and_bytes_the_next_sweep_ends_it(rig: Rig) -> None:
    await rig.group("dropped-1", r.GroupState.DROPPED)
    forgotten = await Upkeep(rig.database).forget_oldest(housekeeping.Unneeded(time.time(), checkpoints=2), 8)
    assert (forgotten.trajectories, len(forgotten.digests)) == (1, STEPS)
    assert (await rig.keeping().sweep(rig.screenshots)).unused == STEPS
    assert await rig.kept() == set()


async def test_looking_for_screenshots_by_the_hundred_leaves_no_garbage_behind(rig: Rig) -> None:
    await rig.group("open-1", r.GroupState.OPEN)
    stored = await rig.database.trajectory("open-1")
    assert stored is not None
    kept = [step.images[-1].sha256 for step in stored.trajectory.steps]
    digests = sorted([*kept[1:], *(number.to_bytes(32, "big") for number in range(1, 300))])
    upkeep = Upkeep(rig.database)
    assert await upkeep.unreferenced([]) == []
    assert await upkeep.unreferenced(digests) == [digest for digest in digests if digest not in kept]
    gc.collect()
    for number in range(1, 60, 5):
        await upkeep.unreferenced(digests[number:])
    assert gc.collect() < 12 * 50, "the coordinator collects cycles seldom, so they must not grow with the digests"


async def test_a_group_without_its_screenshots_is_not_released_again(rig: Rig) -> None:
    await rig.database.add_checkpoint(r.CheckpointRecord("checkpoints/v2", 2, 1.0))
    await rig.group("trained-1", r.GroupState.CONSUMED, update=1)
    await rig.group("trained-2", r.GroupState.CONSUMED, update=3)
    await rig.keeping(screenshot_bytes=1).sweep(rig.screenshots)
    assert await rig.database.release_again(0) == 1
    assert [group.id for group in await rig.database.unfinished_groups()] == ["trained-2"]
    assert (await fates(rig.database))[r.UNKEPT] == 1


async def test_what_cannot_be_kept_within_the_bound_is_told_once(rig: Rig) -> None:
    await rig.group("open-1", r.GroupState.OPEN)
    keeping = rig.keeping(screenshot_bytes=1)
    for _ in range(2):
        keeping._tell(await keeping.sweep(rig.screenshots))
    assert [event.kind for event in rig.journal._events] == ["screenshots_over_bound"]


async def test_events_and_lines_stay_within_their_bounds(rig: Rig) -> None:
    keeping = rig.keeping(events=50, metrics_bytes=20_000)
    for number in range(3000):
        kind = "update" if number % 100 == 0 else "attempt_failed"
        rig.journal.event(kind, update=number, why="x" * 40)
        if number % 300 == 299:
            await rig.journal.flush(rig.database)
            await keeping.trim()
    await rig.journal.flush(rig.database)
    events = await rig.database.events_since(0)
    assert len(events) <= 50 + 30
    assert [event.sequence for event in events if event.kind == "update"] == list(range(1, 3001, 100))
    assert [event.sequence for event in events][-50:] == list(range(2951, 3001))
    files = sorted(rig.run.path.glob("metrics.jsonl*"))
    assert [file.name for file in files] == ["metrics.jsonl", "metrics.jsonl.1"]
    assert sum(file.stat().st_size for file in files) < 3 * 300 * 130 + 30 * 130
    updates, _ = read_metrics(rig.run)
    assert [update["update"] for update in updates] == list(range(0, 3000, 100))


async def test_a_file_system_that_fails_for_a_moment_puts_tidying_off(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SWEEP_SECONDS", 0.01)
    failing, files, fold = iter(["files", "files"]), ScreenshotDirectory.files, housekeeping.lines.fold
    folding = iter(["fold"])

    def stale(directory: ScreenshotDirectory, shard: int) -> list[StoredFile]:
        if next(failing, None):
            raise OSError(errno.ESTALE, "Stale file handle")
        return files(directory, shard)

    def full(path: Path, keep: Callable[[str], bool]) -> None:
        if next(folding, None):
            raise OSError(errno.ENOSPC, "No space left on device")
        fold(path, keep)

    monkeypatch.setattr(ScreenshotDirectory, "files", stale)
    monkeypatch.setattr(housekeeping.lines, "fold", full)
    failed = image("of an attempt that failed")
    rig.database.blobs.put(failed)
    rig.age(failed.sha256)
    keeping = asyncio.create_task(rig.keeping().run())
    told: list[str] = []
    async with asyncio.timeout(60):
        async for event in rig.journal.watch(0, rig.database):
            told.append(event.json if event.kind == "housekeeping_failed" else event.kind)
            if event.kind == "screenshots_removed":
                break
    assert sorted(told) == [
        "screenshots_removed",
        '{"work": "sweep", "why": "[Errno 116] Stale file handle"}',
        '{"work": "trim", "why": "the disk is full: make room there"}',
    ]
    assert not rig.database.blobs.has(failed.sha256) and not keeping.done()
    keeping.cancel()


async def test_what_is_pooled_is_looked_up_once_however_much_has_to_go(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query reads all successes: with weeks of them it takes seconds."""
    monkeypatch.setattr(housekeeping, "TRAJECTORIES_AT_ONCE", 1)
    look, asked = Database.newest_success_ids, []

    async def counted(database: Database, per_task: int) -> frozenset[str]:
        asked.append(per_task)
        return await look(database, per_task)

    monkeypatch.setattr(Database, "newest_success_ids", counted)
    for number in range(1, 5):
        await rig.group(f"dropped-{number}", r.GroupState.DROPPED)
    newest = {success.trajectory_id for success in await rig.database.newest_successes(1)}
    done = await rig.keeping(pooled=1, screenshot_bytes=1).sweep(rig.screenshots)
    assert (done.trajectories, asked) == (3, [1])
    assert await rig.kept() == newest == {"dropped-4"}


async def test_a_database_that_is_removed_ends_the_run_and_a_lock_that_is_removed_is_taken_again(rig: Rig) -> None:
    assert not rig.guard.look()
    rig.run.lock_file.unlink()
    assert rig.guard.look()
    assert rig.run.lock_file.exists()
    rig.run.database.rename(rig.run.path / "elsewhere.db")
    with pytest.raises(UserError, match=r"run\.db was removed or replaced during the run"):
        rig.guard.look()
    rig.run.database.write_bytes(b"")
    with pytest.raises(UserError, match="removed or replaced"):
        rig.guard.look()


async def test_the_loops_say_what_they_notice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "GUARD_SECONDS", 0.01)
    monkeypatch.setattr(housekeeping, "SWEEP_SECONDS", 0.01)
    failed = image("of an attempt that failed")
    rig.database.blobs.put(failed)
    rig.age(failed.sha256)
    keeping = asyncio.create_task(rig.keeping().run())
    rig.run.lock_file.unlink()
    told: dict[str, str] = {}
    async with asyncio.timeout(60):
        async for event in rig.journal.watch(0, rig.database):
            told[event.kind] = event.json
            if {"lock_renewed", "screenshots_removed"} <= told.keys():
                break
    assert rig.database.patience.told is not None
    rig.database.patience.told(40.0, False)
    rig.database.patience.told(50.0, False)
    rig.database.patience.told(75.0, True)
    assert rig.database.blobs.patience.told is not None
    rig.database.blobs.patience.told(0.0, False)
    rig.database.blobs.patience.told(20.0, False)
    rig.database.blobs.patience.told(20.5, True)
    rig.database.blobs.patience.told(20.6, True)  # of another thread
    rig.database.blobs.patience.told(7.0, False)
    async with asyncio.timeout(60):
        async for event in rig.journal.watch(0, rig.database):
            told.setdefault(event.kind, event.json)
            if "run.blobs has failed for 7 s" in event.json:
                break
    assert "another process has locked the database for 40 s" in told["database_locked"]
    assert told["database_unlocked"] == '{"seconds": 75.0}'
    assert "run.blobs has failed for 0 s" in told["screenshots_away"]
    assert told["screenshots_back"] == '{"seconds": 20.5}'
    rig.run.database.unlink()
    with pytest.raises(ExceptionGroup) as caught:
        await keeping
    assert caught.group_contains(UserError, match="removed or replaced")
