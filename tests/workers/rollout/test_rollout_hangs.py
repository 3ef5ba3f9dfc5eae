"""An engine that hangs, as one over NCCL does whose trainer is lost, or that fails, ends that replica and nothing else;
one that is not wanted any more ends, too."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_samples import drawn
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
from dart.core.types import Image, Text
from dart.errors import UserError, ungrouped
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2 as wpb
from dart.wire.channel import Dial
from dart.wire.role import CommandError, WorkerRole
from dart.wire.worker import WorkerOptions, serve
from dart.workers.rollout import engine as engine_module
from dart.workers.rollout import role as role_module
from dart.workers.rollout.engine import Engine
from dart.workers.rollout.errors import ContextFullError, EngineDiedError
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


def over_gloo(llm: Any, gpus: int = 1, timeout_seconds: float = 20.0) -> Engine:
    rollout = config.Rollout(tensor_parallel=gpus)
    gloo = config.Sync(transport="gloo", timeout_seconds=timeout_seconds)
    return Engine(llm, worker_config().model_copy(update={"rollout": rollout, "sync": gloo}))


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
    engine = over_gloo(Failing(), gpus)
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


def failing(name: str, times: int = 1) -> Callable[[str], bool]:
    """The first calls of this name fail, as vLLM's do: with a plain exception."""
    left = iter(range(times))

    def fails(called: str) -> bool:
        if called == name and next(left, None) is not None:
            raise RuntimeError("it has failed")
        return False

    return fails


@pytest.mark.parametrize("name", ["pause_generation", "reset_encoder_cache", "resume_generation"])
async def test_a_paused_engine_that_fails_counts_as_dead(name: str) -> None:
    """Nobody knows whether it goes on sampling, and with which weights and caches."""
    engine = Engine(FakeLLM(failing(name)), worker_config(timeout_seconds=20.0))  # type: ignore[arg-type]
    with pytest.raises(EngineDiedError, match="weights 1: it has failed"):
        await engine.update(1, GROUP, SPECS, "drain")


async def test_an_engine_that_does_not_begin_to_receive_counts_as_dead(impatient: None) -> None:
    engine = over_gloo(FakeLLM(lambda called: True), timeout_seconds=TIMEOUT)
    async with asyncio.timeout(20):
        with pytest.raises(EngineDiedError, match=r"receiving weights 1 did not begin within sync.timeout_seconds"):
            await engine.begin_receiving(1, GROUP, SPECS)


async def test_a_worker_ends_when_its_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if nothing asks the engine, or what was asked waits for an answer that will not come."""
    monkeypatch.setattr(role_module, "_BETWEEN_OFFERS", 0.01)
    role, llm = RolloutRole(), FakeLLM()
    role._engine = started(llm)
    running = asyncio.create_task(role.run(lambda slots: None))
    await asyncio.sleep(0.1)
    assert not running.done()
    llm.errored = True
    async with asyncio.timeout(20):
        with pytest.raises(EngineDiedError, match="its process has ended"), ungrouped(EngineDiedError):
            await running


async def test_a_worker_ends_when_one_of_its_gpus_does_not_give_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' answers would be taken for those to the next question."""
    monkeypatch.setattr(engine_module, "_RELEASE_SECONDS", 0.01)
    role = RolloutRole()
    role._engine = over_gloo(Failing(), gpus=2)
    async with asyncio.timeout(20):
        with (
            pytest.raises(EngineDiedError, match="memory was not released: rank 1 has failed"),
            ungrouped(EngineDiedError),
        ):
            await role.run(lambda slots: None)


async def test_memory_that_the_only_gpu_does_not_give_back_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "_RELEASE_SECONDS", 0.01)
    llm = FakeLLM(failing("collective_rpc", times=2))
    releasing = asyncio.create_task(started(llm).release_memory_now_and_then())
    async with asyncio.timeout(20):
        while len(llm.calls) < 4:
            await asyncio.sleep(0.01)
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    assert caplog.text.count("it has failed") == 1, "once is enough"


async def test_an_engine_that_is_not_wanted_any_more_is_killed_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, engines = threading.Event(), list[Any]()

    def start_vllm(told: object) -> None:
        engine = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600.0,))
        engines.append(engine)
        begun.set()
        engine.start()
        engine.join()
        raise UserError("the engine process has ended")

    monkeypatch.setattr(engine_module, "start_vllm", start_vllm)
    starting = asyncio.create_task(Engine.start(worker_config()))
    await asyncio.to_thread(begun.wait)
    starting.cancel()
    await asyncio.wait({starting}, timeout=300)
    try:
        assert starting.cancelled() and engines[0].exitcode == -9
    finally:
        engines[0].kill()


