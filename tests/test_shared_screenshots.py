"""Screenshots in the run's directory: who sees it writes and reads there, and who does not gets the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_samples import fleet, replica
from store_samples import image, trajectory

from dart.agent.chat import chat_messages
from dart.config import SharedBlobs
from dart.coordinator.pools import EnvSession
from dart.coordinator.ranks import TrainerLost, TrainerRanks
from dart.coordinator.screenshots import Screenshots
from dart.coordinator.sessions import Fleet, InfrastructureError
from dart.core.feed import ReleasedGroup
from dart.core.groups import Order
from dart.core.types import Block, Image, Markup, Prompt, Task
from dart.store.blobs import BlobStore
from dart.v1 import session_pb2 as pb
from dart.wire.convert import image_to_proto
from dart.workers.rollout.images import ImageStore, UnknownImageError
from dart.workers.shared import SharedScreenshots


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def told(blobs: BlobStore) -> SharedBlobs:
    shared = Screenshots(blobs).shared()
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
    other = BlobStore(tmp_path / "other").directory
    assert other is not None
    assert other.identity() != same.id
    assert SharedScreenshots.seen(same.model_copy(update={"directory": other.root})) is None
    again = BlobStore(tmp_path / "blobs").directory
    assert again is not None
    assert again.identity() == same.id, "a coordinator that resumes the run says the same"


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
    store = ImageStore(8, seen(blobs))
    with pytest.raises(UnknownImageError):
        store.resolve(bare(one))
    blobs.put(one)
    assert store.resolve(bare(one)) == one


# ---- the coordinator's end ----


def order() -> Order:
    return Order("t", "g", Task("s", "a"), 3)


def env(screenshot: Image) -> Callable[[Any], Any]:
    def answer(command: Any) -> Any:
        return pb.Observed(image=image_to_proto(screenshot)) if isinstance(command, pb.Reset) else None

    return answer


async def test_a_screenshot_that_is_not_where_it_should_be_fails_the_attempt(blobs: BlobStore) -> None:
    one = image("screen")
    async with fleet(env=env(bare(one)), blobs=blobs, sharing={"env"}) as (envs, _):
        session = EnvSession(envs, await envs.acquire(), order())
        with pytest.raises(InfrastructureError, match=r"is not in .*server\.share_screenshots: false"):
            await session.reset(Task("s", "a"))
        blobs.put(one)
        assert (await session.reset(Task("s", "a"))).image == bare(one)


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
    group = ReleasedGroup("g", (replace(full, steps=steps),), (1.0,))

    made = Fleet(60.0)
    ranks = TrainerRanks(made, 1, Screenshots(blobs))
    worker, _ = made.admit(pb.Hello(worker_id="train", instance_id="i", role=pb.ROLE_TRAIN, world_size=1))
    made.became_ready(worker, pb.Ready(slots=1, shares_blobs=sharing))
    update = asyncio.create_task(ranks.update(1, [group]))
    page = (await worker.outbox.get()).train_batch
    worker.receive(pb.SessionRequest(trained=pb.Trained(assignment=page.assignment, weight_version=1)))
    await update
    sent = [one.data for sample in page.samples for one in sample.images]
    assert sent == [b"" if sharing else one.data for one in wanted]


async def test_a_screenshot_that_was_lost_is_named(blobs: BlobStore) -> None:
    full = trajectory("t", "g")
    steps = tuple(replace(step, images=tuple(map(bare, step.images))) for step in full.steps)
    made = Fleet(60.0)
    ranks = TrainerRanks(made, 1, Screenshots(blobs))
    worker, _ = made.admit(pb.Hello(worker_id="train", instance_id="i", role=pb.ROLE_TRAIN, world_size=1))
    made.became_ready(worker, pb.Ready(slots=1))
    with pytest.raises(TrainerLost, match=f"blob .* is not in {blobs.where}"):
        await ranks.update(1, [ReleasedGroup("g", (replace(full, steps=steps),), (1.0,))])


async def test_an_endpoint_is_shown_the_bytes(blobs: BlobStore) -> None:
    one = image("screen")
    blobs.put(one)
    prompt = Prompt((Block((Markup("<|im_start|>user\n"), bare(one), Markup("<|im_end|>\n<|im_start|>assistant\n"))),),
                    (bare(one),))  # fmt: skip
    stored = await Screenshots(blobs).missing(prompt.images)
    (message,) = chat_messages(prompt, lambda _: "", stored)
    (shown,) = chat_messages(Prompt((Block((prompt.blocks[0].parts[0], one, prompt.blocks[0].parts[2])),), (one,)),
                             lambda _: "")  # fmt: skip
    assert message == shown
