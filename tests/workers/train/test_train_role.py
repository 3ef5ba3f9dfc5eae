"""The train worker as the session drives it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from train_samples import mixed, same_bits, settings, totals  # noqa: E402

from dart.errors import UserError  # noqa: E402
from dart.screenshots.stored import StoredScreenshots  # noqa: E402
from dart.store.blobs import BlobStore  # noqa: E402
from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.v1 import weights_pb2 as wpb  # noqa: E402
from dart.wire.channel import free_port  # noqa: E402
from dart.wire.convert import image_from_proto  # noqa: E402
from dart.wire.role import CommandError  # noqa: E402
from dart.workers.train import checkpoint  # noqa: E402
from dart.workers.train import role as role_module  # noqa: E402
from dart.workers.train.errors import CancelledUpdateError, SampleError  # noqa: E402
from dart.workers.train.role import TrainRole  # noqa: E402
from dart.workers.train.senders import MOST_PASSED_OVER, Snapshots  # noqa: E402
from dart.workers.weights.gloo import Group, receive  # noqa: E402
from dart.workers.weights.transfer import specs_from_proto  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model.build(path, text={"num_hidden_layers": 1}, vision={"depth": 2})
    return path


def pages(update: int, samples: list[pb.Sample], each: int = 4, attempt: int = 1) -> list[pb.TrainBatch]:
    cut = [samples[start : start + each] for start in range(0, len(samples), each)]
    count, tokens = totals(samples)
    return [
        pb.TrainBatch(
            assignment=pb.Assignment(assignment_id=f"u{update}", attempt=attempt, sequence=number + 1),
            update=update, page=number, pages=len(cut), samples=part, total_samples=count, total_tokens=tokens,
        )
        for number, part in enumerate(cut)
    ]  # fmt: skip


async def train(role: TrainRole, update: int, samples: list[pb.Sample]) -> pb.Trained:
    *early, last = pages(update, samples)
    for page in early:
        assert await role.handle(page) is None
    reply = await role.handle(last)
    assert isinstance(reply, pb.Trained)
    return reply


def transfer_group(name: str) -> wpb.TransferGroup:
    port = free_port()
    return wpb.TransferGroup(group_id=name, transport="gloo", host="127.0.0.1", port=port, world_size=2)


class Replica:
    """The receiving end, which keeps its group over versions."""

    def __init__(self, group: wpb.TransferGroup) -> None:
        self._group, self._joined = group, None

    def load(self, tensors: Any) -> dict[str, Any]:
        if self._joined is None:
            g = self._group
            self._joined = Group(g.group_id, g.host, g.port, rank=1, world_size=2, timeout_seconds=20)
        return dict(receive(self._joined, specs_from_proto(tensors)))


@pytest.fixture
async def role(folder: Path) -> Any:
    role = TrainRole()
    ready = await role.prepare(settings(folder).model_dump_json())
    assert (ready.slots, ready.weight_version, ready.transfer_host) == (1, 0, "127.0.0.1")
    assert set(ready.versions) == {"torch", "transformers", "accelerate"}
    yield role
    await role.close()


async def test_updates_then_weights_to_a_replica(role: TrainRole) -> None:
    samples = mixed()
    first = await train(role, 1, samples)
    assert (first.update, first.weight_version) == (1, 1)
    assert first.metrics["loss"] != 0
    group = transfer_group("replica-1")
    replica = Replica(group)

    sent, received = await asyncio.gather(
        role.handle(pb.SendWeights(version=1, group=group)), asyncio.to_thread(replica.load, first.tensors)
    )
    assert sent.bytes == sum(tensor.nbytes for tensor in received.values())
    staged = role._trainer.snapshot()
    assert received.keys() == staged.keys()
    assert all(torch.equal(received[name], staged[name]) for name in staged)

    # The same group again, and the weights that leave are those of the version although training goes on.
    second = await train(role, 2, samples)
    sending = asyncio.gather(
        role.handle(pb.SendWeights(version=2, group=group)), asyncio.to_thread(replica.load, second.tensors)
    )
    staged = role._trainer.snapshot()
    third, (_, received) = await asyncio.gather(train(role, 3, samples), sending)
    assert third.weight_version == 3
    assert all(torch.equal(received[name], staged[name]) for name in staged)


async def test_the_event_loop_goes_on_during_an_update(role: TrainRole) -> None:
    running = asyncio.ensure_future(train(role, 1, mixed()))
    beats = 0
    while not running.done():
        await asyncio.sleep(0.005)
        beats += 1
    assert (await running).weight_version == 1
    assert beats >= 3


async def test_a_given_up_attempt_leaves_no_pages_behind(role: TrainRole) -> None:
    samples = mixed()
    assert await role.handle(pages(1, samples)[0]) is None
    *early, last = pages(1, samples, attempt=2)
    for page in early:
        assert await role.handle(page) is None
    assert (await role.handle(last)).weight_version == 1
    assert not role._pages


async def test_pages_that_come_again_after_a_lost_stream_are_not_kept(role: TrainRole) -> None:
    samples = mixed()
    await train(role, 1, samples)
    *early, _ = pages(1, samples)
    assert [await role.handle(page) for page in early] == [None] * len(early)
    assert not role._pages


async def test_the_former_group_of_a_replica_is_left(role: TrainRole, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Quiet:
        def open(self, group: Any) -> None:
            self.name = group.group_id

        def send(self, tensors: Any) -> int:
            return 1

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr("dart.workers.train.senders.make_sender", lambda *_: Quiet())
    for name in ("gpu-0-1", "gpu-1-2", "gpu-0-3", "gpu-0-3", "gpu-1-4"):
        await role.handle(pb.SendWeights(version=0, group=transfer_group(name)))
    assert closed == ["gpu-0-1", "gpu-1-2"]
    # One comes back under another name, as a worker whose name has the number of its process does.
    for _ in range(2 * MOST_PASSED_OVER):
        for name in ("gpu-0-3", "other-5"):
            await role.handle(pb.SendWeights(version=0, group=transfer_group(name)))
    assert closed == ["gpu-0-1", "gpu-1-2", "gpu-1-4"], "its memory is free again"


@same_bits
async def test_screenshots_that_come_by_digest_alone_are_read_from_the_runs_directory(
    folder: Path, tmp_path: Path
) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    told = StoredScreenshots(blobs).share()
    role = TrainRole()
    assert (await role.prepare(settings(folder, shared_blobs=told).model_dump_json())).shares_blobs
    bare = mixed()
    for sample in bare:
        for image in sample.images:
            blobs.put(image_from_proto(image))
            image.ClearField("data")
    without = await train(role, 1, bare)
    await role.close()
    role = TrainRole()
    await role.prepare(settings(folder).model_dump_json())
    sent = await train(role, 1, mixed())
    await role.close()
    assert without.metrics["loss"] == sent.metrics["loss"]
    assert without.metrics["gradient_norm"] == sent.metrics["gradient_norm"]


async def test_a_wrong_sample_fails_its_command_only(role: TrainRole) -> None:
    samples = mixed()
    del samples[1].logprobs[-1]
    with pytest.raises(CommandError, match="log-probs") as caught:
        await train(role, 1, samples)
    assert caught.value.code == pb.FAILURE_CODE_INVALID
    missing = mixed()
    for one in missing:
        one.images[0].ClearField("data")
    with pytest.raises(CommandError, match="without data") as caught:
        await train(role, 2, missing)
    assert caught.value.code == pb.FAILURE_CODE_UNKNOWN_IMAGE
    assert (await train(role, 3, mixed())).weight_version == 1


@pytest.mark.parametrize("minibatch", [1, 2])
async def test_a_failure_after_an_earlier_minibatchs_step_ends_the_worker(folder: Path, minibatch: int) -> None:
    """A refused batch is sent again, which must not happen to weights that half of it has changed."""
    role = TrainRole()
    await role.prepare(settings(folder, minibatches=2).model_dump_json())
    trainer, steps = role._trainer, []
    trainer.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    begun = trainer._optimiser_step

    def failing(*arguments: Any, **named: Any) -> Any:
        if len(steps) == minibatch - 1:
            trainer.prepare = broken
        return begun(*arguments, **named)

    def broken(_part: Any) -> Any:
        raise SampleError("a picture went bad meanwhile", ["0-0"])

    trainer._optimiser_step = failing
    before = trainer.snapshot()
    with pytest.raises(SampleError if minibatch == 2 else CommandError, match="went bad meanwhile") as caught:
        await train(role, 1, mixed())
    assert len(steps) == minibatch - 1
    changed = any(not torch.equal(before[name], value) for name, value in trainer.snapshot().items())
    assert changed == (minibatch == 2)
    if minibatch == 1:
        assert (caught.value.code, caught.value.trajectories) == (pb.FAILURE_CODE_INVALID, ("0-0",))
    await role.close()


async def test_weights_that_are_no_numbers_are_told_as_such(role: TrainRole) -> None:
    with torch.no_grad():
        role._trainer.model.lm_head.weight[10] = torch.nan
    with pytest.raises(CommandError, match="the weights are not finite") as caught:
        await train(role, 1, mixed())
    assert (caught.value.code, caught.value.trajectories) == (pb.FAILURE_CODE_BROKEN, ())


async def test_a_version_that_is_not_staged_and_a_replica_that_does_not_come(role: TrainRole) -> None:
    with pytest.raises(CommandError, match="version 7 is not staged; staged: 0") as caught:
        await role.handle(pb.SendWeights(version=7, group=transfer_group("x")))
    assert caught.value.code == pb.FAILURE_CODE_INVALID
    role._senders._timeout_seconds = 0.5
    with pytest.raises(CommandError) as caught:
        await role.handle(pb.SendWeights(version=0, group=transfer_group("nobody")))
    assert caught.value.code == pb.FAILURE_CODE_TRANSFER
    with pytest.raises(CommandError, match="does not take Generate"):
        await role.handle(pb.Generate())


async def test_checkpoint_then_resume(role: TrainRole, folder: Path, tmp_path: Path) -> None:
    await train(role, 1, mixed())
    saved = await role.handle(pb.SaveCheckpoint(path=str(tmp_path / "c1")))
    assert (saved.path, saved.weight_version) == (str(tmp_path / "c1"), 1)
    again = TrainRole()
    ready = await again.prepare(settings(folder, resume_from=str(tmp_path / "c1")).model_dump_json())
    assert ready.weight_version == 1
    assert (await train(again, 2, mixed())).weight_version == 2
    await again.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot be written"):
        await role.handle(pb.SaveCheckpoint(path=str(tmp_path / "file" / "c")))


async def test_close_ends_a_running_update_and_prepare_starts_anew(folder: Path) -> None:
    role = TrainRole()
    config = settings(folder, microbatch_tokens=1).model_dump_json()
    await role.prepare(config)
    inside, go = threading.Event(), threading.Event()
    trainer = role._trainer

    def hold(*_: Any) -> None:
        inside.set()
        go.wait(60)

    trainer.model.lm_head.register_forward_hook(hold)
    running = asyncio.ensure_future(train(role, 1, mixed()))
    assert await asyncio.to_thread(inside.wait, 60)
    closing = asyncio.ensure_future(role.close())
    await asyncio.sleep(0.05)
    go.set()
    await closing
    with pytest.raises(CancelledUpdateError):
        await running
    assert trainer.version == 0
    assert (await role.prepare(config)).weight_version == 0
    assert (await train(role, 1, mixed(groups=1))).weight_version == 1
    await role.close()


async def test_a_checkpoint_that_would_fill_the_disk_is_refused_before_it_is_written(
    role: TrainRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would end the run, where a checkpoint that is not made does not."""
    usage, path = shutil.disk_usage(tmp_path), tmp_path / "checkpoints" / "v000001"
    command = pb.SaveCheckpoint(assignment=pb.Assignment(assignment_id="c1", attempt=1), path=str(path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(checkpoint.LEFT_BYTES) + 1_000_000))
    with pytest.raises(CommandError, match=r"cannot be written: .*1 GB are left to the run: make room"):
        await role.handle(command)
    assert not path.parent.exists()
    (left := path.parent / ".v000001.1.tmp").mkdir(parents=True)
    with pytest.raises(CommandError, match="cannot be written"):
        await role.handle(command)
    assert not left.exists(), "what a killed trainer left would fill the disk for good"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=int(checkpoint.LEFT_BYTES) + 1_000_000_000))
    await role.handle(command)
    assert path.is_dir()


