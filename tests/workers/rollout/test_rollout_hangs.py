"""An update that hangs in vLLM, as one over NCCL does whose trainer is lost, ends that replica and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_samples import served
from vllm_alone.fake_llm import FakeLLM, fake_vllm

from benchmarks.simulation import virtual_time
from dart import config
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TrainerRanks
from dart.coordinator.training.syncing import WeightSync
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.core.types import Text
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2 as wpb
from dart.wire.channel import Dial
from dart.wire.role import WorkerRole
from dart.wire.worker import WorkerOptions, serve
from dart.workers.rollout import engine as engine_module
from dart.workers.rollout.engine import Engine
from dart.workers.rollout.errors import EngineDiedError
from dart.workers.rollout.role import RolloutRole
from dart.workers.weights.transfer import TensorSpec, TransferError

TIMEOUT = 0.2
GROUP = wpb.TransferGroup(group_id="r-1", transport="nccl", host="trainer", port=1, world_size=2)
SPECS = [TensorSpec("w", "float32", (2,))]


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with fake_vllm():
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "GRACE_SECONDS", 0.1)


def worker_config(timeout_seconds: float = TIMEOUT) -> config.RolloutWorkerConfig:
    return config.RolloutWorkerConfig(
        model=config.Model(path="nowhere"),
        rollout=config.Rollout(),
        sync=config.Sync(transport="nccl", timeout_seconds=timeout_seconds),
        max_images=1,
        seed=0,
    )


class Failing(FakeLLM):
    """Of several GPUs one has failed: vLLM raises, and the others' answers stay behind."""

    async def start_weight_update(self) -> None:
        raise RuntimeError("rank 1 has failed")

    async def collective_rpc(self, method: str, kwargs: object = None) -> None:
        raise RuntimeError("rank 1 has failed")


@pytest.mark.parametrize(("gpus", "expected"), [(1, TransferError), (2, EngineDiedError)])
async def test_a_failure_before_the_model_is_touched_costs_an_engine_of_several_gpus(
    gpus: int, expected: type[Exception]
) -> None:
    """With one GPU the old version goes on serving."""
    made = worker_config(timeout_seconds=20.0)
    rollout, gloo = config.Rollout(tensor_parallel=gpus), config.Sync(transport="gloo", timeout_seconds=20.0)
    engine = Engine(Failing(), made.model_copy(update={"rollout": rollout, "sync": gloo}))  # type: ignore[arg-type]
    with pytest.raises(expected, match="rank 1 has failed"):
        await engine.update(1, GROUP, SPECS, "drain")
    with pytest.raises(expected, match="rank 1 has failed"):
        await engine.begin_receiving(1, GROUP, SPECS)
    assert engine.version == 0


