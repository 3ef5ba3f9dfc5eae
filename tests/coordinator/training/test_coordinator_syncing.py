"""When a replica is out of the rotation for a weight update."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_samples import replica, screen
from run_processes.told import events

from benchmarks.simulation import virtual_time
from dart import config
from dart.agent.prompt import build_prompt
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TrainerRanks
from dart.coordinator.training.syncing import SETTLE_TIMEOUTS, WeightSync
from dart.core.fleet.invariants import validate
from dart.core.fleet.replica import Request
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.errors import UserError
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2 as wpb
from dart.wire.capabilities import ABORTS_TRANSFERS, RECEIVES_WHILE_SERVING

REPLIES = {
    pb.ReceiveWeights: lambda command: {"receiving_weights": pb.ReceivingWeights(assignment=command.assignment)},
    pb.LoadWeights: lambda command: {
        "weights_loaded": pb.WeightsLoaded(assignment=command.assignment, version=command.version)
    },
    pb.Generate: lambda command: {"generated": replica(command, assignment=command.assignment)},
    pb.SendWeights: lambda command: {
        "weights_sent": pb.WeightsSent(assignment=command.assignment, version=command.version)
    },
}


@dataclass
class Stage:
    """Replicas and one trainer; `seen` has each command they got, and whether "replica" was in the rotation."""

    sync: WeightSync
    pool: RolloutPool
    journal: Journal
    metrics: Path
    seen: list[tuple[str, bool]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    """The assignments of which the trainer was told that they are over."""
    sent: list[int] = field(default_factory=list)
    """The version that each command to load or send weights names."""
    fleet: Fleet = field(default_factory=lambda: Fleet(60.0))
    sending: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    holds: Callable[[Any], bool] = lambda command: False
    fails: Callable[[Any], bool] = lambda command: False
    seconds: float = 0.0
    """What each command takes."""

    @property
    def replicas(self) -> Replicas[Worker]:
        return self.pool.replicas

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.journal.flush_lines()
        return events(self.metrics, kind)

    @property
    def serves(self) -> bool:
        return self.replicas.get("replica").serving

    async def answer(self, worker: Worker) -> None:
        while True:
            message = await worker.outbox.get()
            command = getattr(message, message.WhichOneof("body"))
            if isinstance(command, pb.Abort):
                self.aborted.append(command.assignment.assignment_id)
                continue
            self.seen.append((type(command).__name__, self.serves))
            if isinstance(command, pb.ReceiveWeights | pb.LoadWeights) and command.HasField("group"):
                self.groups.append(command.group.group_id)
            if isinstance(command, pb.SendWeights | pb.LoadWeights):
                self.sent.append(command.version)
            if self.holds(command):
                self.sending.set()
                await self.go_on.wait()
            await asyncio.sleep(self.seconds)
            failure = pb.Failure(assignment=command.assignment, code=pb.FAILURE_CODE_TRANSFER, message="broken")
            body: Any = {"failure": failure} if self.fails(command) else REPLIES[type(command)](command)
            self.fleet.receive(worker, pb.SessionRequest(**body))


@asynccontextmanager
async def stage(
    tmp_path: Path,
    transport: str,
    capable: bool,
    every_updates: int = 1,
    timeout_seconds: float = 10.0,
    mode: str = "drain",
    names: Sequence[str] = ("replica",),
    aborts: bool = True,
) -> AsyncIterator[Stage]:
    async def add_sync(record: Any) -> None:
        pass

    fleet = Fleet(60.0)
    replicas: Replicas[Worker] = Replicas(time.monotonic(), every_updates=every_updates)
    pool = RolloutPool(fleet, StoredScreenshots(None), replicas)
    ranks = TrainerRanks(fleet, 1, StoredScreenshots(None))
    settings = config.Sync(transport=transport, timeout_seconds=timeout_seconds, mode=mode)  # type: ignore[arg-type]
    database: Any = SimpleNamespace(add_sync=add_sync)
    journal = Journal(tmp_path / "metrics.jsonl")
    sync = WeightSync(settings, pool.replicas, ranks, database, Progress(1), journal)
    made = Stage(sync, pool, journal, tmp_path / "metrics.jsonl", fleet=fleet)
    capabilities = [RECEIVES_WHILE_SERVING] * capable + [ABORTS_TRANSFERS] * aborts
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(made.sync.run())]
        for name, role in (*((name, pb.ROLE_ROLLOUT) for name in names), ("train", pb.ROLE_TRAIN)):
            worker, _ = fleet.admit(
                pb.Hello(worker_id=name, instance_id=name, role=role, world_size=1, capabilities=capabilities)
            )
            fleet.became_ready(worker, pb.Ready(slots=4, engine_ranks=1))
            background.append(tasks.create_task(made.answer(worker)))
        async with asyncio.timeout(60):
            yield made
        for task in background:
            task.cancel()


TENSORS = [wpb.TensorInfo(name="w", dtype="float32", shape=[2])]


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


async def draining(made: Stage) -> Request[Worker]:
    """The replica has left the rotation for version 1, and this request still keeps it busy."""
    request = Request[Worker]()
    assert made.replicas.take(request, time.monotonic()) is not None
    made.sync.staged(1, TENSORS)
    while made.serves:
        await asyncio.sleep(0)
    return request


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


async def test_over_nccl_a_request_that_does_not_end_fails_the_transfer_alone(tmp_path: Path) -> None:
    async with stage(tmp_path, "nccl", capable=True, timeout_seconds=0.05) as made:
        request = Request[Worker]()
        made.replicas.take(request, time.monotonic())
        made.sync.staged(1, TENSORS)
        while not (failed := made.events("sync_failed")):
            await asyncio.sleep(0.01)
        assert "longer than sync.timeout_seconds (0.05 s)" in failed[0]["why"]
        assert made.seen == []
        made.replicas.served(request, time.monotonic())
        await made.sync.settled()
        assert made.serves


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


async def test_a_replica_that_cannot_load_is_tried_again_and_serves_nothing_meanwhile(tmp_path: Path) -> None:
    async with stage(tmp_path, "gloo", capable=True) as made:
        times = iter([True, False])
        made.fails = lambda command: isinstance(command, pb.LoadWeights) and next(times)
        made.sync.staged(1, TENSORS)
        await made.sync.settled()
        assert made.seen[2] == ("LoadWeights", False)
        assert sorted(made.seen[3:5]) == [("ReceiveWeights", False), ("SendWeights", False)]
        assert made.serves


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
