"""Screenshots in the run's directory: who sees it writes and reads there, and who does not gets the bytes."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_samples import fleet, replica
from store_samples import image, trajectory

from dart import config
from dart.agent.chat import chat_messages
from dart.config import SharedBlobs
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError
from dart.coordinator.fleet.welcome import welcome
from dart.coordinator.start import Start
from dart.coordinator.training.ranks import TrainerRanks, UnusableGroup
from dart.core.curation.batches import ReleasedGroup
from dart.core.types import Block, Image, Markup, Prompt
from dart.errors import UserError
from dart.job import Train
from dart.screenshots.directory import ScreenshotDirectory
from dart.screenshots.holder import Holder
from dart.screenshots.lookup import UnknownScreenshot
from dart.screenshots.shared import SharedScreenshots
from dart.screenshots.stored import StoredScreenshots
from dart.store.blobs import BlobStore
from dart.v1 import session_pb2 as pb


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def told(blobs: BlobStore) -> SharedBlobs:
    shared = StoredScreenshots(blobs).share()
    assert shared is not None
    return shared


def seen(blobs: BlobStore) -> SharedScreenshots:
    shared = SharedScreenshots.seen(told(blobs))
    assert shared is not None
    return shared


def bare(one: Image) -> Image:
    return replace(one, data=b"")


# ---- the worker's end ----


def test_what_a_worker_writes_is_in_the_store_and_what_is_there_it_reads(blobs: BlobStore) -> None:
    written, there = image("written"), image("there")
    assert seen(blobs).put(written) == bare(written)
    assert blobs.get(written.sha256) == written.data
    blobs.put(there)
    assert seen(blobs).get(there.sha256) == there.data
    assert seen(blobs).get(image("nowhere").sha256) == b""


def test_only_the_same_directory_is_shared(blobs: BlobStore, tmp_path: Path) -> None:
    assert SharedScreenshots.seen(None) is None
    same = told(blobs)
    assert SharedScreenshots.seen(same.model_copy(update={"directory": tmp_path / "not here"})) is None
    other = told(BlobStore(tmp_path / "other"))
    assert SharedScreenshots.seen(same.model_copy(update={"directory": other.directory})) is None
    told(blobs)
    assert SharedScreenshots.seen(same) is None, "a run that goes on elsewhere does not take a copy for its own"


def test_another_directory_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine" / "tmp").mkdir(parents=True)
    old = tmp_path / "mine" / "tmp" / "file"
    old.write_text("mine")
    os.utime(old, (0, 0))
    assert SharedScreenshots.seen(SharedBlobs(directory=tmp_path / "mine", id="word"), writes=True) is None
    assert sorted(path.name for path in (tmp_path / "mine").rglob("*")) == ["file", "tmp"]


def test_who_may_only_read_shares_what_others_write(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ScreenshotDirectory) -> None:
        raise UserError("blob directory cannot be made (Permission denied)")

    shared = told(blobs)
    monkeypatch.setattr(ScreenshotDirectory, "prepare", refuse)
    assert SharedScreenshots.seen(shared) is not None
    assert SharedScreenshots.seen(shared, writes=True) is None


def test_a_worker_that_does_not_know_of_it_is_told_nothing(blobs: BlobStore) -> None:
    made = config.load(Path("configs/miniwob_cpu.yaml"))
    new, old = (
        welcome(made, Start(), pb.Hello(role=pb.ROLE_ENV, capabilities=capabilities), Train(), told(blobs))
        for capabilities in (["oracle", "shared_blobs"], ["oracle"])
    )
    assert "shared_blobs" in json.loads(new)
    assert "shared_blobs" not in json.loads(old), "it would refuse a field that it does not know"


def test_what_cannot_be_written_is_sent(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, one = seen(blobs), image("too much")

    def full(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared._directory, "write", full)
    assert shared.put(one) == one


def test_a_file_that_a_power_failure_cut_short_is_written_again(blobs: BlobStore) -> None:
    shared, one = seen(blobs), image("cut")
    shared.put(one)
    assert blobs.directory is not None
    (blobs.directory.root / one.sha256.hex()[:2] / one.sha256.hex()).write_bytes(b"half")
    shared.put(one)
    assert blobs.get(one.sha256) == one.data


def test_a_replica_reads_what_comes_by_digest_alone(blobs: BlobStore) -> None:
    from io import BytesIO

    from PIL import Image as Pillow

    file = BytesIO()
    Pillow.new("RGB", (4, 2)).save(file, "PNG")
    one = Image.of(file.getvalue(), "image/png", 4, 2)
    holder = Holder(8, seen(blobs))
    with pytest.raises(UnknownScreenshot):
        holder.resolve([bare(one)])
    blobs.put(one)
    assert holder.resolve([bare(one)]) == [one]


# ---- the coordinator's end ----


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("trouble", ["missing", "no digest", "stale", "not readable"])
async def test_a_screenshot_that_cannot_be_had_fails_the_attempt(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, sharing: bool, trouble: str
) -> None:
    one = bare(image("screen"))
    if trouble == "no digest":
        one = replace(one, sha256=b"")
    assert blobs.directory is not None
    if trouble in ("stale", "not readable"):

        def fails(name: str) -> bytes:
            raise OSError(116, "Stale file handle") if trouble == "stale" else PermissionError(13, "Permission denied")

        monkeypatch.setattr(blobs.directory, "read", fails)

    def unknown(command: Any) -> Any:
        return pb.Failure(code=pb.FAILURE_CODE_UNKNOWN_IMAGE, message="not there")

    async with fleet(rollout=unknown, blobs=blobs, sharing={"rollout"} if sharing else set()) as (_, pool):
        with pytest.raises(InfrastructureError, match="a screenshot is not available"):
            await pool.generate(Prompt((Block((one,)),), (one,)), 1.0, 40, None)


async def test_what_a_replica_holds_is_known_however_many_ask_at_once(blobs: BlobStore) -> None:
    """The store is read between looking and sending; others send meanwhile."""
    screens = [image(f"screen {number}") for number in range(12)]
    blobs.put_many(screens)
    held: OrderedDict[bytes, None] = OrderedDict()
    misses, rng = 0, random.Random(1)

    def serve(command: Any) -> Any:
        nonlocal misses
        for part in command.prompt:
            digest = part.image.sha256
            if digest in held:
                held.move_to_end(digest)
            elif part.image.data:
                held[digest] = None
                while len(held) > 8:
                    held.popitem(last=False)
            else:
                misses += 1
        return replica(command)

    async with fleet(rollout=serve, blobs=blobs) as (_, pool):

        async def ask() -> None:
            shown = bare(screens[rng.randrange(len(screens))])
            await pool.generate(Prompt((Block((shown,)),), (shown,)), 1.0, 40, None)

        for _ in range(100):
            await asyncio.gather(*(ask() for _ in range(4)))
    assert misses == 0


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("stored", [True, False])
async def test_a_replica_gets_the_bytes_that_it_cannot_have_otherwise(
    blobs: BlobStore, sharing: bool, stored: bool
) -> None:
    one = image("screen")
    if stored:
        blobs.put(one)
    given = bare(one) if stored else one
    prompt = Prompt((Block((Markup("look: "), given)),), (given,))
    sent: list[bytes] = []

    def serve(command: Any) -> Any:
        sent.extend(part.image.data for part in command.prompt if part.HasField("image"))
        return replica(command)

    async with fleet(rollout=serve, blobs=blobs, sharing={"rollout"} if sharing else set()) as (_, pool):
        await pool.generate(prompt, 1.0, 40, None)
        await pool.generate(prompt, 1.0, 40, None)
    assert sent == [b"" if sharing and stored else one.data, b""], "and never twice"


async def test_a_replica_that_has_lost_a_shared_screenshot_is_sent_it(blobs: BlobStore) -> None:
    one = image("screen")
    blobs.put(one)
    sent: list[bytes] = []

    def serve(command: Any) -> Any:
        if not isinstance(command, pb.Generate):
            return None
        sent.append(command.prompt[0].image.data)
        if not sent[-1]:
            return pb.Failure(code=pb.FAILURE_CODE_UNKNOWN_IMAGE, message="its file system is slow today")
        return replica(command)

    async with fleet(rollout=serve, blobs=blobs, sharing={"rollout"}) as (_, pool):
        await pool.generate(Prompt((Block((bare(one),)),), (bare(one),)), 1.0, 40, None)
    assert sent == [b"", one.data]


@pytest.mark.parametrize("sharing", [True, False])
async def test_a_trainer_gets_the_bytes_that_it_cannot_have_otherwise(blobs: BlobStore, sharing: bool) -> None:
    full = trajectory("t", "g")
    wanted = [one for step in full.steps for one in step.images]
    blobs.put_many(wanted)
    steps = tuple(replace(step, images=tuple(map(bare, step.images))) for step in full.steps)
    group = ReleasedGroup.evenly("g", (replace(full, steps=steps),), (1.0,))

    made = Fleet(60.0)
    ranks = TrainerRanks(made, 1, StoredScreenshots(blobs))
    worker, _ = made.admit(pb.Hello(worker_id="train", instance_id="i", role=pb.ROLE_TRAIN, world_size=1))
    made.became_ready(worker, pb.Ready(slots=1, shares_blobs=sharing))
    update = asyncio.create_task(ranks.update(1, [group]))
    page = (await worker.outbox.get()).train_batch
    made.receive(worker, pb.SessionRequest(trained=pb.Trained(assignment=page.assignment, update=1, weight_version=1)))
    await update
    sent = [one.data for sample in page.samples for one in sample.images]
    assert sent == [b"" if sharing else one.data for one in wanted]


async def test_a_trainer_that_does_not_find_a_screenshot_is_sent_them(blobs: BlobStore) -> None:
    full = trajectory("t", "g")
    wanted = [one for step in full.steps for one in step.images]
    blobs.put_many(wanted)
    steps = tuple(replace(step, images=tuple(map(bare, step.images))) for step in full.steps)
    made = Fleet(60.0)
    ranks = TrainerRanks(made, 1, StoredScreenshots(blobs))
    worker, _ = made.admit(pb.Hello(worker_id="train", instance_id="i", role=pb.ROLE_TRAIN, world_size=1))
    made.became_ready(worker, pb.Ready(slots=1, shares_blobs=True))
    update = asyncio.create_task(ranks.update(1, [ReleasedGroup.evenly("g", (replace(full, steps=steps),), (1.0,))]))
    first = (await worker.outbox.get()).train_batch
    failure = pb.Failure(assignment=first.assignment, code=pb.FAILURE_CODE_UNKNOWN_IMAGE, message="not there")
    made.receive(worker, pb.SessionRequest(failure=failure))
    second = (await worker.outbox.get()).train_batch
    trained = pb.Trained(assignment=second.assignment, update=1, weight_version=1)
    made.receive(worker, pb.SessionRequest(trained=trained))
    await update
    assert (first.assignment.attempt, second.assignment.attempt) == (1, 2)
    assert [one.data for sample in second.samples for one in sample.images] == [one.data for one in wanted]


async def test_a_screenshot_that_was_lost_is_named(blobs: BlobStore) -> None:
    full = trajectory("t", "g")
    steps = tuple(replace(step, images=tuple(map(bare, step.images))) for step in full.steps)
    made = Fleet(60.0)
    ranks = TrainerRanks(made, 1, StoredScreenshots(blobs))
    worker, _ = made.admit(pb.Hello(worker_id="train", instance_id="i", role=pb.ROLE_TRAIN, world_size=1))
    made.became_ready(worker, pb.Ready(slots=1))
    group = ReleasedGroup.evenly("g", (replace(full, steps=steps),), (1.0,))
    with pytest.raises(UnusableGroup, match=f"blob .* is not in {blobs.where}") as caught:
        await ranks.update(1, [group])
    assert caught.value.group is group


async def test_an_endpoint_is_shown_the_bytes(blobs: BlobStore) -> None:
    one = image("screen")
    blobs.put(one)
    prompt = Prompt((Block((Markup("<|im_start|>user\n"), bare(one), Markup("<|im_end|>\n<|im_start|>assistant\n"))),),
                    (bare(one),))  # fmt: skip
    stored = await StoredScreenshots(blobs).missing(prompt.images)
    (message,) = chat_messages(prompt, lambda _: "", stored)
    (shown,) = chat_messages(Prompt((Block((prompt.blocks[0].parts[0], one, prompt.blocks[0].parts[2])),), (one,)),
                             lambda _: "")  # fmt: skip
    assert message == shown
