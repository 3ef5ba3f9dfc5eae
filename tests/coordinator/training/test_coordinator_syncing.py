"""When a replica is out of the rotation for a weight update."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from fleet_samples import screen
from syncing.stage import TENSORS, draining, stage

from benchmarks.simulation import virtual_time
from dart import config
from dart.agent.prompt import build_prompt
from dart.coordinator.training.syncing import SETTLE_TIMEOUTS
from dart.core.fleet.invariants import validate
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import RECEIVES_WHILE_SERVING


async def test_over_gloo_a_replica_serves_until_everything_is_there(tmp_path: Path) -> None:
    async with stage(tmp_path, "gloo", capable=True) as made:
        made.sync.staged(1, TENSORS)
        await made.sync.settled()
        assert sorted(made.seen[:2]) == [("ReceiveWeights", True), ("SendWeights", True)]
        assert made.seen[2:] == [("LoadWeights", False)]
        assert made.serves
        assert made.replicas.versions == {"replica": 1}


@pytest.mark.parametrize(("transport", "capable"), [("nccl", True), ("gloo", False)])
async def test_else_it_is_out_of_the_rotation_all_the_while(tmp_path: Path, transport: str, capable: bool) -> None:
    async with stage(tmp_path, transport, capable) as made:
        made.sync.staged(1, TENSORS)
        await made.sync.settled()
        assert sorted(made.seen) == [("LoadWeights", False), ("SendWeights", False)]
        assert made.serves


async def test_over_nccl_the_trainer_sends_once_the_replica_has_drained(tmp_path: Path) -> None:
    """A broadcast that waits for a replica's last answers would occupy the trainer's GPU meanwhile."""
    async with stage(tmp_path, "nccl", capable=True) as made:
        request = await draining(made)
        await asyncio.sleep(0.05)
        assert made.seen == []
        made.replicas.served(request, time.monotonic())
        await made.sync.settled()
        assert sorted(made.seen) == [("LoadWeights", False), ("SendWeights", False)]
        assert made.serves
        assert made.events("sync")[0]["pause_seconds"] >= 0.05


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_over_nccl_a_replica_that_does_not_drain_its_requests_is_sent_weights_at_once(
    tmp_path: Path, mode: str
) -> None:
    async with stage(tmp_path, "nccl", capable=True, mode=mode) as made:
        request = await draining(made)
        await made.sync.settled()
        assert sorted(made.seen) == [("LoadWeights", False), ("SendWeights", False)]
        assert made.serves and request.replica is not None and request.replica.busy == 1


async def test_over_nccl_a_replica_gets_the_version_that_is_newest_once_it_has_drained(tmp_path: Path) -> None:
    """The trainer may have dropped the one that was newest when the replica left the rotation."""
    async with stage(tmp_path, "nccl", capable=True) as made:
        request = await draining(made)
        made.sync.staged(2, TENSORS)
        made.replicas.served(request, time.monotonic())
        await made.sync.settled()
        assert sorted(made.seen) == [("LoadWeights", False), ("SendWeights", False)]
        assert made.sent == [2, 2]
        assert made.replicas.versions == {"replica": 2} and made.serves
        assert [event["version"] for event in made.events("sync")] == [2]
        assert made.events("sync_failed") == []


async def test_a_new_instance_is_not_taken_out_of_the_rotation_for_the_old_ones_weights(tmp_path: Path) -> None:
    """The old one's connection to the coordinator broke, its transfer did not."""
    async with stage(tmp_path, "gloo", capable=True) as made:
        sending, go_on = asyncio.Event(), asyncio.Event()
        made.holds = lambda command: isinstance(command, pb.SendWeights) and not sending.is_set()
        made.sending, made.go_on = sending, go_on
        made.sync.staged(1, TENSORS)
        await sending.wait()
        hello = pb.Hello(worker_id="replica", instance_id="new", role=pb.ROLE_ROLLOUT,
                         capabilities=[RECEIVES_WHILE_SERVING])  # fmt: skip
        old = made.fleet.workers["replica"]
        new, _ = made.fleet.admit(hello)
        made.fleet.became_ready(new, pb.Ready(slots=4, engine_ranks=1, weight_version=1))
        go_on.set()
        while not old.end.stale and made.replicas.versions != {"replica": 1}:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert made.serves


