"""The watchdog on the real coordinator: a run that cannot go on says who keeps it, to people, programs and health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from fleet_samples import World, replica
from grpc_health.v1 import health_pb2, health_pb2_grpc
from run_processes.told import events

from dart import config, manifest
from dart.commands.control import control
from dart.commands.look.status import StatusOptions, find
from dart.commands.look.why import why
from dart.coordinator.ending import Interrupted
from dart.coordinator.fleet.sessions import Worker
from dart.coordinator.run import Run
from dart.coordinator.service.watching import Stalled
from dart.coordinator.start import Start
from dart.core.curation.submitted import NotWanted
from dart.core.learning import diagnosis
from dart.core.status import Stall
from dart.core.types import Task
from dart.core.watchdog import Pulse
from dart.errors import UserError
from dart.inspection.condition import how_it_ended
from dart.job import Train
from dart.rundir import RunDirectory
from dart.v1 import session_pb2 as pb

BOUND = 0.4
Answer = Callable[[object], object]


def settings(replicas: int = 1, **watchdog: float) -> config.Config:
    """Every bound is `BOUND`, and a worker is never lost for its silence."""
    bounds = {f"{name}_seconds": BOUND for name in ("start", "sampling", "update", "weights")}
    return config.parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": ["click-test"]}},
            "rollout": {"replicas": replicas},
            "curation": {"rollouts": 2, "dynamic_rollouts": {"enabled": False}, "pool": {"enabled": False}},
            "trainer": {"trajectories_per_update": 2},
            "evaluation": {"episodes": 0},
            "stop": {"updates": 100},
            "server": {"lost_after_seconds": 1e9},
            "watchdog": bounds | watchdog,
        }
    )


class Scene:
    """A run, and workers that answer with what a function returns; None: no answer, behind a session that lives on."""

    def __init__(self, run: Run, tasks: asyncio.TaskGroup) -> None:
        self.run, self._tasks = run, tasks
        self.serving: list[asyncio.Task[None]] = []
        self.address = ""

    def join(self, name: str, role: pb.Role, answer: Answer) -> Worker:
        hello = pb.Hello(worker_id=name, instance_id=name, role=role, world_size=1)
        worker, _ = self.run.fleet.admit(hello)
        self.run.fleet.became_ready(worker, pb.Ready(slots=4, image_cache_entries=8))
        self.serving.append(self._tasks.create_task(self._serve(worker, answer)))
        return worker

    async def _serve(self, worker: Worker, answer: Answer) -> None:
        while True:
            message = await worker.outbox.get()
            kind = message.WhichOneof("body") or ""
            if kind == "bye":
                worker.said_goodbye = True
                self.run.fleet.lose(worker, "goodbye")
                return
            command = getattr(message, kind)
            reply = pb.Released() if kind == "release" else answer(command)
            if isinstance(reply, (pb.Observed, pb.Generated, pb.Trained, pb.Released, pb.Failure)):
                reply.assignment.CopyFrom(command.assignment)
                message_back = pb.SessionRequest(**{type(reply).__name__.lower(): reply})  # type: ignore[arg-type]
                self.run.fleet.receive(worker, message_back)

    async def stall(self, kind: str) -> Stall:
        async with asyncio.timeout(60):
            while True:
                if found := [stall for stall in self.run.status().stalls if stall.kind == kind]:
                    return found[0]
                await asyncio.sleep(0.05)

    async def health(self, wanted: str) -> None:
        """Waits until the health service says so."""
        async with asyncio.timeout(60), grpc.aio.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service="dart.v1.ControlService"))
                if health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == wanted:
                    return
                await asyncio.sleep(0.05)

    async def why(self, capsys: pytest.CaptureFixture[str]) -> str:
        """What `dart why` prints of the live run."""
        await asyncio.to_thread(why, StatusOptions(address=self.address))
        return capsys.readouterr().out


@asynccontextmanager
async def running(directory: Path, made: config.Config) -> AsyncIterator[Scene]:
    """The run's server and phases; in the end it is interrupted, if it has not ended itself."""
    folder = RunDirectory(directory)
    async with await folder.open_to_work(create=True) as database:
        await database.start_run(directory.name, "test", {}, started=1.0)
        run = Run(made, folder, database, Train(), Start())
        async with asyncio.TaskGroup() as tasks:
            scene = Scene(run, tasks)
            life = tasks.create_task(_life(run))
            scene.address = await run.address
            try:
                yield scene
            finally:
                run.interrupt()
                await life
                for task in scene.serving:
                    task.cancel()


async def _life(run: Run) -> None:
    with contextlib.suppress(Interrupted):
        await run.execute()


