"""The trainer feed: update after update, one stream per rank.

`update` waits for every rank's `Trained`, never for sampling to end, nor for weights to arrive anywhere. All ranks take
part in each update; a lost rank ends the run, because the optimiser's state went with it, and `--resume` goes on from
the last checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dart.coordinator.fleet.sessions import CommandFailed, Fleet, InfrastructureError, Worker
from dart.core.curation.feed import ReleasedGroup, Sample, balance, samples_of
from dart.core.usage import Ledger, TrainerState
from dart.errors import UserError
from dart.screenshots.stored import ScreenshotLost, StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire.capabilities import IMAGES_ONCE, has
from dart.wire.channel import MAX_MESSAGE_BYTES
from dart.wire.convert import write_sample

log = logging.getLogger(__name__)

PAGE_BYTES = MAX_MESSAGE_BYTES * 3 // 4
IMAGE_BYTES, NAME_BYTES = 128, 1024
"""Of an image beside its data, and of a sample's names and numbers, at most."""


TRAINER = "trainer"


class UnusableGroup(Exception):
    """A screenshot of the group is gone; the batch was not trained on."""

    def __init__(self, group: ReleasedGroup, why: str) -> None:
        super().__init__(why)
        self.group = group


class NotSaved(UserError):
    """The trainer is there, and its checkpoint could not be written."""


class TrainerLost(UserError):
    """A rank left or failed in the middle of an update."""


class _UnknownScreenshot(Exception):
    """A rank has not found a screenshot where it was said to be, and has not trained."""