async def test_an_engine_that_has_started_when_it_is_not_wanted_any_more_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = FakeLLM(lambda called: called == "update_weight_version")
    monkeypatch.setattr(engine_module, "start_vllm", lambda told: llm)
    starting = asyncio.create_task(Engine.start(worker_config()))
    async with asyncio.timeout(20):
        while not llm.calls:
            await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert llm.ended


class Refusing(FakeLLM):
    """Refuses the first prompt, once it has noted its screenshots. `names`: those of the screenshots of each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[list[str]] = []

    async def add_request(self, request_id: str, prompt: Any, *arguments: object, **named: Any) -> SimpleNamespace:
        self.names.append(prompt["multi_modal_uuids"]["image"])
        if len(self.names) == 1:
            raise sys.modules["vllm.exceptions"].VLLMClientError("longer than the maximum model length of 2048")
        return await super().add_request(request_id, prompt, *arguments, **named)


async def test_screenshots_of_a_prompt_that_vllm_refuses_get_other_names() -> None:
    """vLLM's half of the image cache on this side has noted them, and the other half has not got them."""
    shown, other = drawn(1), drawn(2)
    engine = started(llm := Refusing())

    async def generate(*images: Image) -> list[str]:
        await engine.generate("turn", images, 1.0, 4)
        return llm.names[-1]

    with pytest.raises(ContextFullError):
        await generate(shown)
    renamed, kept = await generate(shown, other)
    assert renamed.startswith(shown.sha256.hex()) and renamed != llm.names[0][0]
    assert await generate(shown, other) == [renamed, kept], "and then keep them"


class Raising(FakeLLM):
    """Raises this for the first request."""

    def __init__(self, error: Exception, *, dies: bool = False) -> None:
        super().__init__()
        self.error: Exception | None = error
        self.dies = dies

    async def add_request(self, *arguments: Any, **named: Any) -> SimpleNamespace:
        error, self.error = self.error, None
        if error is not None:
            self.errored = self.dies
            raise error
        return await super().add_request(*arguments, **named)


def command() -> pb.Generate:
    return pb.Generate(
        assignment=pb.Assignment(assignment_id="turn", attempt=1), prompt=[pb.PromptPart(text="go")],
        sampling=pb.SamplingParams(temperature=1.0, max_tokens=4),
    )  # fmt: skip


@pytest.mark.parametrize(
    "error", [KeyError("pixel_values"), TypeError("no"), RuntimeError("shape"), AssertionError(), MemoryError()]
)
async def test_whatever_one_request_raises_fails_that_request_alone(error: Exception) -> None:
    role = RolloutRole()
    role._engine = started(Raising(error))
    with pytest.raises(CommandError, match=type(error).__name__) as failed:
        await role.handle(command())
    assert failed.value.code == pb.FAILURE_CODE_ENGINE
    assert isinstance(await role.handle(command()), pb.Generated)


@pytest.mark.parametrize("error", [KeyError("pixel_values"), RuntimeError("the prompt was not prepared")])
async def test_a_broken_picture_is_the_requests_fault_whatever_wraps_its_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    image = drawn(1)
    broken = Image.of(image.data.replace(b"IDAT", b"IDAT" + bytes(8), 1), image.media_type, image.width, image.height)
    role = RolloutRole()
    role._engine = engine = started(Raising(error))
    monkeypatch.setattr(engine._encoder, "encode", lambda parts: ([1], [broken]))
    monkeypatch.setattr(engine._prompts, "_undecoded", lambda image: image)
    with pytest.raises(CommandError, match=f"screenshot {broken.sha256.hex()[:12]} .*cannot be decoded") as failed:
        await role.handle(command())
    assert failed.value.code == pb.FAILURE_CODE_INVALID


async def test_a_setting_that_vllm_refuses_is_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**settings: object) -> object:
        raise sys.modules["vllm.exceptions"].VLLMClientError("temperature must be in [0, 2]")

    role = RolloutRole()
    role._engine = started(FakeLLM())
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", refuses)
    with pytest.raises(CommandError, match=r"vLLM refuses the request: temperature must be in \[0, 2\]") as failed:
        await role.handle(command())
    assert failed.value.code == pb.FAILURE_CODE_INVALID


async def test_an_engine_that_has_died_over_a_request_ends_the_worker() -> None:
    role = RolloutRole()
    role._engine = started(Raising(RuntimeError("gone"), dies=True))
    with pytest.raises(EngineDiedError):
        await role.handle(command())


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
