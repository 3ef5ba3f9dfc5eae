"""However a run ends, the database says how, and every worker is told goodbye."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from run_processes import killed_run
from run_processes.told import events

from dart.coordinator import run as run_module
from dart.coordinator.ending import Interrupted
from dart.coordinator.fleet.sessions import Worker
from dart.coordinator.run import Run
from dart.coordinator.service.watching import Stalled
from dart.coordinator.start import Start
from dart.core.curation.batches import ReleasedGroup
from dart.core.usage import TrainerState
from dart.errors import MAY_PASS, ProcessLost, UserError
from dart.job import Train
from dart.rundir import RunDirectory
from dart.store.engine import DatabaseFailed
from dart.store.records import RunState
from dart.v1 import session_pb2 as pb


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    monkeypatch.setattr(run_module, "GOODBYE_SECONDS", 0.01)
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    async with await directory.open_to_work(create=True) as database:
        await database.start_run("run", "run", {}, started=1.0)
        made = Run(killed_run.settings(1), directory, database, Train(), Start())
        yield made
        await made.server.stop()
        made.journal.close()


@pytest.fixture
def worker(run: Run) -> Worker:
    """One that is not ready yet."""
    hello = pb.Hello(worker_id="env-0", instance_id="env-0", role=pb.ROLE_ENV)
    return run.fleet.admit(hello)[0]


async def _ended(run: Run, worker: Worker | None = None) -> RunState:
    """The state in the database; the worker has been told goodbye."""
    if worker is not None:
        assert len(worker.outbox), "it has been told nothing"
        assert (await worker.outbox.get()).WhichOneof("body") == "bye"
    return RunState((await run.database.run()).state)


def _events(run: Run, kind: str) -> list[dict[str, Any]]:
    run.journal.flush_lines()
    return events(run.directory.metrics, kind)


async def _interrupted_in_training(run: Run) -> dict[str, Any]:
    run._phase("training")
    run.interrupt()
    return await asyncio.Future()


@pytest.mark.parametrize(
    "error", [DatabaseFailed("the database is locked"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]
)
async def test_an_interrupted_run_whose_last_checkpoint_fails(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails() -> None:
        raise error

    monkeypatch.setattr(run, "_phases", lambda: _interrupted_in_training(run))
    monkeypatch.setattr(run._training, "save", fails)
    with pytest.raises(Interrupted):
        await run.work()
    assert await _ended(run, worker) == RunState.INTERRUPTED
    assert [event["why"] for event in _events(run, "checkpoint_failed")] == [str(error)]


async def test_an_interrupted_run_whose_launcher_fails_while_it_saves(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = asyncio.Event()

    async def saves() -> None:
        saving.set()
        await asyncio.Event().wait()

    async def launch() -> None:
        await saving.wait()
        raise UserError("train was killed by SIGKILL")

    monkeypatch.setattr(run, "_phases", lambda: _interrupted_in_training(run))
    monkeypatch.setattr(run._training, "save", saves)
    with pytest.raises(UserError, match="SIGKILL"):
        await run._beside(launch())
    assert await _ended(run, worker) == RunState.INTERRUPTED


@pytest.mark.parametrize("how", ["hurry", "lost"])
async def test_a_last_checkpoint_is_not_waited_for_where_none_will_come(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The trainer is gone, or somebody presses Ctrl-C again: the hour that it may take is not over."""
    saving = asyncio.Event()
    lost = asyncio.get_running_loop().create_future()

    async def saves() -> None:
        saving.set()
        await lost

    async def reaps() -> None:
        await saving.wait()
        if how == "lost":
            lost.set_exception(UserError("the trainer is gone"))
        await asyncio.Event().wait()

    async def presses() -> None:
        await saving.wait()
        run.interrupt()  # a scheduler's signal
        await asyncio.sleep(0)
        assert not run.hurry.is_set()
        run.interrupt(by_hand=how == "hurry")

    monkeypatch.setattr(run, "_phases", lambda: _interrupted_in_training(run))
    monkeypatch.setattr(run._training, "save", saves)
    monkeypatch.setattr(run.fleet, "reap", reaps)
    async with asyncio.timeout(30):
        pressing = asyncio.create_task(presses())
        with pytest.raises(Interrupted):
            await run.work()
        await pressing
    assert await _ended(run, worker) == RunState.INTERRUPTED
    why = {"hurry": "Ctrl-C did not wait for it", "lost": "the trainer is gone"}[how]
    assert [event["why"] for event in _events(run, "checkpoint_failed")] == [why]


