"""What becomes of a replica whose weight update fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from syncing.stage import REPLIES, TENSORS, draining, stage

from benchmarks.simulation import virtual_time
from dart.errors import UserError, ungrouped
from dart.v1 import session_pb2 as pb


async def test_a_transfer_that_finds_no_trainer_has_failed(tmp_path: Path) -> None:
    """The run is ending then, with an error that says so; a second one from here would hide it."""
    async with stage(tmp_path, "gloo", capable=True) as made:
        trainer = next(worker for worker in made.fleet.workers.values() if worker.role == pb.ROLE_TRAIN)
        made.fleet.lose(trainer, "killed")
        made.sync.staged(1, TENSORS)
        while not (failed := made.events("sync_failed")):
            await asyncio.sleep(0.01)
        assert "the trainer is gone" in failed[0]["why"]
        assert made.seen == [] and made.serves


@pytest.mark.parametrize(("transport", "sent"), [("nccl", []), ("gloo", ["ReceiveWeights", "SendWeights"])])
def test_a_request_that_does_not_end_fails_the_update_and_its_replica_serves_on(
    tmp_path: Path, transport: str, sent: list[str]
) -> None:
    async def sync() -> None:
        async with stage(tmp_path, transport, capable=True, timeout_seconds=1.0) as made:
            request = await draining(made)
            while not made.serves:
                await asyncio.sleep(0.01)
            (failed,) = made.events("sync_failed")
            assert "requests in flight did not end within sync.timeout_seconds (1 s)" in failed["why"]
            assert sorted(name for name, _ in made.seen) == sent
            made.replicas.served(request, time.monotonic())
            await made.sync.settled()
            assert made.serves

    virtual_time.run(sync())


def test_over_gloo_draining_and_loading_each_have_their_time(tmp_path: Path) -> None:
    """Together they last longer than `sync.timeout_seconds`, and nothing is sent twice."""

    async def sync() -> None:
        async with stage(tmp_path, "gloo", capable=True, timeout_seconds=1.0) as made:
            made.seconds = 0.8
            request = await draining(made)
            await asyncio.sleep(0.8)
            made.replicas.served(request, time.monotonic())
            await made.sync.settled()
            assert [name for name, _ in made.seen[2:]] == ["LoadWeights"] and made.events("sync_failed") == []
            (done,) = made.events("sync")
            assert done["pause_seconds"] == pytest.approx(0.8, abs=0.01)

    virtual_time.run(sync())


@pytest.mark.parametrize(
    ("transport", "broken", "code", "serves"),
    [
        ("gloo", pb.LoadWeights, pb.FAILURE_CODE_TRANSFER, True),
        ("nccl", pb.LoadWeights, pb.FAILURE_CODE_TRANSFER, True),
        ("gloo", pb.LoadWeights, pb.FAILURE_CODE_ENGINE, False),
        ("nccl", pb.SendWeights, pb.FAILURE_CODE_TRANSFER, False),
    ],
)
def test_only_a_replica_that_says_that_it_is_as_it_was_serves_until_the_next_try(
    tmp_path: Path, transport: str, broken: type, code: pb.FailureCode, serves: bool
) -> None:
    async def sync() -> None:
        async with stage(tmp_path, transport, capable=True) as made:
            times = iter([True, False])
            made.code, made.fails = code, lambda command: isinstance(command, broken) and next(times)
            made.sync.staged(1, TENSORS)
            while not made.events("sync_failed"):
                await asyncio.sleep(0.01)
            assert made.serves == serves
            await made.sync.settled()
            assert made.serves and made.replicas.versions == {"replica": 1}

    virtual_time.run(sync())


def test_a_replica_with_other_weights_than_the_trainer_sent_does_not_serve_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sync() -> None:
        async with stage(tmp_path, "gloo", capable=True) as made:
            held = iter([10, 11])
            monkeypatch.setitem(
                REPLIES,
                pb.LoadWeights,
                lambda it: {
                    "weights_loaded": pb.WeightsLoaded(assignment=it.assignment, version=1, checksum=next(held))
                },
            )
            monkeypatch.setitem(
                REPLIES,
                pb.SendWeights,
                lambda it: {"weights_sent": pb.WeightsSent(assignment=it.assignment, version=1, checksum=11)},
            )
            made.sync.staged(1, TENSORS)
            while not (failed := made.events("sync_failed")):
                await asyncio.sleep(0.01)
            assert "holds other weights than the trainer has sent as version 1" in failed[0]["why"]
            assert not made.serves
            await made.sync.settled()
            assert made.serves and made.events("sync")[0]["checksum"] == "b"

    virtual_time.run(sync())


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_a_replica_that_does_not_answer_in_time_serves_nothing_until_it_is_updated(
    tmp_path: Path, transport: str
) -> None:
    """It may have either weights, or some of each."""

    async def sync() -> None:
        async with stage(tmp_path, transport, capable=True) as made:
            made.holds = lambda command: isinstance(command, pb.LoadWeights)
            made.sync.staged(1, TENSORS)
            while not made.events("sync_failed"):
                await asyncio.sleep(0.01)
            assert not made.serves
            made.go_on.set()
            await made.sync.settled()
            assert made.serves

    virtual_time.run(sync())


def test_a_replica_that_joined_with_old_weights_does_not_serve_because_its_update_failed(tmp_path: Path) -> None:
    async def sync() -> None:
        async with stage(tmp_path, "gloo", capable=True) as made:
            made.replicas.pause(made.replicas.get("replica"), time.monotonic())
            times = iter([True, False])
            made.fails = lambda command: isinstance(command, pb.LoadWeights) and next(times)
            made.sync.staged(1, TENSORS)
            while not made.events("sync_failed"):
                await asyncio.sleep(0.01)
            assert not made.serves
            await made.sync.settled()

    virtual_time.run(sync())


async def test_over_nccl_nothing_is_sent_to_a_replica_that_is_lost_while_it_drains(tmp_path: Path) -> None:
    async with stage(tmp_path, "nccl", capable=True) as made:
        await draining(made)
        made.fleet.lose(made.fleet.workers["replica"], "its machine is gone")
        while not (failed := made.events("sync_failed")):
            await asyncio.sleep(0.01)
        assert failed[0]["why"] == "replica is gone" and made.seen == []


@pytest.mark.parametrize(("aborts", "told"), [(True, ["w1"]), (False, [])])
async def test_the_trainer_is_told_when_the_replica_that_it_sends_to_is_lost(
    tmp_path: Path, aborts: bool, told: list[str]
) -> None:
    """A trainer of an earlier release would take it for a mistake."""
    async with stage(tmp_path, "nccl", capable=True, names=("lost", "replica"), aborts=aborts) as made:
        made.holds = lambda command: command.assignment.assignment_id == "w1"  # both ends of it
        made.sync.staged(1, TENSORS)
        await made.sending.wait()
        made.fleet.lose(made.fleet.workers["lost"], "its machine is gone")
        while not made.events("sync_failed"):
            await asyncio.sleep(0)
        made.go_on.set()
        await made.sync.settled()
        assert made.replicas.versions == {"replica": 1}
        assert made.aborted == told


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
async def test_the_trainer_is_not_told_of_a_replica_that_is_lost_when_all_is_sent(
    tmp_path: Path, transport: str
) -> None:
    async with stage(tmp_path, transport, capable=True) as made:
        made.holds = lambda command: isinstance(command, pb.LoadWeights)
        made.sync.staged(1, TENSORS)
        await made.sending.wait()
        while made.fleet.workers["train"].end.unanswered:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        made.fleet.lose(made.fleet.workers["replica"], "its machine is gone")
        while not made.events("sync_failed"):
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert made.aborted == []


@pytest.mark.parametrize("broken", [pb.ReceiveWeights, pb.SendWeights])
async def test_a_replica_whose_transfer_breaks_serves_on_and_is_tried_again_in_a_new_group(
    tmp_path: Path, broken: type
) -> None:
    async with stage(tmp_path, "gloo", capable=True) as made:
        times = iter([True, False])
        made.fails = lambda command: isinstance(command, broken) and next(times)
        made.sync.staged(1, TENSORS)
        await made.sync.settled()
        assert ("LoadWeights", True) not in made.seen
        assert all(serving for name, serving in made.seen if name != "LoadWeights")
        assert [name for name, _ in made.seen].count("LoadWeights") == 1
        assert len(set(made.groups)) == 2
        assert made.serves


def test_a_run_whose_first_weights_reach_nobody_ends_in_time_with_the_address_and_the_cause(tmp_path: Path) -> None:
    async def sync() -> None:
        began = time.monotonic()
        told = r"to replica: .*broken \(weights come from node17\).*DART_TRANSFER_HOST"
        with pytest.raises(UserError, match=told), ungrouped(UserError):
            async with stage(tmp_path, "gloo", capable=True, hang_seconds=3600) as made:
                made.fails = lambda command: isinstance(command, pb.ReceiveWeights)
                made.sync.staged(1, TENSORS)
                await asyncio.sleep(3600)
        assert 120 <= time.monotonic() - began < 400

    virtual_time.run(sync())


def test_a_trainer_that_hangs_from_the_beginning_is_waited_for_longer(tmp_path: Path) -> None:
    async def sync() -> None:
        async with stage(tmp_path, "gloo", capable=True, hang_seconds=6000) as made:
            made.holds = lambda command: isinstance(command, pb.SendWeights)
            made.sync.staged(1, TENSORS)
            await asyncio.sleep(1500)
            assert len(made.events("sync_failed")) > 4
            made.holds = lambda command: False
            made.go_on.set()
            await made.sync.settled()
            assert made.replicas.versions == {"replica": 1}

    virtual_time.run(sync())


@pytest.mark.parametrize("when", ["now", "before it was resumed"])
def test_a_run_that_has_once_got_weights_through_waits_until_they_get_through_again(tmp_path: Path, when: str) -> None:
    async def sync() -> None:
        before = () if when == "now" else ("sync",)
        async with stage(tmp_path, "gloo", capable=True, before=before, hang_seconds=6000) as made:
            if when == "now":
                made.sync.staged(1, TENSORS)
                await made.sync.settled()
            made.fails = lambda command: isinstance(command, pb.ReceiveWeights)
            made.sync.staged(2, TENSORS)
            await asyncio.sleep(50 * 60)
            made.fails = lambda command: False
            await made.sync.settled()
            assert made.replicas.versions == {"replica": 2}

    virtual_time.run(sync())