async def test_weights_are_sent_after_every_third_update_and_at_the_end(tmp_path: Path) -> None:
    async with stage(tmp_path, "gloo", capable=True, every_updates=3) as made:
        made.sync.staged(1, TENSORS)
        made.sync.staged(2, TENSORS)
        await made.sync.settled()
        for _ in range(20):
            await asyncio.sleep(0)
        assert made.seen == [] and made.replicas.versions == {"replica": 0}
        made.sync.staged(3, TENSORS)
        await made.sync.settled()
        assert made.replicas.versions == {"replica": 3}
        made.sync.staged(4, TENSORS)
        await made.sync.settle_or_exclude()
        assert made.replicas.versions == {"replica": 4}, "the policy that is evaluated is the last one"


async def test_the_end_waits_for_no_replica_that_cannot_be_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dart.coordinator.training.syncing.SETTLE_TIMEOUTS", 0.02)
    async with stage(tmp_path, "gloo", True) as made:
        other, _ = made.fleet.admit(pb.Hello(worker_id="other", instance_id="other", role=pb.ROLE_ROLLOUT))
        made.fleet.became_ready(other, pb.Ready(slots=1, weight_version=1, engine_ranks=1))
        made.fails = lambda command: isinstance(command, pb.SendWeights)
        made.sync.staged(1, TENSORS)
        await made.sync.settle_or_exclude()
        assert not made.serves and made.replicas.get("other").serving
        made.fleet.lose(other, "goodbye")
        with pytest.raises(UserError, match="no replica took version 1"):
            await made.sync.settle_or_exclude()


def test_the_end_waits_for_replicas_as_long_as_one_after_the_other_is_updated(tmp_path: Path) -> None:
    """The bound is for the time in which none of them is: 3 s here, and each transfer takes 1.8 s."""
    names = ["replica", *"abcd"]

    async def settle() -> None:
        async with stage(tmp_path, "gloo", capable=True, timeout_seconds=1.0, names=names) as made:
            made.seconds = 0.9
            made.sync.staged(1, TENSORS)
            began = time.monotonic()
            await made.sync.settle_or_exclude()
            assert time.monotonic() - began > 2 * SETTLE_TIMEOUTS, "two passes would not have been enough"
            assert made.events("left_out") == made.events("sync_failed") == []
            assert made.replicas.versions == dict.fromkeys(names, 1) and all(one.serving for one in made.replicas)

    virtual_time.run(settle())


ORDERS = list(itertools.product(itertools.permutations(range(3)), repeat=2))


@pytest.mark.parametrize("order", ORDERS, ids=str)
async def test_whoever_is_told_first_old_weights_serve_nothing(
    tmp_path: Path, order: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """A request waits in line while a replica comes, goes and comes again, each time with old weights."""
    async with stage(tmp_path, "gloo", capable=True) as made:

        def look(*told: Any) -> None:
            assert not any(one.serving and one.version < 1 for one in made.replicas)

        made.sync.staged(1, TENSORS)
        await made.sync.settled()
        made.fleet.lose(made.fleet.workers["replica"], "its machine is gone")
        waiting = asyncio.create_task(
            made.pool.generate(build_prompt(config.Agent(), "do it", [], screen()), 1.0, 40, None)
        )
        for listeners, ranks in zip(
            ((made.fleet.on_ready, made.fleet.on_lost), (made.replicas.on_change,)), order, strict=True
        ):
            for one in listeners:
                one.append(look)
                one[:] = [one[place] for place in ranks]
        async with asyncio.TaskGroup() as tasks:
            background = []
            for instance in ("second", "third"):
                hello = pb.Hello(worker_id="replica", instance_id=instance, role=pb.ROLE_ROLLOUT,
                                 capabilities=[RECEIVES_WHILE_SERVING])  # fmt: skip
                worker, _ = made.fleet.admit(hello)
                made.fleet.became_ready(worker, pb.Ready(slots=1, engine_ranks=1))
                await asyncio.sleep(0)
                assert not waiting.done()
                if instance == "second":
                    made.fleet.lose(worker, "and again")
                else:
                    background.append(tasks.create_task(made.answer(worker)))
            _, served_by = await waiting
            assert served_by == "replica" and made.replicas.versions == {"replica": 1}
            names = [name for name, _ in made.seen]
            assert names.index("Generate") > len(names) - 1 - names[::-1].index("LoadWeights")
            validate(made.replicas)
            for task in background:
                task.cancel()
