"""The two ends of a session, in the processes of the benchmark: a trainer with random tensors, a replica that sleeps.

Sending is the project's own (`Snapshots`, `Senders`), and so is receiving; as in `vllm_extension`, everything is staged
before the tensors that represent the model's are overwritten.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from benchmarks.syncing.engine import NoSlotError, Received, SleepingEngine
from benchmarks.syncing.plan import MARK, Scene, tensor_list
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2 as wpb
from dart.wire.capabilities import RECEIVES_WHILE_SERVING
from dart.wire.role import Command, CommandError, Reply, WorkerRole
from dart.workers.rollout.errors import RequestAbortedError
from dart.workers.train.senders import Senders, Snapshots
from dart.workers.weights.gloo import Group, receive
from dart.workers.weights.requests import init_info, update_info
from dart.workers.weights.transfer import TensorSpec, TransferError, checksum, specs_from_proto, specs_to_proto

MODES = {wpb.PAUSE_MODE_KEEP: "keep", wpb.PAUSE_MODE_DRAIN: "drain", wpb.PAUSE_MODE_ABORT: "abort"}
RANDOM_ELEMENTS = 1 << 20
LINE = 256
"""Stretches reported in one line."""

Weights = dict[str, torch.Tensor]
Say = Callable[[dict[str, Any]], None]


def device_of(transport: str, index: int) -> torch.device:
    return torch.device("cuda", index) if transport == "nccl" else torch.device("cpu")


def random_weights(specs: Sequence[TensorSpec], device: torch.device, seed: int) -> Weights:
    """Pieces of one random block: nothing on the way compresses, and making a gigabyte takes less than a minute."""
    block = torch.randn(RANDOM_ELEMENTS, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    made = {}
    for spec in specs:
        flat = torch.empty(spec.bytes // block.itemsize, dtype=block.dtype)
        for start in range(0, len(flat), len(block)):
            flat[start : start + len(block)] = block[: len(flat) - start]
        made[spec.name] = flat.view(spec.shape).to(device)
    return made


def empty_weights(specs: Sequence[TensorSpec], device: torch.device) -> Weights:
    return {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16, device=device) for spec in specs}


def marked(weights: Weights, version: int) -> Weights:
    """The same tensors except for the first, which holds the version."""
    return weights | {MARK: torch.full_like(weights[MARK], version)}


def mark_of(weights: Weights) -> int:
    return int(weights[MARK][0])


class Receiver(Protocol):
    """A replica's end of its group. It blocks, so call it in a thread. Raises TransferError after leaving the group."""

    def take(self, group: wpb.TransferGroup | None, specs: Sequence[TensorSpec]) -> Received:
        """Receive and load; without a group, load what `receive` brought."""

    def receive(self, group: wpb.TransferGroup, specs: Sequence[TensorSpec]) -> float:
        """Only receive, while the replica serves; returns when the group was joined."""

    def close(self) -> None: ...


def make_receiver(transport: str, weights: Weights, device: torch.device, timeout_seconds: float) -> Receiver:
    made = NcclReceiver if transport == "nccl" else GlooReceiver
    return made(weights, device, timeout_seconds)


