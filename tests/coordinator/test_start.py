"""Where a resumed run goes on: at the newest checkpoint that is whole, with what later ones had trained released."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from store_samples import TASK, fates, trajectory

from dart import manifest
from dart.commands import running
from dart.commands.running import JobRun, run_in_loop
from dart.config import BUILTIN_MODELS, load
from dart.coordinator.run import Run
from dart.coordinator.service.journal import Journal
from dart.coordinator.start import go_back, starting_point
from dart.coordinator.summary import Summary
from dart.errors import ProcessLost, UserError
from dart.job import Collect, Job, Train
from dart.rundir import RunDirectory
from dart.store.database import Database
from dart.store.records import CheckpointRecord, GroupState

MINIWOB = Path(__file__).parents[2] / "configs" / "miniwob_cpu.yaml"
COLLECT = Collect("policy", (0, 8), per_task=1, most_attempts=1, samples=1, temperature=1.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.path.mkdir()
    return made


@pytest.fixture
async def database(run: RunDirectory) -> AsyncIterator[Database]:
    """Six updates, each of one group, with checkpoints after the second, the fourth and the sixth."""
    async with await run.open_to_work(create=True) as opened:
        await opened.start_run("run", "run", {}, started=1.0)
        for update in range(1, 7):
            group = f"g{update}"
            await opened.open_group(group, TASK, 2, float(update))
            names = [f"{group}-{number}" for number in range(2)]
            for name in names:
                await opened.add_trajectory(trajectory(name, group, finished=update + 0.5))
            advantages = dict(zip(names, ((1.0,) * 3, (-1.0,) * 3), strict=True))
            await opened.close_group(group, GroupState.RELEASED, "they differ", "pending", advantages, update + 0.6)
            await opened.consume_groups([group], update)
            await opened.add_version(update, update, {}, update + 0.7)
            if update % 2 == 0:
                folder = run.checkpoints / f"v{update:06d}"
                folder.mkdir(parents=True)
                (folder / "model.safetensors").write_bytes(b"weights" * update)
                manifest.seal(folder)
                # As the run was started: in another folder, from another working directory.
                await opened.add_checkpoint(CheckpointRecord(f"/old/place/{folder.name}", update, update + 0.8))
        yield opened


async def test_the_newest_that_is_whole(run: RunDirectory, database: Database) -> None:
    start = await starting_point(database, run)
    assert (start.checkpoint, start.version, start.update, start.broken) == (run.checkpoints / "v000006", 6, 6, ())
    assert await database.release_again(start.update) == 0


async def test_broken_ones_are_passed_over_and_named(run: RunDirectory, database: Database) -> None:
    (run.checkpoints / "v000006" / "model.safetensors").write_bytes(b"weights")
    (run.checkpoints / "v000004").rename(run.path / "gone")
    start = await starting_point(database, run)
    assert (start.checkpoint, start.version) == (run.checkpoints / "v000002", 2)
    assert [str(one) for one in start.broken] == [
        f"{run.checkpoints / 'v000006'}: model.safetensors has 7 bytes of 42",
        f"{run.checkpoints / 'v000004'}: the folder is not there",
    ]
    assert await database.release_again(start.update) == 4
    waiting = await database.unfinished_groups()
    assert [(group.id, group.state) for group in waiting] == [(f"g{n}", GroupState.RELEASED) for n in range(3, 7)]
    assert all(one.fate == "pending" and one.advantages for group in waiting for one in group.trajectories)
    assert await fates(database) == {"pending": 8, "trained": 4}
    await database.consume_groups(["g3"], 3)


async def test_none_that_is_whole_is_an_error_with_a_way_out(run: RunDirectory, database: Database) -> None:
    for update in (2, 4, 6):
        (run.checkpoints / f"v{update:06d}" / manifest.NAME).write_text("{")
    with pytest.raises(UserError, match=r"no intact checkpoint: .*v000006: its manifest.json is broken") as told:
        await starting_point(database, run)
    assert "--initial-weights" in str(told.value)
    start = await starting_point(database, run, initial_weights=True)
    assert (start.checkpoint, start.version, start.update) == (None, 0, 0)
    assert start.first_group == 7
    assert await database.release_again(start.update) == 6


async def test_one_that_was_moved_aside_when_the_trainer_was_killed_is_found(
    run: RunDirectory, database: Database
) -> None:
    newest = run.checkpoints / "v000006"
    newest.rename(manifest.aside(newest))
    assert (await starting_point(database, run)).checkpoint == newest


async def test_what_a_run_does_not_go_back_behind_is_not_forgotten(
    run: RunDirectory, database: Database, tmp_path: Path
) -> None:
    weights = run.checkpoints / "v000006" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"cannot be read for a moment")
    start = await starting_point(database, run)
    assert start.version == 4
    weights.write_bytes(whole)
    assert (await starting_point(database, run)).version == 6, "the trainer had not loaded the older one yet"
    assert await go_back(start, database, Journal(tmp_path / "metrics.jsonl")) == ({"v000006"}, 2)
    assert (await starting_point(database, run)).version == 4


async def _finish(run: RunDirectory) -> None:
    """As a process that is killed before it has written summary.json."""
    async with await run.open_to_work(create=True) as database:
        await database.start_run("run", "run", load(MINIWOB).as_json(), started=1.0)
        await database.finish_run({"updates": 7}, 2.0)


def test_a_finished_run_gets_its_summary_whoever_was_killed_before_it_was_written(run: RunDirectory) -> None:
    asyncio.run(_finish(run))
    config = load(MINIWOB, ("model.path=builtin:tiny-qwen3vl",))
    assert run_in_loop(JobRun(config, run, Train(), quiet=True, either=True)) == {"updates": 7}
    assert json.loads(run.summary.read_text()) == {"updates": 7}
    with pytest.raises(UserError, match="is finished: start a new one without --resume"):
        run_in_loop(JobRun(config, run, Train(), quiet=True, resume=True))


def test_a_run_that_cannot_be_set_up_has_failed_and_goes_on_with_its_own_vocabulary_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise UserError("no port is free")

    monkeypatch.setattr(running, "Run", fails)
    moved = shutil.copytree(BUILTIN_MODELS / "tiny-qwen3vl", tmp_path / "moved")
    directory = RunDirectory.at(tmp_path / "run")
    with pytest.raises(UserError, match="no port is free"):
        run_in_loop(JobRun(load(MINIWOB, ("model.path=builtin:tiny-qwen3vl",)), directory, Train(), quiet=True))
    with sqlite3.connect(directory.database) as database:
        assert database.execute("select state from runs").fetchall() == [("failed",)], "not running for ever"
    for model, why, reference_told in (
        ("builtin:ladder-qwen3vl", "whose vocabulary is not that of the run", False),
        ("builtin:tiny-qwen3vl", "no port is free", False),
        (moved, "no port is free", True),
    ):
        config = load(MINIWOB, (f"model.path={model}",))
        with pytest.raises(UserError, match=why):
            run_in_loop(JobRun(config, directory, Train(), quiet=True, resume=True))
        assert (f"the reference policy is now {model}" in capsys.readouterr().err) is reference_told


@pytest.mark.parametrize(
    ("job", "remedy"),
    [
        (Train(), r"continue with this command:\ndart train .* --resume "),
        (COLLECT, "what it collected can still be used"),
    ],
)
def test_what_to_do_with_a_run_that_has_lost_a_process_depends_on_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, remedy: str
) -> None:
    class Loses(Run):
        async def execute(self, launch: Coroutine[Any, Any, None] | None = None) -> Summary:
            assert launch is not None
            launch.close()
            raise ProcessLost("env-0 is gone", exit_code=75)

    monkeypatch.setattr(running, "Run", Loses)
    config = load(MINIWOB, ("model.path=builtin:tiny-qwen3vl",))
    with pytest.raises(ProcessLost, match=f"^env-0 is gone; all finished work is kept; {remedy}") as lost:
        run_in_loop(JobRun(config, RunDirectory.at(tmp_path / "run"), job, quiet=True))
    assert (lost.value.exit_code, lost.value.why) == (75, "env-0 is gone")
