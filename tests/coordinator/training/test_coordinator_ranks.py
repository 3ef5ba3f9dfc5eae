"""What the trainer is sent: pages that fit, and every screenshot's bytes once; and whom a failure blames."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dart import manifest
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, Worker
from dart.coordinator.training import ranks
from dart.coordinator.training.pages import PAGE_BYTES, TooLarge, pages_of
from dart.coordinator.training.ranks import NotSaved, TrainerLost, TrainerRanks, UnusableGroup, UpdateRefused
from dart.core.curation.batches import ReleasedGroup, samples_of
from dart.core.types import Generation, Image, Sample, Step, Task, Termination, Trajectory, VersionSpan
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire.channel import MAX_MESSAGE_BYTES, ROOM_BYTES

GENERATION = Generation((1,) * 50, (3, 4), (-0.5, -0.25), (VersionSpan(0, 0, 2),), "t")
HANG_SECONDS = 60
ONCE, APART = ("images_once",), ("images_once", "images_apart")


def member(
    name: str, steps: int, image_bytes: int, history: int = 5, generation: Generation = GENERATION
) -> Trajectory:
    images = [Image.of(f"{name}/{step}".encode().ljust(image_bytes, b"."), "image/png", 2, 2) for step in range(steps)]
    all_steps = tuple(
        Step(step, tuple(images[max(0, step - history + 1) : step + 1]), generation, None) for step in range(steps)
    )
    return Trajectory(name, "g", Task("s", "a"), "do", all_steps, Termination.ENVIRONMENT, 1.0, True, 9, 0, 1)


def group(name: str, *members: Trajectory) -> ReleasedGroup:
    own = tuple(replace(one, group_id=name) for one in members)
    return ReleasedGroup.evenly(name, own, (0.5,) * len(own))


def samples(trajectories: int, steps: int, image_bytes: int, history: int = 5) -> list[Sample]:
    return samples_of([group("g", *(member(f"t{n}", steps, image_bytes, history) for n in range(trajectories)))])


@pytest.mark.parametrize("capabilities", [(), ONCE, APART], ids=["each", "once", "apart"])
def test_pages_hold_every_sample_and_fit_into_messages(capabilities: tuple[str, ...]) -> None:
    wanted = samples(3, 20, 1 << 20)
    pages = pages_of(wanted, pb.Hello(capabilities=capabilities))
    sent = [sample for page in pages for sample in page.train_batch.samples]
    apart = [image for page in pages for image in page.train_batch.images]
    assert [(one.trajectory_id, one.step_index) for one in sent] == [(s.trajectory_id, s.index) for s in wanted]
    assert all(page.ByteSize() <= PAGE_BYTES for page in pages)
    with_samples = Counter(image.sha256 for one in sent for image in one.images if image.data)
    beside = Counter(image.sha256 for image in apart if image.data)
    everywhere = Counter(image.sha256 for one in wanted for image in one.images)
    once = Counter(set(everywhere))
    assert with_samples == {(): everywhere, ONCE: once, APART: Counter()}[capabilities]
    assert beside == (once if capabilities == APART else Counter())
    assert [[image.sha256 for image in one.images] for one in sent] == [
        [image.sha256 for image in one.images] for one in wanted
    ]


def test_twenty_large_screenshots_in_one_prompt_go_beside_the_sample() -> None:
    wanted = samples(1, 20, 3_000_000, history=20)
    pages = pages_of(wanted, pb.Hello(capabilities=APART))
    assert all(page.ByteSize() <= MAX_MESSAGE_BYTES for page in pages)
    assert sum(len(page.train_batch.images) for page in pages) == 20
    for capabilities in ((), ONCE):
        with pytest.raises(TooLarge, match=r"sample t0/\d+ has \d+ bytes, and a message has room for"):
            pages_of(wanted[-1:], pb.Hello(capabilities=capabilities))


def test_what_fits_into_no_message_is_told_by_name() -> None:
    many = 5_000_000
    tokens = Generation(range(many), (3,), (-0.5,), (VersionSpan(0, 0, 1),), "t")
    with pytest.raises(TooLarge, match="sample t0/0 has 25") as caught:
        pages_of(samples_of([group("g", member("t0", 1, 10, generation=tokens))]), pb.Hello(capabilities=APART))
    assert caught.value.trajectories == ("t0",)
    with pytest.raises(TooLarge, match="has a screenshot of"):
        pages_of(samples(1, 1, ROOM_BYTES), pb.Hello(capabilities=APART))


def test_a_share_without_samples_is_one_empty_page() -> None:
    (page,) = pages_of([], pb.Hello(capabilities=APART))
    assert page.WhichOneof("body") == "train_batch"


# ---- whom a failure blames ----


class Trainer:
    """One or more ranks, and what they are asked."""

    def __init__(self, ranks: int = 1, capabilities: tuple[str, ...] = APART) -> None:
        self.fleet = Fleet(60.0)
        self.ranks = TrainerRanks(self.fleet, ranks, StoredScreenshots(None))
        self.workers = [self._join(rank, ranks, capabilities) for rank in range(ranks)]

    def _join(self, rank: int, ranks: int, capabilities: tuple[str, ...]) -> Worker:
        worker, _ = self.fleet.admit(
            pb.Hello(
                worker_id=f"train-{rank}", instance_id=f"{rank}", role=pb.ROLE_TRAIN, rank=rank, world_size=ranks,
                capabilities=capabilities,
            )
        )  # fmt: skip
        self.fleet.became_ready(worker, pb.Ready(slots=1))
        return worker

    def update(self, number: int, batch: list[ReleasedGroup]) -> asyncio.Task[pb.Trained]:
        return asyncio.create_task(asyncio.wait_for(self.ranks.update(number, batch), HANG_SECONDS))

    async def asked(self, rank: int = 0) -> pb.TrainBatch:
        """The last page of the next batch."""
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                page = (await self.workers[rank].outbox.get()).train_batch
                if page.page + 1 == page.pages:
                    return page

    def fail(
        self, page: pb.TrainBatch, code: pb.FailureCode, *names: str, rank: int = 0, why: str = "what it says"
    ) -> None:
        failure = pb.Failure(assignment=page.assignment, code=code, message=why, trajectory_ids=names)
        self.fleet.receive(self.workers[rank], pb.SessionRequest(failure=failure))

    def train(self, page: pb.TrainBatch, *remarks: str, rank: int = 0) -> None:
        trained = pb.Trained(
            assignment=page.assignment, update=page.update, weight_version=page.update, remarks=remarks
        )
        self.fleet.receive(self.workers[rank], pb.SessionRequest(trained=trained))


@pytest.fixture
def batch() -> Iterator[list[ReleasedGroup]]:
    yield [group(name, member(f"{name}-1", 2, 10), member(f"{name}-2", 2, 10)) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("code", "names", "why"),
    [
        (pb.FAILURE_CODE_INVALID, ("b-2",), "what it says"),
        (pb.FAILURE_CODE_UNKNOWN_IMAGE, ("b-2",), "what it says"),
        (pb.FAILURE_CODE_INVALID, (), "sample b-2/0 has token 900"),  # a trainer that is too old to send ids
    ],
)
async def test_a_group_that_the_trainer_names_is_unusable(
    batch: list[ReleasedGroup], code: pb.FailureCode, names: tuple[str, ...], why: str
) -> None:
    trainer = Trainer()
    update = trainer.update(1, batch)
    first = await trainer.asked()
    trainer.fail(first, code, *names, why=why)
    with pytest.raises(UnusableGroup, match=f"the trainer refuses: train-0: {why}") as caught:
        await update
    assert caught.value.group is batch[1]
    # The rest is another batch of the same update, which the worker must not take for the one that it has answered.
    again = trainer.update(1, batch[:1])
    second = await trainer.asked()
    assert second.assignment.attempt > first.assignment.attempt
    trainer.train(second)
    assert (await again).weight_version == 1


@pytest.mark.parametrize(
    ("code", "names"),
    [(pb.FAILURE_CODE_TRAINER, ()), (pb.FAILURE_CODE_INVALID, ()), (pb.FAILURE_CODE_INVALID, ("of another batch",))],
)
async def test_a_batch_that_is_refused_without_a_name_is_tried_once_more(
    batch: list[ReleasedGroup], code: pb.FailureCode, names: tuple[str, ...]
) -> None:
    trainer = Trainer()
    update = trainer.update(1, batch)
    trainer.fail(await trainer.asked(), code, *names)
    trainer.train(await trainer.asked())
    assert (await update).weight_version == 1, "once may have been chance"
    update = trainer.update(2, batch)
    for _ in range(2):
        trainer.fail(await trainer.asked(), code, *names)
    with pytest.raises(UpdateRefused, match="the trainer refuses: train-0: what it says"):
        await update


async def test_what_failed_is_not_remembered_for_the_rest_of_the_run(batch: list[ReleasedGroup]) -> None:
    trainer = Trainer()
    (worker,) = trainer.workers
    update = trainer.update(1, batch)
    for _ in range(2):
        trainer.fail(await trainer.asked(), pb.FAILURE_CODE_TRAINER)
    with pytest.raises(UpdateRefused):
        await update
    work = pb.Assignment(assignment_id="w1", attempt=1)
    sending = asyncio.create_task(trainer.ranks.send_weights(work, 1, weights_pb2.TransferGroup()))
    asked = (await worker.outbox.get()).send_weights
    failure = pb.Failure(assignment=asked.assignment, code=pb.FAILURE_CODE_TRANSFER, message="the replica is gone")
    trainer.fleet.receive(worker, pb.SessionRequest(failure=failure))
    with pytest.raises(CommandFailed):
        await sending
    assert not worker.end._work


async def test_a_trainer_that_is_beyond_repair_ends_the_run_at_once(batch: list[ReleasedGroup]) -> None:
    trainer = Trainer()
    update = trainer.update(1, batch)
    trainer.fail(await trainer.asked(), pb.FAILURE_CODE_BROKEN)
    with pytest.raises(TrainerLost, match="what it says: look at logs"):
        await update


async def test_ranks_that_do_not_give_up_together_are_lost(
    batch: list[ReleasedGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.coordinator.training.ranks.REFUSAL_SECONDS", 0.05)
    trainer = Trainer(ranks=2)
    update = trainer.update(1, batch)
    trainer.fail(await trainer.asked(1), pb.FAILURE_CODE_TRAINER, rank=1)
    with pytest.raises(TrainerLost, match="the trainer stopped: train-1: what it says"):
        await update


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("knows", [0, 1])
async def test_the_rank_that_names_the_group_is_heard_whoever_answers_first(
    batch: list[ReleasedGroup], knows: int, order: tuple[int, int]
) -> None:
    trainer = Trainer(ranks=2)
    update = trainer.update(1, batch)
    for rank in order:
        page = await trainer.asked(rank)
        if rank == knows:
            trainer.fail(page, pb.FAILURE_CODE_INVALID, "a-1", rank=rank)
        else:
            trainer.fail(page, pb.FAILURE_CODE_TRAINER, rank=rank, why="another rank could not read its samples")
        await asyncio.sleep(0)
    with pytest.raises(UnusableGroup, match="what it says") as caught:
        await update
    assert caught.value.group is batch[0]


async def test_what_any_rank_remarks_is_told(batch: list[ReleasedGroup]) -> None:
    trainer = Trainer(ranks=2)
    update = trainer.update(1, batch)
    trainer.train(await trainer.asked(0), "one thing", rank=0)
    trainer.train(await trainer.asked(1), "another", rank=1)
    assert list((await update).remarks) == ["one thing", "another"]


async def test_a_sample_that_fits_into_no_message_makes_its_group_unusable_before_anything_is_sent() -> None:
    trainer = Trainer(ranks=2)
    tokens = Generation(range(5_000_000), (3,), (-0.5,), (VersionSpan(0, 0, 1),), "t")
    batch = [group("a", member("a-1", 2, 10)), group("b", member("b-1", 1, 10, generation=tokens))]
    with pytest.raises(UnusableGroup, match=r"sample b-1/0 has 25\d+ bytes") as caught:
        await trainer.ranks.update(1, batch)
    assert caught.value.group is batch[1]
    assert not any(len(worker.outbox) for worker in trainer.workers)


async def test_a_rank_that_leaves_ends_the_run(batch: list[ReleasedGroup]) -> None:
    trainer = Trainer(ranks=2)
    update = trainer.update(1, batch)
    await trainer.asked(0)
    trainer.fleet.lose(trainer.workers[1], "it went silent")
    with pytest.raises(TrainerLost, match="a rank is gone"):
        await update


async def saved(folder: Path, version: int) -> pb.CheckpointSaved:
    """What comes of a save of version 5, when the trainer answers that it has saved this version."""
    trainer = Trainer()
    (worker,) = trainer.workers
    saving = asyncio.create_task(trainer.ranks.save(folder, 5))
    asked = (await worker.outbox.get()).save_checkpoint
    answer = pb.CheckpointSaved(assignment=asked.assignment, path=asked.path, weight_version=version)
    trainer.fleet.receive(worker, pb.SessionRequest(checkpoint_saved=answer))
    return await saving


@pytest.mark.parametrize("version", [4, 5, 6])
async def test_a_checkpoint_of_older_weights_than_the_trainer_has_made_is_none(tmp_path: Path, version: int) -> None:
    with manifest.written(tmp_path / "checkpoint") as folder:
        (folder / "weights").touch()
    if version < 5:
        with pytest.raises(NotSaved, match="saved version 4, although it has made version 5"):
            await saved(tmp_path / "checkpoint", version)
    else:
        assert (await saved(tmp_path / "checkpoint", version)).weight_version == version


def stale(path: Path) -> bool:
    raise OSError(errno.ESTALE, "Stale file handle", str(path))


async def test_a_checkpoint_that_the_coordinator_does_not_see_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine and the trainer's have no file system in common, or a slow one."""
    monkeypatch.setattr(ranks, "LOOK_SECONDS", 0.01)
    seen = asyncio.create_task(saved(tmp_path / "late", 5))
    await asyncio.sleep(0.1)
    assert not seen.done()
    with manifest.written(tmp_path / "late") as folder:
        (folder / "weights").touch()
    assert (await seen).weight_version == 5
    monkeypatch.setattr(ranks, "SEEN_SECONDS", 0.1)
    with pytest.raises(NotSaved, match=r"it is not there: put run\.directory on a file system") as raised:
        await saved(tmp_path / "elsewhere", 5)
    assert not raised.value.may_pass
    monkeypatch.setattr(Path, "is_file", stale)
    with pytest.raises(NotSaved, match="it is not there") as raised:
        await saved(tmp_path / "late", 5)
    assert raised.value.may_pass, "the file system failed, and may be there again"
