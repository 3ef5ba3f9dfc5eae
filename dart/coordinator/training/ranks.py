"""Feeds the trainer: update after update, one stream per rank.

`update` waits for every rank's `Trained`, never for sampling to end, nor for weights to arrive anywhere. All ranks take
part in each update. A lost rank ends the run's processes, because the optimiser's state is lost with it: `dart train`
then starts new ones, which continue from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dart import manifest
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, InfrastructureError, Worker, WorkerLost
from dart.coordinator.training.pages import TooLarge, pages_of
from dart.core.curation.batches import ReleasedGroup, balance, samples_of
from dart.core.usage import Ledger, TrainerState
from dart.errors import ProcessLost, UserError, ungrouped
from dart.screenshots.stored import ScreenshotLost, StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire.capabilities import ABORTS_TRANSFERS, has
from dart.wire.role import Command

log = logging.getLogger(__name__)

REFUSALS = (pb.FAILURE_CODE_UNKNOWN_IMAGE, pb.FAILURE_CODE_INVALID, pb.FAILURE_CODE_TRAINER)
"""A rank that answers with one of these has not changed its weights; the most informative comes first."""
REFUSAL_SECONDS = 30.0
"""When one rank has refused, the others have this long to report that they gave up too."""
SEEN_SECONDS, LOOK_SECONDS = 60.0, 0.5
"""How long a checkpoint that another machine has written may take to be seen here: network file systems remember for a
while what was not there."""
TRAINER = "trainer"


class UnusableGroup(Exception):
    """A screenshot of the group is gone, or the trainer refuses a sample of it; the batch was not trained on."""

    def __init__(self, group: ReleasedGroup, why: str) -> None:
        super().__init__(why)
        self.group = group


class NotSaved(UserError):
    """The trainer is alive, but its checkpoint could not be written, or is not seen here.

    `may_pass`: whether a further try soon may help.
    """

    def __init__(self, why: str, *, may_pass: bool = True) -> None:
        super().__init__(why)
        self.may_pass = may_pass


class TrainerLost(ProcessLost):
    """A rank left or failed in the middle of an update, and the optimiser's state is lost with it."""


class UpdateRefused(UserError):
    """Every rank is connected and has answered, and at least one refused: none has trained on the batch.

    `trajectories`: those that the ranks blame.
    """

    def __init__(self, why: str, trajectories: Collection[str]) -> None:
        super().__init__(why)
        self.trajectories = trajectories


class _UnknownScreenshot(Exception):
    """A rank has not found a screenshot where it should be, and has not trained."""


