"""A run that is interrupted in the middle of an update, which the trainer finishes before it saves its weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from run_processes import killed_run
from run_processes.told import events

from dart.coordinator.ending import Interrupted
from dart.coordinator.run import Run
from dart.coordinator.start import starting_point
from dart.coordinator.training import updates, uploads
from dart.coordinator.training.ranks import NotSaved
from dart.coordinator.training.updates import Training
from dart.rundir import RunDirectory
from dart.store.database import Database
from dart.store.elsewhere.copies import copy_out
from dart.store.records import CheckpointRecord, GroupState
from dart.v1 import session_pb2 as pb


class Slow(killed_run.Trainer):
    """Interrupts the run in its fourth update, once the checkpoint of the second is recorded."""

    interrupted = False

    def __init__(self, run: Run, version: int, ledger: killed_run.Ledger) -> None:
        self._run = run
        super().__init__(run, version, ledger)

    def answer(self, command: Any, seconds: float, **reply: Any) -> None:
        if (trained := reply.get("trained")) and trained.update == 4:
            self._interrupting = asyncio.create_task(self._interrupt())
        else:
            super().answer(command, seconds, **reply)

    async def _interrupt(self) -> None:
        while not await self._run.database.checkpoints():
            await asyncio.sleep(0.01)
        Slow.interrupted = True
        self._run.interrupt()


async def interrupted(folder: Path, update: int) -> tuple[RunDirectory, list[str]]:
    """A run that somebody interrupts, and the groups that this update of it trained on."""
    run = RunDirectory(folder / "run")
    run.path.mkdir()
    with pytest.raises(Interrupted):
        async with asyncio.timeout(killed_run.HANG_SECONDS):
            await killed_run.work(run, 8)
    told = killed_run.told(run)
    (batch,) = [line["groups"] for line in told if line.get("trained") == update]
    return run, batch


@pytest.mark.parametrize(("step", "version"), [("add_checkpoint", 2), ("drop_checkpoint", 4)])
async def test_a_batch_is_trained_on_once_wherever_the_last_checkpoint_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, version: int
) -> None:
    """`step`: what takes too long; afterwards the run goes on from this version."""
    config, write = killed_run.settings(8), getattr(Database, step)
    checkpoint = config.checkpoint.model_copy(update={"keep": 1, "interrupt_seconds": 60.0})
    monkeypatch.setattr(killed_run, "settings", lambda *_: config.model_copy(update={"checkpoint": checkpoint}))
    monkeypatch.setattr(killed_run, "Trainer", Slow)

    async def hangs(database: Database, *arguments: Any) -> None:
        if Slow.interrupted:
            raise TimeoutError  # as when `interrupt_seconds` are over
        await write(database, *arguments)

    monkeypatch.setattr(Slow, "interrupted", False)
    monkeypatch.setattr(Database, step, hangs)
    run, batch = await interrupted(tmp_path, 4)
    async with await run.open_to_work() as database:
        start = await starting_point(database, run)
        assert start.version == version
        await database.release_again(start.update)
        states = {(await database.group(group)).state for group in batch}  # type: ignore[union-attr]
    assert states == {GroupState.CONSUMED if version == 4 else GroupState.RELEASED}


async def test_a_checkpoint_that_is_being_written_when_the_run_is_interrupted_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the time for the last one, which would have the updates since then, too, is over at once."""
    config, asked = killed_run.settings(8), list[str]()
    checkpoint = config.checkpoint.model_copy(update={"interrupt_seconds": 0.5})
    monkeypatch.setattr(killed_run, "settings", lambda *_: config.model_copy(update={"checkpoint": checkpoint}))

    class Writes(killed_run.Trainer):
        """Has written its first checkpoint shortly after the run is interrupted, and never writes another."""

        def __init__(self, run: Run, version: int, ledger: killed_run.Ledger) -> None:
            self._run = run
            super().__init__(run, version, ledger)

        def save_checkpoint(self, command: pb.SaveCheckpoint) -> None:
            asked.append(command.path)
            if len(asked) == 1:
                self._run.interrupt()
                asyncio.get_running_loop().call_later(0.1, super().save_checkpoint, command)

    monkeypatch.setattr(killed_run, "Trainer", Writes)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(Interrupted):
        async with asyncio.timeout(killed_run.HANG_SECONDS):
            await killed_run.work(run, 8)
    async with await run.open_to_work() as database:
        assert [Path(one.path).name for one in await database.checkpoints()] == [Path(asked[0]).name]