def test_waiting_for_requests_does_not_shorten_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take its time: a transfer over gloo, complete before, must not end an engine that had to wait."""
    monkeypatch.setattr(engine_module, "GRACE_SECONDS", 0.0)

    class Slow(FakeLLM):
        async def pause_generation(self, **_: object) -> None:
            await asyncio.sleep(300.0)

        async def update_weights(self, request: object) -> None:
            await asyncio.sleep(300.0)

    engine = Engine(Slow(), worker_config(timeout_seconds=500.0))  # type: ignore[arg-type]
    virtual_time.run(engine.update(1, GROUP, SPECS, "drain"))
    assert engine.version == 1


def started(llm: Any) -> Engine:
    return Engine(llm, worker_config())


@pytest.mark.parametrize(
    "name",
    [
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
        "reset_prefix_cache", "resume_generation",
    ],
)  # fmt: skip
async def test_whatever_hangs_the_engine_counts_as_dead_and_is_asked_nothing_more(name: str, impatient: None) -> None:
    llm = FakeLLM(lambda called: called == name)
    async with asyncio.timeout(20):
        with pytest.raises(EngineDiedError, match=r"weights 1 were not loaded within sync.timeout_seconds"):
            await started(llm).update(1, GROUP, SPECS, "drain")
    assert llm.calls[-1] == name


async def test_requests_that_do_not_end_leave_the_engine_as_it_was() -> None:
    llm = FakeLLM(lambda called: called == "pause_generation")
    engine = started(llm)
    async with asyncio.timeout(20):
        with pytest.raises(TransferError, match=r"did not end within sync.timeout_seconds \(0.2\): raise it, or set"):
            await engine.update(1, GROUP, SPECS, "drain")
        assert llm.calls == ["pause_generation", "resume_generation"]
        assert (await engine.generate("after", [Text("do it")], 1.0, 4)).text == "word"
    assert engine.version == 0


async def test_an_engine_that_does_not_even_resume_counts_as_dead(impatient: None) -> None:
    llm = FakeLLM(lambda called: called in ("pause_generation", "resume_generation"))
    async with asyncio.timeout(20):
        with pytest.raises(EngineDiedError, match="weights 1"):
            await started(llm).update(1, GROUP, SPECS, "drain")


async def test_an_update_that_does_not_hang_is_served() -> None:
    llm = FakeLLM()
    engine = Engine(llm, worker_config(timeout_seconds=20.0))  # type: ignore[arg-type]
    update = await engine.update(1, GROUP, SPECS, "drain")
    assert engine.version == 1 and update.bytes == 8
    assert llm.calls == [
        "pause_generation", "init_weight_transfer_engine", "start_weight_update", "update_weights",
        "finish_weight_update", "reset_prefix_cache", "reset_encoder_cache", "resume_generation",
    ]  # fmt: skip


async def test_vllm_joins_a_group_once_and_leaves_it_for_the_next() -> None:
    """vLLM sets up whatever group it is told, and a trainer that is in it already does not come a second time."""
    llm = FakeLLM()
    engine = Engine(llm, worker_config(timeout_seconds=20.0))  # type: ignore[arg-type]
    for version in (1, 2):
        await engine.update(version, GROUP, SPECS, "drain")
    assert llm.calls.count("init_weight_transfer_engine") == 1 and llm.calls.count("update_weights") == 2
    llm.calls.clear()
    await engine.update(3, wpb.TransferGroup(group_id="r-2", transport="nccl"), SPECS, "drain")
    assert llm.calls[1:4] == [
        "shutdown_weight_transfer_engine", "init_weight_transfer_engine", "start_weight_update"]  # fmt: skip


class TrainerRole(WorkerRole):
    """A trainer whose end of every transfer is done at once."""

    role = pb.ROLE_TRAIN

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=1, transfer_host="trainer")

    async def handle(self, command: Any) -> pb.WeightsSent:
        assert isinstance(command, pb.SendWeights)
        return pb.WeightsSent(version=command.version)


async def test_the_others_are_updated_and_the_replica_too_once_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real worker, engine and coordinator over gRPC; only vLLM is not real, and the trainer."""
    llms = iter([stuck := FakeLLM(lambda called: called == "update_weights"), FakeLLM(), FakeLLM()])
    monkeypatch.setattr(engine_module, "start_vllm", lambda config: next(llms))
    monkeypatch.setattr(engine_module, "GRACE_SECONDS", 3.0)
    made = worker_config(timeout_seconds=5.0)

    async def add_sync(record: Any) -> None:
        pass

    settings = config.Server(heartbeat_seconds=1.0, lost_after_seconds=30.0)
    fleet, replicas = Fleet(settings.lost_after_seconds), Replicas[Any](time.monotonic())
    RolloutPool(fleet, StoredScreenshots(None), replicas)
    ranks = TrainerRanks(fleet, 1, StoredScreenshots(None))
    sync = WeightSync(
        made.sync, replicas, ranks, SimpleNamespace(add_sync=add_sync), Progress(1),  # type: ignore[arg-type]
        Journal(tmp_path / "metrics.jsonl"),
    )  # fmt: skip
    stop = asyncio.Event()

    async def until(condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    def work(role: Any, name: str) -> Any:
        return serve(role, WorkerOptions(Dial(server.address), name), stop)

    told = made.model_dump_json()
    async with served(fleet, settings, lambda hello: told) as server, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        hanging = asyncio.create_task(work(RolloutRole(), "a"))
        await until(lambda: replicas.versions)
        tasks.create_task(work(RolloutRole(), "b"))
        tasks.create_task(work(TrainerRole(), "train"))
        await until(lambda: len(replicas.versions) == 2 and ranks._ranks)
        syncing = tasks.create_task(sync.run())
        sync.staged(1, [wpb.TensorInfo(name="w", dtype="float32", shape=[2])])
        with pytest.raises(EngineDiedError, match="Start the worker again"):
            await hanging
        assert stuck.ended, "the engine process is ended with its worker"
        await until(lambda: replicas.versions == {"a": 0, "b": 1})
        tasks.create_task(work(RolloutRole(), "a"))
        await sync.settled()
        await until(lambda: replicas.versions == {"a": 1, "b": 1})
        stop.set()
        syncing.cancel()
    assert "sync of a to version 1 failed: the transfer, or the pause for it, took longer" in caplog.text