def mixed() -> Answer:
    """Replies of a policy whose clicks hit every other time, so that groups can be trained on."""
    turns = iter(range(10**9))

    def answer(command: object) -> object:
        reply = replica(command)
        if isinstance(reply, pb.Generated) and next(turns) % 2:
            reply.text = "Action: click(start_box='(150,020)')"
        return reply

    return answer


def ended(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `dart why` prints of the run that is over."""
    why(StatusOptions(run=directory))
    return capsys.readouterr().out


async def test_a_hung_trainer_behind_a_session_that_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[pb.TrainBatch] = []

    def hangs(command: object) -> None:
        if isinstance(command, pb.TrainBatch):
            asked.append(command)

    async with running(tmp_path, settings()) as scene:
        scene.join("env-0", pb.ROLE_ENV, World())
        scene.join("rollout-0", pb.ROLE_ROLLOUT, mixed())
        trainer = scene.join("train-0", pb.ROLE_TRAIN, hangs)
        stall = await scene.stall("trainer")
        assert (stall.waits, stall.culprit) == ("update 1", "train-0 (rank 0)")
        assert stall.waits_for.startswith("train-0 (rank 0), which has not answered train_batch for ")
        await scene.health("NOT_SERVING")
        said = await scene.why(capsys)
        assert "update 1 waits for train-0 (rank 0), which has not answered train_batch for" in said
        # It wakes up after all: the run goes on, and says so.
        trained = pb.Trained(assignment=asked[-1].assignment, update=1, weight_version=1, seconds=1.0)
        scene.run.fleet.receive(trainer, pb.SessionRequest(trained=trained))
        async with asyncio.timeout(60):
            async for event in scene.run.journal.watch(0, scene.run.database):
                if event.kind == "moving" and json.loads(event.json)["kind"] == "trainer":
                    break
        assert scene.run.progress.counts.updates == 1
    told = events(tmp_path / "metrics.jsonl", "stalled")
    assert next(e["culprit"] for e in told if e["kind"] == "trainer") == "train-0 (rank 0)"


async def test_weights_that_are_not_published_yet_are_not_missed(tmp_path: Path) -> None:
    made = settings()
    made = made.model_copy(update={"sync": made.sync.model_copy(update={"every_updates": 3})})
    async with running(tmp_path, made) as scene:
        seen = []
        for version in (1, 2, 3, 4):
            scene.run.replicas.staged(version, 0.0)
            seen.append(scene.run._watch._pulse(0.0).version)
        assert seen == [0, 0, 3, 3]


async def test_a_worker_that_never_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(tmp_path, settings(replicas=2)) as scene:
        scene.join("env-0", pb.ROLE_ENV, World())
        scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
        scene.join("train-0", pb.ROLE_TRAIN, lambda command: None)
        stall = await scene.stall("start")
        assert (stall.culprit, stall.waits_for) == ("rollout", "1 of 2 rollout workers (not dialled in)")
        await scene.health("NOT_SERVING")
        said = await scene.why(capsys)
        assert "the start of the run waits for 1 of 2 rollout workers" in said
        assert f"dart worker --role rollout --coordinator {scene.address}" in said
        # It comes: the run begins.
        scene.join("rollout-1", pb.ROLE_ROLLOUT, replica)
        await scene.health("SERVING")
        assert not [stall for stall in scene.run.status().stalls if stall.kind == "start"]


async def test_a_run_begins_without_a_replica_that_does_not_come_in_time(tmp_path: Path) -> None:
    made = settings(replicas=2)
    made = made.model_copy(update={"rollout": made.rollout.model_copy(update={"wait_for_all_seconds": 0.2})})
    async with running(tmp_path, made) as scene:
        scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
        await asyncio.sleep(0.3)
        assert scene.run.progress.phase == "starting", "there is no environment yet"
        scene.join("env-0", pb.ROLE_ENV, World())
        scene.join("train-0", pb.ROLE_TRAIN, lambda command: None)
        async with asyncio.timeout(60):
            while not scene.run._training.taken_up:
                await asyncio.sleep(0.02)
        scene.join("rollout-1", pb.ROLE_ROLLOUT, replica)
        assert len(scene.run.replicas) == 2
    (told,) = events(tmp_path / "metrics.jsonl", "replicas_missing")
    assert (told["ready"], told["wanted"]) == (1, 2) and "rollout.wait_for_all_seconds" in str(told["reason"])


async def test_a_missing_replica_is_not_explained_by_env_workers_that_are_gone(tmp_path: Path) -> None:
    async with running(tmp_path, settings(replicas=2)) as scene:
        for number in range(3):
            scene.run.fleet.lose(scene.join(f"env-{number}", pb.ROLE_ENV, World()), "preempted")
        gone = scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
        scene.join("env-3", pb.ROLE_ENV, World())
        scene.join("train-0", pb.ROLE_TRAIN, lambda command: None)
        scene.run.fleet.lose(gone, "silent for 15 s")
        stall = await scene.stall("start")
        assert (stall.culprit, stall.failure) == ("rollout", "rollout-0 is lost: silent for 15 s")


async def test_groups_that_are_all_dropped_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(diagnosis, "LEAST_CHANCE", 0.25)  # 75 groups of two are enough
    async with running(tmp_path, settings()) as scene:
        scene.join("env-0", pb.ROLE_ENV, World())
        scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
        scene.join("train-0", pb.ROLE_TRAIN, replica)
        assert (await scene.stall("learning")).deliberate, "a policy of 99 % may begin so"
        await scene.health("SERVING")
        await scene.health("NOT_SERVING")
        (stall,) = scene.run.status().stalls
        assert (stall.kind, stall.culprit, stall.deliberate) == ("learning", "all succeed", False)
        said = await scene.why(capsys)
        assert "nothing is learnt: every roll-out" in said and "stalled" not in said
    told = [(one["kind"], one["deliberate"]) for one in events(tmp_path / "metrics.jsonl", "stalled")]
    assert told == [("learning", True), ("learning", False)]


async def test_a_trainer_that_is_still_preparing_is_not_counted_as_ready(tmp_path: Path) -> None:
    async with running(tmp_path, settings()) as scene:
        scene.run.fleet.admit(pb.Hello(worker_id="t", instance_id="t", role=pb.ROLE_TRAIN, world_size=1))
        assert scene.run.status().activity.endswith("0 of 1 trainer ranks are ready")
        scene.join("t", pb.ROLE_TRAIN, replica)
        assert scene.run.status().activity.endswith("1 of 1 trainer ranks are ready")


async def test_a_world_whose_every_reset_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(command: object) -> object:
        return pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="the desktop image /srv/vm.qcow2 is not there")

    async with running(tmp_path, settings()) as scene:
        scene.join("env-0", pb.ROLE_ENV, broken)
        scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
        scene.join("train-0", pb.ROLE_TRAIN, lambda command: None)
        stall = await scene.stall("step")
        assert stall.culprit == "env-0" and stall.failure == "env-0: the desktop image /srv/vm.qcow2 is not there"
        await scene.health("NOT_SERVING")
        assert "its last failure: env-0: the desktop image /srv/vm.qcow2 is not there" in await scene.why(capsys)
        (row,) = [worker for worker in scene.run.status().workers if worker.role == "env"]
        assert row.doing.endswith("the last attempt failed with: env-0: the desktop image /srv/vm.qcow2 is not there")
    said = await asyncio.to_thread(ended, tmp_path, capsys)
    assert "interrupted while it was training" in said and "it was stopped by Ctrl-C" in said
    assert "stalled" in said and "the desktop image /srv/vm.qcow2 is not there" in said


async def test_a_run_is_controlled_from_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory(tmp_path).lock():
        async with running(tmp_path, settings()) as scene:
            scene.join("env-0", pb.ROLE_ENV, World())
            scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
            with pytest.raises(UserError, match="pause failed: the run is starting: pause works only while"):
                await asyncio.to_thread(control, "pause", None, scene.address, None)
            scene.join("train-0", pb.ROLE_TRAIN, lambda command: None)
            async with asyncio.timeout(60):
                while not scene.run._training.taken_up:
                    await asyncio.sleep(0.02)
            with pytest.raises(UserError, match="may be two runs: leave one of them out"):
                await asyncio.to_thread(control, "pause", tmp_path, scene.address, None)
            with pytest.raises(UserError, match="may be two runs: leave one of them out"):
                await find(StatusOptions(tmp_path, scene.address), how_it_ended)
            await asyncio.to_thread(control, "pause", tmp_path, None, None)
            assert scene.run.status().paused, "at once, before the watchdog reports it"
            task, held_out = (Task("miniwob", "click-test", seed) for seed in (3, 1_000_003))
            with pytest.raises(NotWanted, match="is held out"):
                await scene.run.submit([task, held_out])
            assert scene.run.data.submitted_tasks == 0, "all of them or none"
            await scene.run.submit([task])
            assert scene.run.data.submitted_tasks == 1
            await asyncio.to_thread(control, "resume", None, scene.address, None)
            assert not scene.run.status().paused
            await asyncio.to_thread(control, "drain", tmp_path, None, None)
            async with asyncio.timeout(60):
                while scene.run.progress.phase != "finished":
                    await asyncio.sleep(0.02)
    said = capsys.readouterr().out
    assert "paused" in said and "resumed" in said and "training ends after the update in progress" in said
    with pytest.raises(UserError, match="is finished: only one that is running can be controlled"):
        await asyncio.to_thread(control, "pause", tmp_path, None, None)


async def test_a_pause_is_told_and_is_no_fault(tmp_path: Path) -> None:
    async with running(tmp_path, settings()) as scene:
        scene.join("env-0", pb.ROLE_ENV, World())
        scene.join("rollout-0", pb.ROLE_ROLLOUT, replica)
        scene.join("train-0", pb.ROLE_TRAIN, lambda command: None)
        async with asyncio.timeout(60):
            while not scene.run._training.taken_up:
                await asyncio.sleep(0.02)
        scene.run.pause(True)
        assert (await scene.stall("paused")).deliberate
        await scene.health("SERVING")


async def test_a_run_that_stalls_for_long_ends_with_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunDirectory(tmp_path)
    async with await folder.open_to_work(create=True) as database:
        await database.start_run(tmp_path.name, "test", {}, started=1.0)
        run = Run(settings(end_after_seconds=2 * BOUND, exit_code=42), folder, database, Train(), Start())
        with pytest.raises(Stalled, match=r"the start of the run waits for "):
            try:
                async with asyncio.timeout(60):
                    await run.execute()
            except Stalled as error:
                assert error.exit_code == 42
                raise
    said = await asyncio.to_thread(ended, tmp_path, capsys)
    assert "failed while it was starting" in said and "it ended because: no progress for" in said


async def test_a_replica_without_weights_stops_no_run_whose_updates_go_on(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path)
    async with await folder.open_to_work(create=True) as database:
        await database.start_run(tmp_path.name, "test", {}, started=1.0)
        run = Run(settings(weights_seconds=600.0, end_after_seconds=60.0), folder, database, Train(), Start())
        watch, replica = run._watch, Stall("weights", "version 3", "replica a", 9000.0, "a")
        assert watch._stops(replica), "no update has been made yet"
        watch._watchdog.look(Pulse("training", updates=1), time.monotonic())
        watch.stalls = (replica,)
        watch._end_when_long()
        assert not watch._stops(replica) and watch._stops(Stall("trainer", "update 4", "train-0", 700.0, "train-0"))
        watch.stalls = (replica, Stall("trainer", "update 4", "train-0", 700.0, "train-0"))
        with pytest.raises(Stalled, match="no progress for 700 s: update 4 waits for train-0"):
            watch._end_when_long()


async def test_what_a_worker_says_while_the_server_stops_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, settings()) as scene:
        stop = scene.run.server.stop

        async def late() -> None:
            scene.run.journal.event("late")
            await stop()

        monkeypatch.setattr(scene.run.server, "stop", late)
    assert events(tmp_path / "metrics.jsonl")[-1]["event"] == "late"


@pytest.mark.parametrize(("interrupt_seconds", "is_saved"), [(0.2, False), (60.0, True)])
async def test_an_interruption_waits_for_its_checkpoint_as_long_as_the_config_says(
    tmp_path: Path, interrupt_seconds: float, is_saved: bool
) -> None:
    asked: asyncio.Queue[pb.SaveCheckpoint] = asyncio.Queue()

    def saves(command: object) -> None:
        if isinstance(command, pb.SaveCheckpoint):
            asked.put_nowait(command)

    made = settings().model_copy(update={"checkpoint": config.Checkpoint(interrupt_seconds=interrupt_seconds)})
    async with running(tmp_path, made) as scene:
        scene.join("env-0", pb.ROLE_ENV, lambda _: None)
        scene.join("rollout-0", pb.ROLE_ROLLOUT, lambda _: None)
        trainer = scene.join("train-0", pb.ROLE_TRAIN, saves)
        async with asyncio.timeout(60):
            while not scene.run._training.taken_up:
                await asyncio.sleep(0.01)
        scene.run.interrupt()
        command = await asked.get()
        await asyncio.sleep(1.0)
        with manifest.written(Path(command.path)):
            pass
        saved = pb.CheckpointSaved(assignment=command.assignment, path=command.path, seconds=1.0)
        scene.run.fleet.receive(trainer, pb.SessionRequest(checkpoint_saved=saved))
    assert bool(events(tmp_path / "metrics.jsonl", "checkpoint")) is is_saved
