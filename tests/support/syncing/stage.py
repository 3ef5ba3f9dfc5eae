"""Real weight sync between one trainer and replicas that answer as a test tells them to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fleet_samples import replica
from run_processes.told import events

from dart import config
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TrainerRanks
from dart.coordinator.training.syncing import WeightSync
from dart.core.fleet.replica import Request
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
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
    code: pb.FailureCode = pb.FAILURE_CODE_TRANSFER
    """With which a command fails."""
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
            failure = pb.Failure(assignment=command.assignment, code=self.code, message="broken")
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
    before: Sequence[str] = (),
    hang_seconds: float = 60.0,
) -> AsyncIterator[Stage]:
    """`before`: what the run, which is resumed then, has of events "sync"."""

    async def add_sync(record: Any) -> None:
        pass

    async def newest_events(kind: str, limit: int) -> Sequence[str]:
        return before if kind == "sync" else ()

    fleet = Fleet(60.0)
    replicas: Replicas[Worker] = Replicas(time.monotonic(), every_updates=every_updates)
    pool = RolloutPool(fleet, StoredScreenshots(None), replicas)
    ranks = TrainerRanks(fleet, 1, StoredScreenshots(None))
    settings = config.Sync(transport=transport, timeout_seconds=timeout_seconds, mode=mode)  # type: ignore[arg-type]
    database: Any = SimpleNamespace(add_sync=add_sync, newest_events=newest_events)
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
            fleet.became_ready(worker, pb.Ready(slots=4, engine_ranks=1, transfer_host="node17"))
            background.append(tasks.create_task(made.answer(worker)))
        async with asyncio.timeout(hang_seconds):
            yield made
        for task in background:
            task.cancel()


TENSORS = [wpb.TensorInfo(name="w", dtype="float32", shape=[2])]


async def draining(made: Stage) -> Request[Worker]:
    """The replica has left the rotation for version 1, and this request still keeps it busy."""
    request = Request[Worker]()
    assert made.replicas.take(request, time.monotonic()) is not None
    left = asyncio.Event()

    def look() -> None:
        if not made.serves:
            left.set()

    made.replicas.on_change.append(look)
    made.sync.staged(1, TENSORS)
    await left.wait()
    made.replicas.on_change.remove(look)
    return request
