"""The train worker as `dart.wire` drives it: batches in, versions out, weights to replicas, checkpoints.

Everything that touches the model runs in one thread, one thing after the other, so the event loop (and its heartbeats)
keeps running during an update. Transfers and the writing of checkpoints run in other threads: they read staged copies,
which training never changes. Rank and world size come from Accelerate's environment variables; ranks other than 0 train
and answer, but send nothing, and save nothing but their parts of sharded weights.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from dart.config.told import TrainWorkerConfig, read_told
from dart.errors import UserError, first_line
from dart.v1 import session_pb2 as pb
from dart.versions import installed
from dart.wire.capabilities import ABORTS_TRANSFERS, IMAGES_APART, IMAGES_ONCE, RESCORE, SHARED_BLOBS
from dart.wire.convert import entropies_to_proto
from dart.wire.role import Command, CommandError, Reply, WorkerRole
from dart.workers.train import collectives
from dart.workers.train.errors import (
    CancelledUpdateError,
    NonFiniteError,
    SampleError,
    TrainError,
    UnknownScreenshotError,
)
from dart.workers.train.passes.runner import release_memory
from dart.workers.train.senders import Senders, Snapshots, Weights
from dart.workers.train.trainer import Trainer
from dart.workers.weights.transfer import TransferError, checksum, load_nccl, spec_of, specs_to_proto

T = TypeVar("T")
Key = tuple[str, int]

MOST_BLAMED = 1000
"""The most trajectories that a Failure names."""

TRANSFER_HOST = "DART_TRANSFER_HOST"
"""Environment variable: the address under which replicas on other machines reach this one for transfers."""

CLOSE_SECONDS = 60.0
"""How long one of several ranks waits for its own threads when it closes: one that is in a collective with a rank that
is gone would go on waiting for `collectives.LONGEST_WAIT`, and keep its GPU. A model that is loaded, and a checkpoint
that is written, may take as long as that."""


class TrainRole(WorkerRole):
    """One rank."""

    role = pb.ROLE_TRAIN
    capabilities = (RESCORE, IMAGES_ONCE, IMAGES_APART, SHARED_BLOBS, ABORTS_TRANSFERS)

    def __init__(self) -> None:
        self.rank, self.world_size = _told("RANK", "0"), _told("WORLD_SIZE", "1")
        self._trainer: Trainer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._snapshots = Snapshots()
        self._pages: dict[Key, dict[int, pb.TrainBatch]] = {}
        self._begun: Key | None = None
        """The newest update whose pages have all arrived."""
        self._senders: Senders | None = None
        self._sending: dict[Key, str] = {}
        """The group of each transfer that is under way."""
        self._writer: ThreadPoolExecutor | None = None
        self._saving = asyncio.Lock()
        """One checkpoint at a time."""

    async def prepare(self, config_json: str) -> pb.Ready:
        """Load the model. Raises UserError for a config or checkpoint that cannot be trained."""
        config = read_told(TrainWorkerConfig, config_json)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        if self.rank == 0 and config.sync.transport == "nccl":  # it imports vLLM, which changes settings of torch's
            await self._train_thread(load_nccl)
        try:
            self._trainer = await self._train_thread(lambda: Trainer(config))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"rank {self.rank} of the trainer has too little memory even without samples ({first_line(error)}): "
                "`dart doctor CONFIG` says what it needs, and what would lower that"
            ) from None
        trainer = self._trainer
        # NCCL sends from the rank's own GPU, while a new thread is on the first one.
        take = partial(collectives.take, trainer.device)
        self._senders = Senders(config.sync.transport, config.sync.timeout_seconds, take)
        weights = await self._train_thread(lambda: self._snapshot(trainer, None))
        if self.rank == 0:
            self._snapshots.stage(trainer.version, weights)
        return pb.Ready(
            slots=1,
            weight_version=self._trainer.version,
            transfer_host=transfer_host() if self.rank == 0 else "",
            shares_blobs=self._trainer.screenshots.shared is not None,
            versions=installed("torch", "transformers", "accelerate"),
        )

    async def handle(self, command: Command) -> Reply | None:
        match command:
            case pb.TrainBatch():
                return await self._train(command)
            case pb.SendWeights():
                return await self._send(command)
            case pb.SaveCheckpoint():
                return await self._save(command)
            case pb.Abort():
                if (group_id := self._sending.get(_key(command.assignment))) is not None:
                    self._loaded_senders().end(group_id, "the coordinator has given the transfer up")
                return None
            case _:
                raise CommandError(
                    pb.FAILURE_CODE_INVALID, f"a train worker does not take {type(command).__name__} commands"
                )

    async def close(self) -> None:
        """End a running update before its next micro-batch, and release the model. One of several ranks that cannot
        within CLOSE_SECONDS, or LONGEST_WAIT while it loads or saves, ends its process."""
        if self._trainer is not None:
            self._trainer.cancel()
        slow = self._trainer is None or self._saving.locked()
        limit = collectives.LONGEST_WAIT.total_seconds() if slow else CLOSE_SECONDS
        loop = asyncio.get_running_loop()
        last = loop.call_later(limit, _give_up_closing, limit) if self.world_size > 1 else None
        if self._thread is not None:
            # Waited for outside the event loop, so that other parts can close meanwhile.
            await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.shutdown, wait=True)
        if last is not None:
            last.cancel()
        if self._trainer is not None:
            await asyncio.to_thread(self._trainer.screenshots.close)
        if self._senders is not None:
            await self._senders.close()
        self._trainer, self._thread, self._writer, self._senders = None, None, None, None
        self._snapshots = Snapshots()
        self._pages.clear()
        self._begun = None
        # A model is in reference cycles, and the next one needs its memory.
        gc.collect()
        release_memory()

    async def _train(self, page: pb.TrainBatch) -> pb.Trained | None:
        key = _key(page.assignment)
        if key == self._begun:
            return None  # sent again after a lost stream: the last page gets the answer
        for older in [k for k in self._pages if k[0] == key[0] and k[1] < key[1]]:
            del self._pages[older]
        pages = self._pages.setdefault(key, {})
        pages[page.page] = page
        if len(pages) < page.pages:
            return None
        self._pages.clear()
        self._begun = key
        samples = [sample for _, one in sorted(pages.items()) for sample in one.samples]
        images = [image for one in pages.values() for image in one.images]
        trainer = self._loaded()
        started = time.perf_counter()
        spare = self._snapshots.spare()

        def update() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
            metrics = trainer.update(samples, page.total_samples, page.total_tokens, images)
            return metrics, self._snapshot(trainer, spare)

        try:
            metrics, weights = await self._train_thread(update)
        except TrainError as error:
            if error.weights_changed or isinstance(error, CancelledUpdateError):
                raise
            self._snapshots.give_back(spare)
            blamed = error.trajectories[:MOST_BLAMED] if isinstance(error, SampleError) else ()
            raise CommandError(_failure_code(error), str(error), blamed) from error
        if self.rank == 0:
            self._snapshots.stage(trainer.version, weights)
        return pb.Trained(
            update=page.update,
            weight_version=trainer.version,
            metrics=metrics,
            seconds=time.perf_counter() - started,
            remarks=trainer.remarks,
            step_entropies=entropies_to_proto(trainer.step_entropies),
            tensors=specs_to_proto(spec_of(name, tensor) for name, tensor in weights.items()),
        )

    async def _send(self, command: pb.SendWeights) -> pb.WeightsSent:
        started = time.perf_counter()
        if self.rank != 0:
            raise CommandError(pb.FAILURE_CODE_INVALID, f"rank {self.rank} does not send weights, rank 0 does")
        if command.version not in self._snapshots.versions:
            staged = ", ".join(str(version) for version in self._snapshots.versions)
            raise CommandError(pb.FAILURE_CODE_INVALID, f"version {command.version} is not staged; staged: {staged}")
        key = _key(command.assignment)
        with self._snapshots.sending(command.version) as weights:
            self._sending[key] = command.group.group_id
            try:
                sent = await self._loaded_senders().send(command.group, weights)
                gloo = command.group.transport == "gloo"  # over NCCL the replica keeps no copy to compare with
                checked = await asyncio.to_thread(checksum, weights.items()) if gloo else 0
            except TransferError as error:
                raise CommandError(pb.FAILURE_CODE_TRANSFER, str(error)) from error
            finally:
                del self._sending[key]
        return pb.WeightsSent(
            version=command.version, seconds=time.perf_counter() - started, bytes=sent, checksum=checked
        )

    async def _save(self, command: pb.SaveCheckpoint) -> pb.CheckpointSaved:
        started = time.perf_counter()
        trainer, path = self._loaded(), Path(command.path)

        def stage() -> tuple[Callable[[], None] | None, int]:
            mine = self.rank == 0 or trainer.sharded
            return trainer.stage_checkpoint(path) if mine else None, trainer.version

        async with self._saving:
            try:
                write, version = await self._train_thread(stage)
                if write is not None:
                    await asyncio.get_running_loop().run_in_executor(self._writer, write)
            except Exception as error:
                raise CommandError(pb.FAILURE_CODE_TRAINER, f"checkpoint {path} cannot be written: {error}") from error
        return pb.CheckpointSaved(path=str(path), weight_version=version, seconds=time.perf_counter() - started)

    def _snapshot(self, trainer: Trainer, spare: Weights | None) -> Weights:
        """Rank 0's copy of what replicas get, for which all ranks give their parts if weights are sharded."""
        return trainer.served(spare) if self.rank == 0 or trainer.sharded else {}

    def _loaded(self) -> Trainer:
        if self._trainer is None:
            raise CommandError(pb.FAILURE_CODE_TRAINER, "the trainer is not loaded yet")
        return self._trainer

    def _loaded_senders(self) -> Senders:
        if self._senders is None:
            raise CommandError(pb.FAILURE_CODE_TRAINER, "the trainer is not loaded yet")
        return self._senders

    async def _train_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise CommandError(pb.FAILURE_CODE_TRAINER, "the trainer is not loaded yet")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _key(assignment: pb.Assignment) -> Key:
    return assignment.assignment_id, assignment.attempt


def _give_up_closing(seconds: float) -> None:
    """A thread in a collective cannot be stopped, and the interpreter would wait for it."""
    print(
        f"this rank ends without finishing what it was doing: that took longer than {seconds:g} s, most likely because "
        "another rank is gone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _told(name: str, otherwise: str) -> int:
    """A number that the launcher of ranks tells this one. Raises UserError."""
    value = os.environ.get(name) or otherwise
    if not value.isdecimal():
        raise UserError(f"{name} is {value!r}, and must be a number: unset it, or start the ranks with a launcher")
    return int(value)


def transfer_host() -> str:
    """Where replicas reach this machine: as the user says, else where the ranks rendezvous, else only locally."""
    return os.environ.get(TRANSFER_HOST) or os.environ.get("MASTER_ADDR") or "127.0.0.1"


def _failure_code(error: TrainError) -> pb.FailureCode:
    match error:
        case UnknownScreenshotError():
            return pb.FAILURE_CODE_UNKNOWN_IMAGE
        case SampleError():
            return pb.FAILURE_CODE_INVALID
        case NonFiniteError():
            return pb.FAILURE_CODE_BROKEN
        case _:
            return pb.FAILURE_CODE_TRAINER