class TrainerRanks:
    """All ranks together, as one trainer."""

    def __init__(self, fleet: Fleet, ranks: int, screenshots: StoredScreenshots) -> None:
        self._screenshots = screenshots
        self._size = ranks
        self._ranks: dict[int, Worker] = {}
        self._complete = asyncio.Event()
        self._numbers = itertools.count(1)
        self._attempts: tuple[int, int] = 0, 0
        """The newest update, and how often the ranks were asked for it: they answer each attempt once."""
        self.usage = Ledger({TrainerState.TRAINING}, time.monotonic())
        """All ranks count as one slot, because they work together."""
        self._work: Counter[TrainerState] = Counter()
        self._state = TrainerState.IDLE
        self.lost = asyncio.Event()
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

    def __len__(self) -> int:
        """How many are ready."""
        return len(self._ranks)

    @property
    def rank0(self) -> Worker:
        """Raises WorkerLost while there is none."""
        if 0 not in self._ranks:
            raise WorkerLost("the trainer is gone", TRAINER)
        return self._ranks[0]

    @property
    def are_complete(self) -> bool:
        """Whether every rank is ready."""
        return self._complete.is_set()

    @property
    def idle(self) -> bool:
        """Every rank is ready, and none owes an answer."""
        return self.are_complete and self._state is TrainerState.IDLE

    async def complete(self) -> None:
        """Wait until every rank is ready."""
        await self._complete.wait()

    async def update(self, number: int, batch: Sequence[ReleasedGroup]) -> pb.Trained:
        """Train on a batch. Returns rank 0's reply, with the remarks and entropies of all ranks.

        Raises TrainerLost; UnusableGroup if one group is to blame; UpdateRefused if the trainer refuses the batch twice
        without naming a sample of it.
        """
        with self._doing(TrainerState.TRAINING):
            try:
                return await self._tried(number, batch)
            except UpdateRefused as error:
                log.warning("the trainer has refused update %d, and is asked once more: %s", number, error)
                return await self._tried(number, batch)

    async def _tried(self, number: int, batch: Sequence[ReleasedGroup]) -> pb.Trained:
        shared = all(rank.shares_blobs for rank in self._ranks.values())
        try:
            try:
                return await self._update(number, batch if shared else await self._filled(batch), ask=shared)
            except _UnknownScreenshot:
                log.warning("the trainer cannot find a screenshot: sending all screenshots of the update")
                return await self._update(number, await self._filled(batch), ask=False)
        except (UpdateRefused, TooLarge) as error:
            if (group := _named(batch, error.trajectories, str(error))) is not None:
                raise UnusableGroup(group, str(error)) from error
            raise

    async def _update(self, number: int, batch: Sequence[ReleasedGroup], *, ask: bool) -> pb.Trained:
        """`ask`: the trainer may ask for screenshots that it does not find (raises _UnknownScreenshot)."""
        newest, attempts = self._attempts
        attempt = attempts + 1 if newest == number else 1
        self._attempts = number, attempt
        samples = samples_of(batch)
        tokens = sum(len(sample.generation.token_ids) for sample in samples)
        # Make all pages before sending the first: a rank that has begun waits for the others.
        hellos = [self._rank(rank).hello for rank in range(self._size)]
        dealt = zip(balance(samples, self._size), hellos, strict=True)
        # 64 trajectories of 30 long steps take most of a second, in which environments and replicas are to be served.
        shares = [await asyncio.to_thread(pages_of, share, hello) for share, hello in dealt]
        for pages in shares:
            for page, message in enumerate(pages):
                command = message.train_batch
                command.assignment.assignment_id, command.assignment.attempt = f"u{number}", attempt
                command.update, command.page, command.pages = number, page, len(pages)
                command.total_samples, command.total_tokens = len(samples), tokens
        replies: list[pb.Trained] = await self._all(shares.__getitem__, f"u{number}", attempt, asks_screenshots=ask)
        versions = {reply.weight_version for reply in replies}
        if len(versions) != 1:
            raise TrainerLost(f"the ranks have different versions after update {number}, {sorted(versions)}")
        trained = replies[0]
        for other in replies[1:]:
            trained.remarks.extend(other.remarks)
            trained.step_entropies.extend(other.step_entropies)
        return trained

    def _rank(self, rank: int) -> Worker:
        if rank not in self._ranks:
            raise _stopped(f"a rank is gone ({rank})")
        return self._ranks[rank]

    async def _filled(self, batch: Sequence[ReleasedGroup]) -> list[ReleasedGroup]:
        """The batch with the bytes of all screenshots. Raises UnusableGroup if some are not available."""
        filled = []
        for group in batch:
            try:
                members = [await self._screenshots.filled(member) for member in group.trajectories]
            except ScreenshotLost as error:
                raise UnusableGroup(group, str(error)) from error
            filled.append(replace(group, trajectories=tuple(members)))
        return filled

    async def save(self, path: Path, version: int) -> pb.CheckpointSaved:
        """Save the current weights, which are of this version or newer, in a checkpoint. Updates may go on meanwhile.

        Raises TrainerLost, and NotSaved when it cannot be written, or this machine does not see it.
        """
        name = f"c{next(self._numbers)}"
        command = pb.SaveCheckpoint(assignment=pb.Assignment(assignment_id=name, attempt=1), path=str(path))
        with self._doing(TrainerState.SAVING):
            try:
                replies = await self._all(
                    lambda rank: [pb.SaveCheckpoint.FromString(command.SerializeToString())], name
                )
            except UpdateRefused as error:  # all ranks have answered, and at least one of them could not write
                raise NotSaved(str(error.__cause__)) from error
        saved: pb.CheckpointSaved = replies[0]
        if saved.weight_version < version:
            raise NotSaved(f"the trainer saved version {saved.weight_version}, although it has made version {version}")
        await _check_seen(path)
        return saved

    async def send_weights(
        self, assignment: pb.Assignment, version: int, group: weights_pb2.TransferGroup
    ) -> pb.WeightsSent:
        """Rank 0 sends a version's snapshot, and is told when that is cancelled. Raises InfrastructureError."""
        worker = self.rank0
        command = pb.SendWeights(assignment=assignment, version=version, group=group)
        try:
            reply: pb.WeightsSent = await worker.call(command)
        except asyncio.CancelledError:
            # Over NCCL it would go on waiting for the replica, and the next replica's weights for it.
            if has(worker.hello, ABORTS_TRANSFERS):
                worker.tell(pb.Abort(assignment=assignment))
            raise
        finally:
            worker.end_assignment(assignment.assignment_id, assignment.attempt)
        return reply

    @contextmanager
    def _doing(self, state: TrainerState) -> Iterator[None]:
        """Account for the trainer's time. Saving in the middle of an update counts as the update's time."""
        self._work[state] += 1
        self._account()
        done = True
        try:
            yield
        except asyncio.CancelledError:  # the trainer goes on with what nobody waits for any more
            done = False
            raise
        finally:
            self._work[state] -= done
            self._account()

    def _account(self) -> None:
        busy = (state for state in (TrainerState.TRAINING, TrainerState.SAVING) if self._work[state])
        state = next(busy, TrainerState.IDLE)
        self.usage.move(TRAINER, self._state, state, time.monotonic())
        self._state = state

    async def _all(
        self,
        commands: Callable[[int], Sequence[Command | pb.SessionResponse]],
        assignment_id: str,
        attempt: int = 1,
        *,
        asks_screenshots: bool = False,
    ) -> list[Any]:
        """Every rank's reply. Raises TrainerLost, UpdateRefused; _UnknownScreenshot with `asks_screenshots`."""

        async def one(rank: int) -> Any:
            worker = self._ranks[rank]
            try:
                reply = await worker.call(*commands(rank))
            except CommandFailed as failure:
                # The others give up too, each with its own message, and one of them may know why.
                patience.reschedule(asyncio.get_running_loop().time() + REFUSAL_SECONDS)
                reply = failure
            worker.end_assignment(assignment_id, attempt)
            return reply

        try:
            with ungrouped(InfrastructureError, KeyError):
                async with asyncio.timeout(None) as patience, asyncio.TaskGroup() as calls:
                    tasks = [calls.create_task(one(rank)) for rank in range(self._size)]
        except (InfrastructureError, KeyError) as error:
            raise _stopped(f"a rank is gone ({error})") from error
        except TimeoutError:
            pass  # some ranks have refused, and the others do not answer
        replies = [task.result() for task in tasks if not task.cancelled()]
        failures = {reply.code: reply for reply in reversed(replies) if isinstance(reply, CommandFailed)}
        if asks_screenshots and pb.FAILURE_CODE_UNKNOWN_IMAGE in failures:
            raise _UnknownScreenshot
        for code in REFUSALS:
            if code in failures and len(replies) == self._size:
                blamed = {name for failure in failures.values() for name in failure.trajectories}
                raise UpdateRefused(f"the trainer refuses: {failures[code]}", blamed) from failures[code]
        for failure in failures.values():
            raise _stopped(str(failure)) from failure
        return replies

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