async def test_the_last_checkpoint_is_tried_again_where_the_disk_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, tried = Training._save, list[int]()

    async def full(training: Training) -> tuple[str, int]:
        if training._progress.counts.updates < 4:
            return await save(training)
        tried.append(training._progress.counts.version)
        if len(tried) < 4:
            raise NotSaved("the disk is full")
        return await save(training)

    monkeypatch.setattr(Training, "_save", full)
    monkeypatch.setattr(updates, "LAST_SAVE_SECONDS", 0.0)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        assert (await killed_run.work(run, 4))["updates"] == 4
    assert len(tried) >= 4 and run.checkpoint("v000004").is_dir()


async def test_a_checkpoint_that_somebody_asks_for_is_copied_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, updated, asked = killed_run.settings(3), Training._updated, list[str]()
    checkpoint = config.checkpoint.model_copy(update={"every_updates": 1000, "upload": f"file://{tmp_path}/copies"})
    monkeypatch.setattr(killed_run, "settings", lambda *_: config.model_copy(update={"checkpoint": checkpoint}))

    async def asks(training: Training, *arguments: Any) -> None:
        await updated(training, *arguments)
        path, _ = await training.checkpoint()
        asked.append(Path(path).name)

    monkeypatch.setattr(Training, "_updated", asks)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        await killed_run.work(run, 3)
    assert asked[-1] == "v000003", "so that the end of the run saves, and copies, no other"
    assert list((tmp_path / "copies").rglob("v000003/manifest.json"))


async def test_a_run_that_was_paused_is_paused_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_up, found, pulled = Training._take_up, list[bool](), [True, False]

    async def pulls(training: Training) -> None:
        await take_up(training)
        found.append(training._progress.paused)
        training.pause(pulled.pop(0))

    monkeypatch.setattr(Training, "_take_up", pulls)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    monkeypatch.setattr(Run, "_watch_stop", stopped_when_paused)
    for _ in range(2):
        with contextlib.suppress(Interrupted):
            async with asyncio.timeout(killed_run.HANG_SECONDS):
                await killed_run.work(run, 2)
    assert found == [False, True]


async def stopped_when_paused(run: Run) -> None:
    while not run.progress.paused:
        await asyncio.sleep(0.01)
    raise Interrupted


@pytest.mark.parametrize("step", ["consume_groups", "add_version"])
async def test_an_update_that_is_being_recorded_is_recorded_before_its_weights_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The interruption comes while the database is slow."""
    write, runs = getattr(Database, step), []

    def trainer(run: Run, version: int, ledger: killed_run.Ledger) -> killed_run.Trainer:
        runs.append(run)
        return made(run, version, ledger)

    async def slow(database: Database, *arguments: Any) -> None:
        if 3 in arguments:
            runs[0].interrupt()
            await asyncio.sleep(0.5)
        await write(database, *arguments)

    made = killed_run.Trainer
    monkeypatch.setattr(killed_run, "Trainer", trainer)
    monkeypatch.setattr(Database, step, slow)
    run, batch = await interrupted(tmp_path, 3)
    async with await run.open_to_work() as database:
        start = await starting_point(database, run)
        assert (start.version, start.update) == (3, 3)
        assert {(await database.group(group)).state for group in batch} == {GroupState.CONSUMED}  # type: ignore[union-attr]
        assert json.loads((await database.newest_events("update"))[0].json)["update"] == 3


async def test_updates_that_were_not_saved_are_made_again_although_the_run_has_had_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would end at once, with the weights of an old checkpoint."""
    config, save = killed_run.settings(8), Training._save
    stop = config.stop.model_copy(update={"updates": None, "env_steps": 600})
    seldom = config.checkpoint.model_copy(update={"every_updates": 1000})
    monkeypatch.setattr(
        killed_run, "settings", lambda *_: config.model_copy(update={"stop": stop, "checkpoint": seldom})
    )

    async def full(training: Training) -> tuple[str, int]:
        raise NotSaved("the disk is full")

    monkeypatch.setattr(Training, "_save", full)
    monkeypatch.setattr(updates, "LAST_SAVE_SECONDS", 0.0)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        with pytest.raises(NotSaved):
            await killed_run.work(run, 8)
        told = killed_run.told(run)
        made = max(line.get("trained", 0) for line in told)
        assert made > 2
        monkeypatch.setattr(Training, "_save", save)
        await killed_run.work(run, 8)
    (last,) = run.checkpoints.iterdir()
    assert int(last.name.removeprefix("v")) >= made - 1, "but for a batch that is not complete any more"


