"""A policy and a trainer for a real coordinator: they dial it like any worker, and need no engine and no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dart import manifest
from dart.config import RolloutWorkerConfig, TrainWorkerConfig
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire.capabilities import FORCED_TEXT, RESCORE
from dart.wire.channel import Dial
from dart.wire.role import Command, CommandError, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

TOKENS = 24
WEIGHTS = "model.safetensors"
"""In a checkpoint: the file that holds only the version's number."""


class ScriptedPolicy(WorkerRole):
    """Says the same words on every turn."""

    role = pb.ROLE_ROLLOUT
    capabilities = (FORCED_TEXT,)

    def __init__(self, text: str) -> None:
        self._text, self._version = text, 0

    async def prepare(self, config_json: str) -> pb.Ready:
        self._version = RolloutWorkerConfig.model_validate_json(config_json).weight_version
        return pb.Ready(slots=64, engine_ranks=1, image_cache_entries=1024, weight_version=self._version)

    async def handle(self, command: Command) -> Reply | None:
        match command:
            case pb.Generate():
                ids = range(200, 200 + TOKENS)
                return pb.Generated(
                    prompt_token_ids=ids, token_ids=ids, logprobs=[-0.5] * TOKENS, text=self._text,
                    versions=[{"version": self._version, "start": 0, "end": TOKENS}],
                    finish_reason=pb.FINISH_REASON_STOP,
                )  # fmt: skip
            case pb.LoadWeights():
                self._version = command.version
                return pb.WeightsLoaded(version=command.version)
            case pb.Abort():
                return None
            case _:
                raise CommandError(pb.FAILURE_CODE_INVALID, f"{type(command).__name__} is not for this policy")


class ScriptedTrainer(WorkerRole):
    """Makes a version of every batch, without weights."""

    role = pb.ROLE_TRAIN
    capabilities = (RESCORE,)

    def __init__(self) -> None:
        self._version = 0

    async def prepare(self, config_json: str) -> pb.Ready:
        if (checkpoint := TrainWorkerConfig.model_validate_json(config_json).resume_from) is not None:
            self._version = int((checkpoint / WEIGHTS).read_text())
        return pb.Ready(slots=1, weight_version=self._version, transfer_host="127.0.0.1")

    async def handle(self, command: Command) -> Reply | None:
        match command:
            case pb.TrainBatch():
                if command.page + 1 < command.pages:
                    return None
                self._version += 1
                tensors = [weights_pb2.TensorInfo(name="w", shape=[1], dtype="float32")]
                return pb.Trained(
                    update=command.update, weight_version=self._version, tensors=tensors, metrics={"loss": 0.0}
                )
            case pb.SendWeights():
                return pb.WeightsSent(version=command.version)
            case pb.SaveCheckpoint():
                with manifest.written(Path(command.path)) as folder:
                    (folder / WEIGHTS).write_text(str(self._version))
                return pb.CheckpointSaved(path=command.path, weight_version=self._version)
            case _:
                raise CommandError(pb.FAILURE_CODE_INVALID, f"{type(command).__name__} is not for this trainer")


@asynccontextmanager
async def scripted_workers(address: str, text: str, trainer: WorkerRole | None = None) -> AsyncIterator[None]:
    """One policy that says `text`, and a trainer, while the body runs. `trainer`: by default one that does well."""
    stop = asyncio.Event()
    roles: dict[str, WorkerRole] = {"rollout-0": ScriptedPolicy(text), "train-0": trainer or ScriptedTrainer()}
    async with asyncio.TaskGroup() as tasks:
        for name, role in roles.items():
            tasks.create_task(serve(role, WorkerOptions(Dial(address), name), stop))
        try:
            yield
        finally:
            stop.set()