async def test_a_rank_that_closes_while_it_waits_for_one_that_is_gone_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(role_module, "CLOSE_SECONDS", 0.1)
    collective, codes = threading.Event(), list[int]()

    def leave(code: int) -> None:
        codes.append(code)
        collective.set()

    monkeypatch.setattr(os, "_exit", leave)
    for size, expected in ((2, [1]), (1, [1])):
        made = TrainRole()
        made.world_size, made._thread, made._trainer = size, ThreadPoolExecutor(1), MagicMock()
        made._thread.submit(collective.wait, 0.5 if size == 1 else None)
        await made.close()
        assert codes == expected
        collective.clear()
    assert "longer than 0.1 s, most likely because another rank is gone" in capsys.readouterr().err


async def test_a_rank_that_closes_while_it_loads_is_not_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(role_module, "CLOSE_SECONDS", 0.01)
    codes = list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    made, loaded = TrainRole(), threading.Event()
    made.world_size, made._thread = 2, ThreadPoolExecutor(1)
    made._thread.submit(loaded.wait, 0.3)
    await made.close()
    assert codes == []


async def test_bad_configs_end_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config for this worker"):
        await TrainRole().prepare('{"model": {"path": "x"}}')
    role = TrainRole()
    with pytest.raises(UserError, match="does not exist"):
        await role.prepare(settings(tmp_path / "nowhere").model_dump_json())
    await role.close()