async def test_why_the_launcher_failed_is_recorded(run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def launch() -> None:
        raise UserError("train was killed by SIGKILL")

    monkeypatch.setattr(run, "_phases", asyncio.Event().wait)
    with pytest.raises(UserError, match="SIGKILL"):
        await run._beside(launch())
    assert await _ended(run, worker) == RunState.FAILED
    assert [event["why"] for event in _events(run, "failed")] == ["train was killed by SIGKILL"]


async def test_a_launcher_that_fails_is_why_although_the_trainer_leaves_first(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the other workers before it raises."""

    async def launch() -> None:
        run.launcher_failed(UserError("rollout-2 ended 4 times in a row"))
        run.ranks.lost.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(run, "_phases", asyncio.Event().wait)
    with pytest.raises(UserError, match="rollout-2 ended 4 times in a row"):
        await run._beside(launch())
    assert [event["why"] for event in _events(run, "failed")] == ["rollout-2 ended 4 times in a row"]


async def test_a_run_that_was_stopped_is_not_resumed_because_its_trainer_ended_too(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was stopped before that, or while its other processes were being ended."""

    async def launch() -> None:
        run.interrupt()
        run.launcher_failed(lost := ProcessLost("train was killed by SIGKILL"))
        raise lost

    monkeypatch.setattr(run, "_phases", asyncio.Event().wait)
    with pytest.raises(Interrupted):
        await run._beside(launch())


async def test_the_batch_that_a_lost_trainer_had_is_recorded(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the launcher notices it before the session does."""

    async def launch() -> None:
        raise ProcessLost("train was killed by SIGKILL")

    run._training._in_flight = [ReleasedGroup("g7", (), ())]
    monkeypatch.setattr(run, "_phases", asyncio.Event().wait)
    with pytest.raises(ProcessLost):
        await run._beside(launch())
    assert [(event["groups"], event["why"]) for event in _events(run, "trainer_lost")] == [
        (["g7"], "train was killed by SIGKILL")
    ]


async def test_a_trainer_is_not_idle_while_it_has_an_update_that_nobody_waits_for(run: Run) -> None:
    run.ranks._complete.set()
    with pytest.raises(asyncio.CancelledError), run.ranks._doing(TrainerState.TRAINING):
        raise asyncio.CancelledError
    assert not run.ranks.idle
    with pytest.raises(UserError), run.ranks._doing(TrainerState.SAVING):
        raise UserError("the disk is full")
    run.ranks._work.clear()
    run.ranks._account()
    assert run.ranks.idle


@pytest.mark.parametrize("idle", [True, False])
async def test_a_run_that_stalls_saves_its_weights_unless_it_is_the_trainer_that_hangs(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    saved = []

    async def stalls() -> dict[str, Any]:
        run._phase("training")
        raise Stalled("no progress for 700 s")

    async def saves() -> None:
        saved.append("v000003")

    monkeypatch.setattr(run, "_phases", stalls)
    monkeypatch.setattr(run._training, "save", saves)
    monkeypatch.setattr(type(run.ranks), "idle", idle)
    with pytest.raises(Stalled):
        await run.work()
    assert await _ended(run, worker) == RunState.FAILED
    assert saved == (["v000003"] if idle else [])


async def test_a_run_with_a_mistake_of_ours(run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> dict[str, Any]:
        return {}["nothing"]  # type: ignore[no-any-return]

    monkeypatch.setattr(run, "_phases", broken)
    with pytest.raises(ExceptionGroup):
        await run.work()
    assert await _ended(run, worker) == RunState.FAILED
    assert [event["why"] for event in _events(run, "failed")] == ["KeyError: 'nothing'"]


async def test_a_run_whose_end_cannot_be_recorded(run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def done() -> dict[str, Any]:
        return {}

    async def fails(*_: Any) -> None:
        raise DatabaseFailed("the database is locked")

    monkeypatch.setattr(run, "_phases", done)
    monkeypatch.setattr(run.database, "finish_run", fails)
    with pytest.raises(DatabaseFailed):
        await run.work()
    assert await _ended(run, worker) == RunState.FAILED
    assert not run.directory.summary.exists(), "nothing would continue a run that has one"


async def test_a_summary_that_does_not_fit_on_the_disk(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def done() -> dict[str, Any]:
        return {}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "_phases", done)
    monkeypatch.setattr(run_module, "write_json", full)
    with pytest.raises(UserError, match=r"the disk is full: make room there.*continue with --resume"):
        await run.work()
    assert await _ended(run, worker) == RunState.FAILED


async def test_a_run_without_memory_says_so_and_that_nothing_is_lost(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_memory() -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(run, "_phases", without_memory)
    with pytest.raises(UserError, match=r"too little memory: .*continue with --resume") as ended:
        await run.work()
    assert ended.value.exit_code == MAY_PASS
    assert await _ended(run, worker) == RunState.FAILED
    assert "too little memory" in _events(run, "failed")[0]["why"]


async def test_a_run_that_cannot_listen(run: Run) -> None:
    async def launch() -> None:
        raise AssertionError("there is nothing to connect to")

    launching = launch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run.server._settings = run.config.server.model_copy(update={"port": taken.getsockname()[1]})
        with pytest.raises(UserError, match=r"server\.port: cannot listen"):
            await run.execute(launching)
    assert inspect.getcoroutinestate(launching) == inspect.CORO_CLOSED, "else Python warns that nobody awaited it"
    assert await _ended(run) == RunState.FAILED


async def test_one_that_dials_in_after_the_end_is_told_goodbye_too(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream was down at that moment, or it has only just been started."""
    monkeypatch.setattr(run_module, "GOODBYE_SECONDS", 0.01)
    await run._goodbye()
    again = pb.Hello()
    again.CopyFrom(worker.hello)
    again.last_epoch = worker.epoch
    same, resumed = run.fleet.admit(again)
    assert resumed and same is worker
    late, _ = run.fleet.admit(pb.Hello(worker_id="late", instance_id="late", role=pb.ROLE_ENV, world_size=1))
    for one in (same, late):
        async with asyncio.timeout(5):
            assert (await one.outbox.get()).bye.reason


async def test_a_worker_that_has_left_before_it_was_ready_is_not_waited_for(
    run: Run, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "GOODBYE_SECONDS", 10 * killed_run.HANG_SECONDS)

    async def leaves() -> None:
        await worker.outbox.get()
        run.fleet.lose(worker, "goodbye")

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        tasks.create_task(leaves())
        await run._goodbye()