class GlooReceiver:
    """Receives like `GlooWeightTransferEngine`, with `copy_` instead of the model's `load_weights`."""

    def __init__(self, weights: Weights, device: torch.device, timeout_seconds: float) -> None:
        self._weights, self._timeout_seconds = weights, timeout_seconds
        self._group: Group | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []

    def take(self, group: wpb.TransferGroup | None, specs: Sequence[TensorSpec]) -> Received:
        joined = self.receive(group, specs) if group is not None else time.monotonic()
        received = time.monotonic()
        staged, self._staged = self._staged, []
        for name, tensor in staged:
            self._weights[name].copy_(tensor)
        return joined, received, time.monotonic()

    def receive(self, group: wpb.TransferGroup, specs: Sequence[TensorSpec]) -> float:
        """Receive; returns when the group was joined."""
        if self._group is None or self._group.group_id != group.group_id:
            self.close()
            self._group = Group(
                group.group_id, group.host, group.port, rank=1, world_size=group.world_size,
                timeout_seconds=self._timeout_seconds,
            )  # fmt: skip
        joined = time.monotonic()
        try:
            self._staged = list(receive(self._group, specs))
        except TransferError:
            self.close()
            raise
        return joined

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class NcclReceiver:
    """vLLM's own receiving engine, driven as in `dart.workers.rollout.engine`; what it unpacks is copied at once.

    It has never been run over NCCL itself; tests/workers/weights/test_weights_nccl.py runs it without a GPU.
    """

    def __init__(self, weights: Weights, device: torch.device, timeout_seconds: float) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._weights, self._device, self._timeout_seconds = weights, device, timeout_seconds
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self._engine: Any = NCCLWeightTransferEngine(None, config, device, self)
        self._group_id = ""

    def receive(self, group: wpb.TransferGroup, specs: Sequence[TensorSpec]) -> float:
        raise TransferError("over NCCL weights go straight into the model")

    def take(self, group: wpb.TransferGroup | None, specs: Sequence[TensorSpec]) -> Received:
        assert group is not None, "nothing was received ahead"
        torch.cuda.set_device(self._device)  # of this thread
        try:
            if self._group_id != group.group_id:
                self.close()
                init = init_info("nccl", group, self._timeout_seconds)
                self._engine.init_transfer_engine(self._engine.parse_init_info(init))
                self._group_id = group.group_id
            joined = time.monotonic()
            self._engine.receive_weights(self._engine.parse_update_info(update_info("nccl", 0, specs)))
            torch.cuda.synchronize(self._device)
        except (RuntimeError, ValueError, OSError, AssertionError) as error:
            self.close()
            raise TransferError(f"group {group.group_id}: {error}") from None
        return joined, time.monotonic(), time.monotonic()

    def close(self) -> None:
        if self._group_id:
            self._group_id = ""
            self._engine.shutdown()

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """As the model that the engine loads into."""
        for name, tensor in tensors:
            self._weights[name].copy_(tensor)


class RandomTrainer(WorkerRole):
    """`dart.wire.role.WorkerRole`: an update makes a version at once; sending is as in `TrainRole`.

    One thing differs over NCCL: the tensors are on the GPU, whereas `TrainRole` stages them in host memory.
    """

    role = pb.ROLE_TRAIN

    def __init__(self, name: str, index: int, say: Say) -> None:
        self._name, self._index, self._say = name, index, say
        self._weights: Weights = {}
        self._version = 0
        self._snapshots = Snapshots()
        self._senders: Senders | None = None

    async def prepare(self, config_json: str) -> pb.Ready:
        scene = Scene.from_json(config_json)
        self._specs = tensor_list(scene.bytes)
        device = device_of(scene.transport, self._index)
        self._weights = await asyncio.to_thread(random_weights, self._specs, device, scene.seed)
        self._snapshots.stage(0, marked(self._weights, 0))
        self._senders = Senders(scene.transport, scene.timeout_seconds)
        return pb.Ready(slots=1, transfer_host="127.0.0.1")

    async def handle(self, command: Command) -> Reply | None:
        match command:
            case pb.TrainBatch():
                self._version += 1
                self._snapshots.stage(self._version, marked(self._weights, self._version))
                tensors = specs_to_proto(self._specs)
                return pb.Trained(update=command.update, weight_version=self._version, tensors=tensors)
            case pb.SendWeights() if self._senders is not None:
                return await self._send(self._senders, command)
            case _:
                raise CommandError(pb.FAILURE_CODE_INVALID, f"{type(command).__name__} is not for this trainer")

    async def _send(self, senders: Senders, command: pb.SendWeights) -> pb.WeightsSent:
        began = time.monotonic()
        with self._snapshots.sending(command.version) as weights:
            try:
                sent = await senders.send(command.group, weights)
            except TransferError as error:
                raise CommandError(pb.FAILURE_CODE_TRANSFER, str(error)) from error
        return pb.WeightsSent(version=command.version, seconds=time.monotonic() - began, bytes=sent)

    async def close(self) -> None:
        if self._senders is not None:
            await self._senders.close()
        if self._weights:
            contents = await asyncio.to_thread(checksum, marked(self._weights, self._version).items())
            self._say({"event": "held", "who": self._name, "checksum": contents})
        self._weights, self._snapshots, self._senders = {}, Snapshots(), None