async def test_a_device_that_is_too_small_for_the_model_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.03 GiB\nand more")

    monkeypatch.setattr("dart.workers.train.trainer.rehearse", too_small)
    role = TrainRole()
    with pytest.raises(UserError, match=r"rank 0 of the trainer has too little memory .*Tried to allocate 2.03 GiB\)"):
        await role.prepare(settings(folder).model_dump_json())
    await role.close()


async def test_an_update_that_is_refused_gives_the_memory_for_its_weights_back(role: TrainRole) -> None:
    """A GPU's host takes seconds to pin it again."""
    for update in (1, 2):
        await train(role, update, mixed())
    role._snapshots.spare()  # a refused update's, which is not given back
    version = await train(role, 3, mixed())
    assert version.weight_version == 3
    wrong = mixed()
    del wrong[1].logprobs[-1]
    with pytest.raises(CommandError):
        await train(role, 4, wrong)
    assert role._snapshots.spare() is not None


def test_rank_and_world_size_come_from_accelerates_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (TrainRole().rank, TrainRole().world_size) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (TrainRole().rank, TrainRole().world_size) == (1, 2)


def test_snapshots_are_kept_only_while_needed() -> None:
    snapshots = Snapshots()
    for version in range(3):
        snapshots.stage(version, {})
    # A command for version 1 may have crossed the news of version 2.
    assert snapshots.versions == [1, 2]
    with snapshots.sending(1):
        snapshots.stage(3, {})
        snapshots.stage(4, {})
        assert snapshots.versions == [1, 3, 4]
    assert snapshots.versions == [3, 4]
    with snapshots.sending(4):
        pass
    assert snapshots.versions == [4]
    with pytest.raises(KeyError), snapshots.sending(3):
        pass


def test_a_dropped_versions_memory_is_used_again_so_that_two_copies_are_enough() -> None:
    snapshots = Snapshots()
    copies: list[dict[str, Any]] = [{} for _ in range(4)]
    snapshots.stage(0, copies[0])
    assert snapshots.spare() is None
    snapshots.stage(1, copies[1])
    assert snapshots.versions == [0, 1]
    # The samples of the next update have come, so a command for version 0 cannot any more.
    assert snapshots.spare() is copies[0]
    assert snapshots.spare() is None
    assert snapshots.versions == [1]
    snapshots.stage(2, copies[2])
    with snapshots.sending(1):
        assert snapshots.spare() is None
    assert snapshots.versions == [1, 2]
    with snapshots.sending(2):
        pass
    assert snapshots.versions == [2]
    assert snapshots.spare() is copies[1]