async def test_a_checkpoint_that_is_not_seen_is_not_made_again_after_each_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try takes up space where the trainer is."""
    tried = list[int]()

    async def elsewhere(training: Training) -> tuple[str, int]:
        tried.append(training._progress.counts.updates)
        raise NotSaved("it is not there", may_pass=False)

    monkeypatch.setattr(Training, "_save", elsewhere)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        with pytest.raises(NotSaved):
            await killed_run.work(run, 6)
    assert len(tried) == 4 and tried[-1] == 6, "one for every two updates, and the last"
    assert len(events(run.metrics, "checkpoint_failed")) == 3


async def test_a_checkpoint_that_is_being_copied_is_removed_only_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the copy of one that takes longer than the next save would fail, and that of the next one too."""
    config, save = killed_run.settings(8), Training._save
    checkpoint = config.checkpoint.model_copy(update={"keep": 1, "upload": f"file://{tmp_path}/copies"})
    monkeypatch.setattr(killed_run, "settings", lambda *_: config.model_copy(update={"checkpoint": checkpoint}))
    saves, saved, there = 0, threading.Event(), list[bool]()

    async def counted(training: Training) -> tuple[str, int]:
        nonlocal saves
        made = await save(training)
        saves += 1
        if saves == 2:
            saved.set()
        return made

    def slow(folder: Path, url: str, stop: threading.Event) -> int:
        saved.wait(killed_run.HANG_SECONDS)
        there.append(folder.is_dir())
        return copy_out(folder, url, stop)

    monkeypatch.setattr(Training, "_save", counted)
    monkeypatch.setattr(uploads, "copy_out", slow)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        await killed_run.work(run, 8)
    assert saves > 1 and all(there), there
    assert len(list(run.checkpoints.iterdir())) == 1
    assert not events(run.metrics, "checkpoint_upload_failed")


@pytest.mark.parametrize("gone", [False, True])
async def test_a_lower_keep_makes_room_before_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gone: bool
) -> None:
    """A save that finds no room is refused, and would never get to remove the old ones. `gone`: a person has."""
    monkeypatch.setattr(Slow, "interrupted", False)
    trainer = killed_run.Trainer
    monkeypatch.setattr(killed_run, "Trainer", Slow)
    run, _ = await interrupted(tmp_path, 4)
    older, _ = sorted(run.checkpoints.iterdir())
    if gone:
        shutil.rmtree(older)
    config, there = killed_run.settings(8), list[list[str]]()
    lower = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"keep": 1})})
    monkeypatch.setattr(killed_run, "settings", lambda *_: lower)

    class Looks(trainer):  # type: ignore[misc, valid-type]
        def save_checkpoint(self, command: pb.SaveCheckpoint) -> None:
            there.append(sorted(folder.name for folder in run.checkpoints.iterdir()))
            super().save_checkpoint(command)

    monkeypatch.setattr(killed_run, "Trainer", Looks)
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        await killed_run.work(run, 8)
    assert there[0] == ["v000004"]


async def test_a_folder_that_nobody_recorded_goes_and_one_that_a_resumed_run_left_behind_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slow, "interrupted", False)
    trainer = killed_run.Trainer
    monkeypatch.setattr(killed_run, "Trainer", Slow)
    run, _ = await interrupted(tmp_path, 4)
    for name in ("v000001", "v000005"):
        run.checkpoint(name).mkdir()
    async with await run.open_to_work() as database:
        await database.add_checkpoint(CheckpointRecord("v000005", 5, 1.0))  # but it is damaged
    monkeypatch.setattr(killed_run, "Trainer", trainer)
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        await killed_run.work(run, 8)
    assert sorted(folder.name for folder in run.checkpoints.iterdir()) == [
        "v000004",  # which replicas load that restart
        "v000005",
        "v000006",
        "v000008",
    ]


async def test_a_copy_that_outlasts_training_is_no_time_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Utilisation and throughput end with the last update, while a checkpoint is still being copied."""
    save_and_copy = Training._save_and_copy

    async def slow(training: Training) -> None:
        await save_and_copy(training)
        while training.usage is None:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Training, "_save_and_copy", slow)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    async with asyncio.timeout(killed_run.HANG_SECONDS):
        assert (await killed_run.work(run, 4))["updates"] == 4