class TrainerRanks:
    """The ranks as one trainer."""

    def __init__(self, fleet: Fleet, ranks: int, screenshots: StoredScreenshots) -> None:
        self._screenshots = screenshots
        self._size = ranks
        self._ranks: dict[int, Worker] = {}
        self._complete = asyncio.Event()
        self._numbers = itertools.count(1)
        self.usage = Ledger({TrainerState.TRAINING}, time.monotonic())
        """All ranks are one: they work together."""
        self._work: Counter[TrainerState] = Counter()
        self._state = TrainerState.IDLE
        self.lost = asyncio.Event()
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

    @property
    def rank0(self) -> Worker:
        return self._ranks[0]

    async def complete(self) -> None:
        """Wait until every rank is ready."""
        await self._complete.wait()

    async def update(self, number: int, batch: Sequence[ReleasedGroup]) -> pb.Trained:
        """Train on a batch; rank 0's reply. Raises TrainerLost, UnusableGroup."""
        with self._doing(TrainerState.TRAINING):
            if not all(rank.shares_blobs for rank in self._ranks.values()):
                batch = await self._filled(batch)
            try:
                return await self._update(number, batch)
            except _UnknownScreenshot:
                log.warning("the trainer does not find a screenshot: it is sent those of the update")
                return await self._update(number, await self._filled(batch), attempt=2)

    async def _update(self, number: int, batch: Sequence[ReleasedGroup], attempt: int = 1) -> pb.Trained:
        samples = samples_of(batch)
        tokens = sum(len(sample.step.generation.token_ids) for sample in samples)
        shares = balance(samples, self._size)

        def pages(rank: int) -> list[pb.SessionResponse]:
            once = has(self._ranks[rank].hello, IMAGES_ONCE)
            made = _pages(shares[rank], once)
            for page, message in enumerate(made):
                batch = message.train_batch
                batch.assignment.assignment_id, batch.assignment.attempt = f"u{number}", attempt
                batch.update, batch.page, batch.pages = number, page, len(made)
                batch.total_samples, batch.total_tokens = len(samples), tokens
            return made

        replies = await self._all(pages, f"u{number}", attempt)
        versions = {reply.weight_version for reply in replies}
        if len(versions) != 1:
            raise TrainerLost(f"ranks disagree about the version after update {number}: {sorted(versions)}")
        trained: pb.Trained = replies[0]
        return trained

    async def _filled(self, batch: Sequence[ReleasedGroup]) -> list[ReleasedGroup]:
        """With the bytes of all screenshots. Raises UnusableGroup where they cannot be had."""
        filled = []
        for group in batch:
            try:
                members = [await self._screenshots.filled(member) for member in group.trajectories]
            except ScreenshotLost as error:
                raise UnusableGroup(group, str(error)) from error
            filled.append(replace(group, trajectories=tuple(members)))
        return filled

    async def save(self, path: Path) -> pb.CheckpointSaved:
        """A checkpoint of the weights as they are now. Raises TrainerLost, and NotSaved when it cannot be written."""
        name = f"c{next(self._numbers)}"
        command = pb.SaveCheckpoint(assignment=pb.Assignment(assignment_id=name, attempt=1), path=str(path))
        with self._doing(TrainerState.SAVING):
            try:
                replies = await self._all(
                    lambda rank: [pb.SaveCheckpoint.FromString(command.SerializeToString())], name
                )
            except TrainerLost as error:
                if isinstance(error.__cause__, CommandFailed):
                    raise NotSaved(str(error.__cause__)) from error
                raise
        saved: pb.CheckpointSaved = replies[0]
        return saved

    async def send_weights(
        self, assignment: pb.Assignment, version: int, group: weights_pb2.TransferGroup
    ) -> pb.WeightsSent:
        """Rank 0 sends a version's snapshot. Raises InfrastructureError."""
        reply: pb.WeightsSent = await self.rank0.call(
            pb.SendWeights(assignment=assignment, version=version, group=group)
        )
        self.rank0.end_assignment(assignment.assignment_id, assignment.attempt)
        return reply

    @contextmanager
    def _doing(self, state: TrainerState) -> Iterator[None]:
        """Account for the trainer's time. What is saved in the middle of an update is the update's time."""
        self._work[state] += 1
        self._account()
        try:
            yield
        finally:
            self._work[state] -= 1
            self._account()

    def _account(self) -> None:
        busy = (state for state in (TrainerState.TRAINING, TrainerState.SAVING) if self._work[state])
        state = next(busy, TrainerState.IDLE)
        self.usage.move(TRAINER, self._state, state, time.monotonic())
        self._state = state

    async def _all(self, commands: Any, assignment_id: str, attempt: int = 1) -> list[Any]:
        async def one(rank: int) -> Any:
            reply = await self._ranks[rank].call(*commands(rank))
            self._ranks[rank].end_assignment(assignment_id, attempt)
            return reply

        try:
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(one(rank)) for rank in range(self._size)]
        except* (InfrastructureError, KeyError) as errors:
            if attempt == 1 and any(
                getattr(e, "code", None) == pb.FAILURE_CODE_UNKNOWN_IMAGE for e in errors.exceptions
            ):
                raise _UnknownScreenshot from errors
            first = errors.exceptions[0]
            why = str(first) if isinstance(first, CommandFailed) else f"a rank is gone ({first})"
            raise TrainerLost(
                f"the trainer stopped: {why}: look at logs/train-*.log in the run directory, then go on with --resume"
            ) from first
        return [task.result() for task in tasks]

    def _joined(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_TRAIN:
            return
        self._ranks[worker.hello.rank] = worker
        if len(self._ranks) == self._size:
            now = time.monotonic()
            if self.usage.counts(TRAINER):
                self.usage.left(TRAINER, now)
            self.usage.joined(TRAINER, TrainerState.IDLE, 1, now)
            self._complete.set()

    def _left(self, worker: Worker) -> None:
        if worker.role == pb.ROLE_TRAIN:
            self._ranks.pop(worker.hello.rank, None)
            self._complete.clear()
            self.lost.set()


def _pages(samples: Sequence[Sample], once: bool) -> list[pb.SessionResponse]:
    """Messages of at most PAGE_BYTES each, at least one, which may be empty.

    `once`: a screenshot's bytes are with the first sample alone that has it; the steps of a trajectory share most.
    """
    pages = [pb.SessionResponse(train_batch=pb.TrainBatch())]
    held: set[bytes] = set()
    size = 0
    for sample in samples:
        weight = _most_bytes(sample, held)
        if size and size + weight > PAGE_BYTES:
            pages.append(pb.SessionResponse(train_batch=pb.TrainBatch()))
            size = 0
        into = pages[-1].train_batch.samples.add()
        write_sample(into, sample.trajectory, sample.step, sample.advantage, held)
        size += weight
        if once:
            held.update(image.sha256 for image in sample.step.images)
    return pages


def _most_bytes(sample: Sample, held: set[bytes]) -> int:
    """Of its message: screenshots, five bytes a token at most, four a log-probability, names and numbers."""
    generation = sample.step.generation
    images = sum(IMAGE_BYTES + (0 if image.sha256 in held else len(image.data)) for image in sample.step.images)
    return images + 5 * sample.tokens + 4 * len(generation.logprobs) + 32 * len(generation.versions) + NAME_BYTES


def timed(trained: pb.Trained, begun: float) -> dict[str, float]:
    """An update's metrics with its times: in the trainer, and seen from here (seconds)."""
    return {**trained.metrics, "seconds": trained.seconds, "round_trip_seconds": time.monotonic() - begun}