class SleepingReplica(WorkerRole):
    """`dart.wire.role.WorkerRole`, answering as `RolloutRole` does; a request's length is its `max_tokens`."""

    role = pb.ROLE_ROLLOUT
    capabilities = (RECEIVES_WHILE_SERVING,)

    def __init__(self, name: str, index: int, say: Say) -> None:
        self._name, self._index, self._say = name, index, say
        self._weights: Weights = {}
        self._engine: SleepingEngine | None = None
        self._receiver: Receiver | None = None
        self._receiving: asyncio.Task[tuple[float, float]] | None = None

    async def prepare(self, config_json: str) -> pb.Ready:
        scene = Scene.from_json(config_json)
        device = device_of(scene.transport, self._index)
        self._weights = await asyncio.to_thread(empty_weights, tensor_list(scene.bytes), device)
        self._receiver = make_receiver(scene.transport, self._weights, device, scene.timeout_seconds)
        self._engine = SleepingEngine(scene.slots, scene.token_seconds)
        return pb.Ready(slots=scene.slots, engine_ranks=1, image_cache_entries=64)

    async def handle(self, command: Command) -> Reply | None:
        engine = self._engine
        if engine is None:
            raise CommandError(pb.FAILURE_CODE_INVALID, "the replica is not prepared")
        match command:
            case pb.Generate():
                return await self._generate(engine, command)
            case pb.Abort():
                engine.abort(_request_id(command.assignment))
                return None
            case pb.ReceiveWeights() if self._receiver is not None:
                specs = specs_from_proto(command.tensors)
                self._receiving = asyncio.create_task(_receive(self._receiver, command.group, specs))
                return pb.ReceivingWeights()
            case pb.LoadWeights():
                return await self._load(engine, command)
            case _:
                raise CommandError(pb.FAILURE_CODE_INVALID, f"{type(command).__name__} is not for this replica")

    async def _generate(self, engine: SleepingEngine, command: pb.Generate) -> pb.Generated:
        began, tokens = time.monotonic(), command.sampling.max_tokens
        try:
            spans = await engine.generate(_request_id(command.assignment), tokens)
        except RequestAbortedError as error:
            raise CommandError(pb.FAILURE_CODE_ABORTED, str(error)) from None
        except NoSlotError as error:
            raise CommandError(pb.FAILURE_CODE_ENGINE, str(error)) from None
        return pb.Generated(
            prompt_token_ids=range(90),
            token_ids=range(tokens),
            logprobs=[-0.1] * tokens,
            versions=[{"version": version, "start": start, "end": end} for version, start, end in spans],
            text="Action: wait()",
            finish_reason=pb.FINISH_REASON_STOP,
            seconds=time.monotonic() - began,
        )

    async def _load(self, engine: SleepingEngine, command: pb.LoadWeights) -> pb.WeightsLoaded:
        assert self._receiver is not None
        specs, receiver = specs_from_proto(command.tensors), self._receiver
        if (mode := MODES.get(command.pause_mode)) is None:
            raise CommandError(pb.FAILURE_CODE_INVALID, f"pause mode {command.pause_mode} is unspecified or unknown")

        async def take() -> Received:
            # In a thread, so that heartbeats continue: the real one is in a process of its own.
            group = command.group if command.HasField("group") else None
            times = await asyncio.to_thread(receiver.take, group, specs)
            if (mark := mark_of(self._weights)) != command.version:
                raise CommandError(pb.FAILURE_CODE_ENGINE, f"version {command.version} arrived as {mark}")
            return times

        ahead, self._receiving = self._receiving, None
        try:
            span = await ahead if ahead is not None else None
            times = await engine.update(command.version, mode, take)
        except TransferError as error:
            raise CommandError(pb.FAILURE_CODE_TRANSFER, str(error)) from None
        self._say({"event": "updated", "who": self._name, "version": command.version, "times": asdict(times),
                   "ahead": span})  # fmt: skip
        sent = sum(spec.bytes for spec in specs)
        return pb.WeightsLoaded(version=command.version, pause_seconds=times.serving - times.stopped, bytes=sent)

    async def close(self) -> None:
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)
        if self._weights:
            contents = await asyncio.to_thread(checksum, self._weights.items())
            self._say({"event": "held", "who": self._name, "checksum": contents})
        stretches = self._engine.stretches if self._engine is not None else []
        for start in range(0, len(stretches), LINE):
            self._say({"event": "served", "who": self._name, "stretches": stretches[start : start + LINE]})
        self._weights, self._receiver, self._engine = {}, None, None


async def _receive(receiver: Receiver, group: wpb.TransferGroup, specs: Sequence[TensorSpec]) -> tuple[float, float]:
    """Receive ahead; returns when that began and ended."""
    began = time.monotonic()
    await asyncio.to_thread(receiver.receive, group, specs)
    return began, time.monotonic()


def _request_id(assignment: pb.Assignment) -> str:
    return f"{assignment.assignment_id}/{assignment.attempt}"