def _stopped(why: str) -> TrainerLost:
    return TrainerLost(f"the trainer stopped: {why}: look at logs/train*.log in the run directory")


def _named(batch: Sequence[ReleasedGroup], trajectories: Collection[str], why: str) -> ReleasedGroup | None:
    """The first group that the trainer blames: by trajectory ids, or, for a trainer too old to send them, by its
    message ("sample g000007-3/2 has ...")."""
    for group in batch:
        if any(member.id in trajectories or f"sample {member.id}/" in why for member in group.trajectories):
            return group
    return None


def timed(trained: pb.Trained, begun: float) -> dict[str, float]:
    """An update's metrics with its times in seconds: in the trainer, and as measured here."""
    return {**trained.metrics, "seconds": trained.seconds, "round_trip_seconds": time.monotonic() - begun}


async def _check_seen(checkpoint: Path) -> None:
    """Raises NotSaved unless a checkpoint that the trainer has written is here, too.

    A file system that is shared over a network may fail for a while.
    """
    failed: OSError | None = None
    try:
        async with asyncio.timeout(SEEN_SECONDS):
            while True:
                try:
                    if await asyncio.to_thread((checkpoint / manifest.NAME).is_file):
                        return
                    failed = None
                except OSError as error:
                    failed = error
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise NotSaved(
            f"the trainer says that it has written {checkpoint}, and it is not there: put run.directory on a file "
            "system that the coordinator and the trainer share",
            may_pass=failed is not None,
        ) from failed
