"""Weight sync. Rolling: one replica after the other gets the newest version while the others serve.

`WeightSync.run` interprets `core.sync_plan.SyncPlan`: whenever something changed it starts what the plan allows. Over
gloo a replica receives while it serves, and is out of the rotation only while it takes what it has received into the
model; over NCCL, from the moment its transfer starts. Training and the other replicas go on; with `schedule.sync: all`
none serves until all have answered. A transfer that breaks costs that replica a retry with a new transfer group, never
the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Sequence

from dart import config
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Fleet, InfrastructureError, Worker
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TrainerRanks
from dart.core.progress import Progress
from dart.core.sync_plan import SyncPlan
from dart.errors import UserError
from dart.store.database import Database
from dart.store.records import SyncRecord
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire.capabilities import RECEIVES_WHILE_SERVING, has

log = logging.getLogger(__name__)

_MODES = {
    "keep": weights_pb2.PAUSE_MODE_KEEP,
    "drain": weights_pb2.PAUSE_MODE_DRAIN,
    "abort": weights_pb2.PAUSE_MODE_ABORT,
}
RETRY_SECONDS = 0.5
SETTLE_TIMEOUTS = 3
"""`sync.timeout_seconds` that the last weights may take to reach everybody."""


class WeightSync:
    def __init__(
        self,
        settings: config.Sync,
        fleet: Fleet,
        policy: RolloutPool,
        ranks: TrainerRanks,
        database: Database,
        progress: Progress,
        journal: Journal,
        version: int = 0,
        *,
        together: bool = False,
    ) -> None:
        self._settings, self._policy, self._ranks = settings, policy, ranks
        self._database, self._progress, self._journal = database, progress, journal
        self._plan = SyncPlan(settings.max_unavailable, version, together=together)
        self._workers: dict[str, Worker] = {}
        self._groups: dict[str, weights_pb2.TransferGroup] = {}
        self._tensors: Sequence[weights_pb2.TensorInfo] = ()
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        fleet.on_ready.append(self._joined)
        fleet.on_lost.append(self._left)

    @property
    def versions(self) -> dict[str, int]:
        """Each replica's version."""
        return self._plan.versions

    def publish(self, version: int, tensors: Sequence[weights_pb2.TensorInfo]) -> None:
        """The trainer has staged a new version."""
        self._plan.published(version)
        self._tensors = tensors
        if self._plan.together:
            self._serve(False)
        self._notify()

    async def settled(self) -> None:
        """Wait until every replica serves the newest version."""
        await self._settled.wait()

    async def settled_or_out(self) -> None:
        """Wait until every replica that serves has the newest version; one that cannot get it serves no more.

        Raises UserError when none can.
        """
        try:
            async with asyncio.timeout(SETTLE_TIMEOUTS * self._settings.timeout_seconds):
                return await self.settled()
        except TimeoutError:
            behind = [name for name, version in self.versions.items() if version < self._plan.version]
        self._journal.event("left_out", replicas=behind, reason=f"version {self._plan.version} could not be sent")
        if len(behind) == len(self.versions):
            raise UserError(
                f"no replica took version {self._plan.version}: look at logs/ in the run directory, then --resume"
            )
        for name in behind:
            self._policy.set_serving(name, False)

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as transfers:
            while True:
                self._changed.clear()
                while self._tensors and (chosen := self._plan.next()):
                    transfers.create_task(self._update(*chosen))
                await self._changed.wait()

    async def _update(self, replica: str, version: int) -> None:
        worker = self._workers[replica]
        started = time.time()
        self._journal.event("sync_started", replica=replica, version=version, versions=self.versions)
        try:
            loaded = await self._transfer(worker, version)
        except InfrastructureError as error:
            log.warning("sync of %s to version %d failed: %s", replica, version, error)
            self._journal.event("sync_failed", replica=replica, version=version, why=str(error))
            self._groups.pop(worker.hello.instance_id, None)
            await asyncio.sleep(RETRY_SECONDS)
            if self._workers.get(replica) is worker:
                self._plan.failed(replica)
                self._notify()
            return
        if self._workers.get(replica) is not worker:
            return
        self._plan.updated(replica, version)
        self._policy.set_version(replica, version)
        if not self._plan.together:
            self._policy.set_serving(replica, True)
        elif self._plan.settled:
            self._serve(True)
        self._progress.weights_synced()
        self._journal.event(
            "sync", replica=replica, version=version, seconds=round(time.time() - started, 4),
            pause_seconds=round(loaded.pause_seconds, 4), bytes=loaded.bytes, versions=self.versions,
        )  # fmt: skip
        await self._database.add_sync(
            SyncRecord(version, replica, started, time.time(), loaded.pause_seconds, loaded.bytes)
        )
        self._notify()

    async def _transfer(self, worker: Worker, version: int) -> pb.WeightsLoaded:
        """From rank 0 into the replica's model. Raises InfrastructureError when either end fails."""
        name = f"w{next(self._numbers)}"
        work = pb.Assignment(assignment_id=name, attempt=1)
        group, tensors = self._group(worker), self._tensors
        load = pb.LoadWeights(assignment=work, version=version, pause_mode=_MODES[self._settings.mode], tensors=tensors)
        ahead = self._settings.transport == "gloo" and has(worker.hello, RECEIVES_WHILE_SERVING)
        receive = pb.ReceiveWeights(assignment=work, version=version, group=group, tensors=tensors)
        if not ahead:
            load.group.CopyFrom(group)
            self._policy.set_serving(worker.id, False)
        try:
            async with asyncio.timeout(self._settings.timeout_seconds), asyncio.TaskGroup() as ends:
                answer = ends.create_task(_call(worker, receive if ahead else load))
                ends.create_task(self._ranks.send_weights(work, version, group))
            if ahead:
                if self._workers.get(worker.id) is not worker:
                    raise InfrastructureError(f"another instance of {worker.id} has taken its place")
                self._policy.set_serving(worker.id, False)
                async with asyncio.timeout(self._settings.timeout_seconds):
                    return await _call(worker, load)
        except* InfrastructureError as errors:
            raise errors.exceptions[0] from None
        except* TimeoutError:
            raise InfrastructureError(
                f"no end of the transfer, or of the pause that it needs, within {self._settings.timeout_seconds:.0f} s"
            ) from None
        except* KeyError:
            raise InfrastructureError("the trainer is gone") from None
        finally:
            worker.end_assignment(name, 1)
        return answer.result()

    def _group(self, worker: Worker) -> weights_pb2.TransferGroup:
        """The replica's transfer group: made once per replica instance, and anew after a failure."""
        key = worker.hello.instance_id
        if key not in self._groups:
            host = self._ranks.rank0.ready.transfer_host or "127.0.0.1"
            self._groups[key] = weights_pb2.TransferGroup(
                group_id=f"{worker.id}-{next(self._numbers)}",
                transport=self._settings.transport,
                host=host,
                port=_free_port(),
                world_size=1 + worker.ready.engine_ranks,
            )
        return self._groups[key]

    def _serve(self, serving: bool) -> None:
        """All replicas."""
        for replica in self._workers:
            self._policy.set_serving(replica, serving)

    def _joined(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ROLLOUT:
            return
        self._workers[worker.id] = worker
        self._plan.joined(worker.id, worker.ready.weight_version)
        if worker.ready.weight_version < self._plan.version:
            self._policy.set_serving(worker.id, False)
        self._notify()

    def _left(self, worker: Worker) -> None:
        if worker.role != pb.ROLE_ROLLOUT:
            return
        self._groups.pop(worker.hello.instance_id, None)
        if self._workers.get(worker.id) is not worker:
            return  # another instance of this name has taken its place
        del self._workers[worker.id]
        self._plan.left(worker.id)
        if self._plan.together and self._plan.settled:
            self._serve(True)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        if self._plan.settled:
            self._settled.set()
        else:
            self._settled.clear()


async def _call(worker: Worker, command: pb.ReceiveWeights | pb.LoadWeights) -> pb.WeightsLoaded:
    """The answer to ReceiveWeights is of another kind, and nobody reads it."""
    reply: pb.WeightsLoaded = await worker.call(command)
    return reply


def _free_port() -> int:
    """A port that is free here now, for the trainer to listen on. A taken one fails the transfer, which is retried."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
