"""The benchmark's virtual clock, and the coordinator on it: modes, and accounting to the second."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from run_processes.told import recorded

from benchmarks.instant import settings
from benchmarks.simulation import cluster, virtual_time
from benchmarks.simulation.cluster import COUPLED, DECOUPLED, Schedule, SetUp, simulate
from benchmarks.simulation.timings import ReplicaTimes, Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import manifest
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.training.updates import STILL_SAVING
from dart.core.curation.orders import Order
from dart.core.types import Task, Trajectory
from dart.core.usage import EnvState
from dart.screenshots.stored import StoredScreenshots
from dart.store.blobs import BlobMissing
from dart.v1 import session_pb2 as pb

SET_UP = SetUp("small", environments=24, replicas=2, trajectories_per_update=16, tasks=12, rollouts=4)


def test_a_day_passes_at_once() -> None:
    async def day() -> tuple[float, float]:
        before, unix = time.monotonic(), time.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(3600))
            tasks.create_task(asyncio.sleep(86_400))
        return time.monotonic() - before, time.time() - unix

    began = time.monotonic()
    assert virtual_time.run(day()) == (86_400, 86_400)
    assert time.monotonic() - began < 60, "the real clock is back, and little of it went by"

    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(stuck())


def test_a_replica_is_shared_by_its_requests() -> None:
    times = ReplicaTimes()
    alone, together = 1 / times.seconds_per_pass(1), 32 / times.seconds_per_pass(32)
    assert 5 * alone < together < 32 * alone, "throughput grows with requests, and less than they do"


@pytest.mark.parametrize(
    "schedule", [DECOUPLED, COUPLED, Schedule("task"), Schedule(training="synchronous"), Schedule(sync="all")], ids=str
)
def test_every_slot_second_is_booked_once(schedule: Schedule) -> None:
    summary = simulate(SET_UP, schedule, Timings(failures_per_step=0.01), hours=1.0)
    assert summary["updates"] > 3
    assert summary["infrastructure_failures"] > 0
    seconds = summary["train_seconds"]
    spent = {name: sum(part["seconds"].values()) for name, part in summary["time"].items()}
    assert spent == pytest.approx(
        {"env": seconds * SET_UP.environments, "rollout": seconds * SET_UP.replicas, "trainer": seconds}, rel=1e-3
    )
    because = summary["time"]["env"]["idle_because"]
    assert sum(because.values()) == pytest.approx(summary["time"]["env"]["seconds"]["idle"], rel=0.02, abs=5)
    counted = summary["trained"] + sum(summary["dropped"].values())
    assert counted <= summary["trajectories"]
    assert summary["trained_actions_per_minute"] <= summary["sampled_actions_per_minute"]


def test_decoupling_pays() -> None:
    coupled, decoupled = (simulate(SET_UP, schedule, Timings(), hours=2.0) for schedule in (COUPLED, DECOUPLED))
    for name in ("env_utilisation", "rollout_utilisation", "trained_actions_per_minute"):
        assert decoupled[name] > 1.5 * coupled[name]
    assert coupled["staleness"]["max"] == 0 < decoupled["staleness"]["max"] <= SET_UP.max_staleness


class Caching(SimulatedReplica):
    """The first has three quarters of every prompt in its prefix cache; the second does not say."""

    def send(self, message: pb.SessionRequest, command: Any, seconds: float) -> None:
        if message.HasField("generated") and self.worker.id.endswith("0"):
            message.generated.cached_tokens = 18
        super().send(message, command, seconds)


def test_updates_tell_how_much_of_the_prompts_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    events = recorded(monkeypatch)
    assert simulate(SET_UP, DECOUPLED, Timings(), 1.0, make_replica=Caching)["prefix_cached"] == 0.75
    updates = [event for event in events if event["event"] == "update"]
    assert updates and {update["prefix_cached"] for update in updates} == {0.75}
    assert 0 < updates[-1]["prompt_tokens"] < 24 * updates[-1]["env_steps"], "of one of the two"


class ForgetfulTrainer(SimulatedTrainer):
    """Its disk is full at first."""

    refused = 0

    def save_checkpoint(self, command: pb.SaveCheckpoint) -> None:
        if self.refused < 2:
            type(self).refused += 1
            failure = pb.Failure(code=pb.FAILURE_CODE_TRAINER, message="checkpoint cannot be written: no space left")
            self.answer(command, 1.0, failure=failure)
        else:
            super().save_checkpoint(command)


def _checkpoints_of_a_run(monkeypatch: pytest.MonkeyPatch, trainer: type[SimulatedTrainer]) -> list[dict[str, Any]]:
    """The events of a run about updates and checkpoints, of which one is made after every second update."""

    def config(*arguments: Any) -> Config:
        made = plain(*arguments)
        return made.model_copy(update={"checkpoint": made.checkpoint.model_copy(update={"every_updates": 2})})

    plain = cluster._config
    monkeypatch.setattr(cluster, "_config", config)
    monkeypatch.setattr(cluster, "SimulatedTrainer", trainer)
    events = recorded(monkeypatch)
    assert simulate(SET_UP, DECOUPLED, Timings(), hours=1.0)["updates"] > 4
    return [told for told in events if told["event"] in ("update", "checkpoint", "checkpoint_failed")]


def test_a_checkpoint_that_cannot_be_written_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [told["event"] for told in _checkpoints_of_a_run(monkeypatch, ForgetfulTrainer)]
    assert kinds[:7] == [
        "update", "update", "checkpoint_failed", "update", "checkpoint_failed", "update", "checkpoint",
    ]  # fmt: skip


class SlowDisk(SimulatedTrainer):
    """Takes as long for a checkpoint as for several updates."""

    seconds = 0.0

    def save_checkpoint(self, command: pb.SaveCheckpoint) -> None:
        with manifest.written(Path(command.path)):
            pass
        saved = pb.CheckpointSaved(path=command.path, weight_version=self._version)
        self.answer(command, self.seconds, checkpoint_saved=saved)


@pytest.mark.parametrize(("seconds", "told_of_each"), [(500.0, []), (1500.0, [STILL_SAVING])])
def test_updates_go_on_while_a_checkpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, seconds: float, told_of_each: list[str]
) -> None:
    """A save that the next one has to wait for until two more updates are made is told, and once."""
    monkeypatch.setattr(SlowDisk, "seconds", seconds)
    told = _checkpoints_of_a_run(monkeypatch, SlowDisk)
    kinds = [one["event"] for one in told]
    written = [k for k, kind in enumerate(kinds) if kind == "checkpoint"]
    assert len(written) >= 2
    assert kinds[written[0] : written[1]].count("update") > 2, "the next one begins when the last is written"
    for before, k in itertools.pairwise([0, *written[:-1]]):
        assert told[k]["version"] < kinds[:k].count("update")
        assert told[k]["path"].endswith(f"v{told[k]['version']:06d}")
        assert [one["why"] for one in told[before:k] if one["event"] == "checkpoint_failed"] == told_of_each


class Reminded(SimulatedTrainer):
    """Is sent every update again while it works on it, as after an answer that nobody waits for any more."""

    def train_batch(self, command: pb.TrainBatch) -> None:
        self._loop.call_later(1.0, self.worker.end.remind, 1)
        super().train_batch(command)


def test_an_update_that_a_trainer_is_reminded_of_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SimulatedTrainer", Reminded)
    assert simulate(SET_UP, DECOUPLED, Timings(), hours=0.5)["updates"] > 1


class Broken(SimulatedEnvs):
    """Desktops that never come up."""

    def reset(self, command: pb.Reset) -> None:
        self.answer(command, 0.1, failure=pb.Failure(code=pb.FAILURE_CODE_ENVIRONMENT, message="the disk is full"))


class Endless:
    """Orders without end, each given out again when its attempt has failed."""

    temperature = 1.0

    def __init__(self) -> None:
        self.made = self.finished_count = self.failures = 0
        self.again: list[Order] = []

    async def next(self) -> Order:
        if self.again:
            return self.again.pop()
        self.made += 1
        return Order(f"t{self.made}", "g", Task("simulated", "task-0"), 30)

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        self.finished_count += 1

    def failed(self, order: Order, error: InfrastructureError) -> None:
        self.failures += 1
        self.again.append(order.again())


def test_a_machine_on_which_everything_fails_does_not_take_all_the_work() -> None:
    async def hour() -> tuple[Endless, dict[str, dict[EnvState, float]], str]:
        fleet, source = Fleet(1e9), Endless()
        envs, policy = EnvPool(fleet), RolloutPool(fleet, StoredScreenshots(None))
        SimulatedReplica(fleet, "rollout-0", Timings(), 0)
        for kind in (SimulatedEnvs, Broken):
            kind(fleet, kind.__name__, 4, Timings(failures_per_step=0.01), ["task-0"], 0)
        sampling = asyncio.create_task(sample(source, envs, policy, settings()))
        await asyncio.sleep(3600)
        sampling.cancel()
        now = time.monotonic()
        spent = {name: envs.usage.seconds(now, name) for name in ("SimulatedEnvs", "Broken")}
        return source, spent, envs.usage.cause(EnvState.RESTING)

    source, spent, why = virtual_time.run(hour())
    assert source.finished_count > 20
    assert 4 * 60 < source.failures < 4 * 80, "each of its four environments tries once a minute in the end"
    assert spent["Broken"][EnvState.RESTING] > 0.95 * 4 * 3600
    assert spent["SimulatedEnvs"].get(EnvState.RESTING, 0.0) < 30, "a quarter of its attempts fail: that needs no rest"
    assert why == "its worker's attempts failed, or it broke rules"


class Losing(Endless):
    """What finishes first cannot be stored."""

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        if not self.failures:
            raise BlobMissing("blob 12ab is not in /mnt/blobs")
        await super().finished(order, trajectory)


def test_a_trajectory_that_cannot_be_stored_is_made_again() -> None:
    async def hour() -> Losing:
        fleet, source = Fleet(1e9), Losing()
        envs, policy = EnvPool(fleet), RolloutPool(fleet, StoredScreenshots(None))
        SimulatedReplica(fleet, "rollout-0", Timings(), 0)
        SimulatedEnvs(fleet, "env-0", 2, Timings(failures_per_step=0.0), ["task-0"], 0)
        sampling = asyncio.create_task(sample(source, envs, policy, settings()))
        await asyncio.sleep(3600)
        sampling.cancel()
        return source

    source = virtual_time.run(hour())
    assert source.failures == 1 and source.finished_count > 5 and not source.again
