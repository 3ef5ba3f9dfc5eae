"""Weight sync. Rolling: one replica after the other gets the newest version while the others serve.

`dart.core.fleet.replicas.Replicas` decides which versions are published, and which replica is updated next; whenever it
has changed, `WeightSync.run` starts the transfers that it allows. Over gloo a replica receives while it serves, then
leaves the rotation, drains, and loads what it has received into the model. Over NCCL it leaves the rotation first, and
the transfer starts once it has drained: the trainer's end occupies its GPU for as long as it waits for the replica's.
Draining, the transfer, and over gloo the loading may each take `sync.timeout_seconds`. Training and the other replicas
continue; with `schedule.sync: all` none serves until all have answered.

A transfer that fails is repeated for that replica with a new transfer group, and does not affect the trainer. A replica
that is known to be as it was goes on serving until then; any other is out of the rotation until a transfer succeeds. A
run of which no replica has ever taken a version ends after a few minutes of that, because it cannot learn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence

from dart import config
from dart.coordinator.fleet.sessions import CommandFailed, InfrastructureError, Worker
from dart.coordinator.service.journal import Journal
from dart.coordinator.training.ranks import TrainerRanks
from dart.core.fleet.health import FirstTransfers
from dart.core.fleet.replica import Replica
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.errors import UserError, ungrouped
from dart.store.database import Database
from dart.store.records import SyncRecord
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2
from dart.wire.capabilities import RECEIVES_WHILE_SERVING, has
from dart.wire.channel import free_port

log = logging.getLogger(__name__)

_MODES = {
    "keep": weights_pb2.PAUSE_MODE_KEEP,
    "drain": weights_pb2.PAUSE_MODE_DRAIN,
    "abort": weights_pb2.PAUSE_MODE_ABORT,
}
SETTLE_TIMEOUTS = 3
"""For how many `sync.timeout_seconds` weights may reach no further replica, before those without are excluded."""


class _Untouched(InfrastructureError):
    """An update failed, and the replica is as it was: it can go on serving with the weights that it has."""


class WeightSync:
    def __init__(
        self,
        settings: config.Sync,
        replicas: Replicas[Worker],
        ranks: TrainerRanks,
        database: Database,
        progress: Progress,
        journal: Journal,
    ) -> None:
        self._settings, self._replicas, self._ranks = settings, replicas, ranks
        self._database, self._progress, self._journal = database, progress, journal
        self._groups: dict[Replica[Worker], weights_pb2.TransferGroup] = {}
        self._tensors: Sequence[weights_pb2.TensorInfo] = ()
        self._numbers = itertools.count(1)
        self._first: FirstTransfers | None = FirstTransfers()
        """None once a replica has taken weights."""
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._replicas_changed()
        replicas.on_change.append(self._replicas_changed)

    def staged(self, version: int, tensors: Sequence[weights_pb2.TensorInfo]) -> None:
        """The trainer has staged a new version, which is published at once or later (`sync.every_updates`)."""
        self._tensors = tensors
        self._replicas.staged(version, time.monotonic())

    async def settled(self) -> None:
        """Wait until every replica that is `Replicas.wanted` serves the newest published version."""
        await self._settled.wait()

    async def settle_or_exclude(self) -> None:
        """Publish the newest version, then as `wait_or_exclude`.

        Raises UserError if no replica can get it.
        """
        self._replicas.publish_newest(time.monotonic())
        await self.wait_or_exclude()

    async def wait_or_exclude(self) -> None:
        """Wait until every wanted replica has the newest published version; take those that cannot get it out of the
        rotation.

        Raises UserError if no replica can get it.
        """
        behind, before = self._replicas.behind, math.inf
        while len(behind) < before:  # they take turns, so many of them take longer
            before = len(behind)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_TIMEOUTS * self._settings.timeout_seconds):
                    return await self.settled()
            behind = self._replicas.behind
        if not behind:
            return
        version = self._replicas.version
        names = [replica.name for replica in behind]
        self._journal.event("left_out", replicas=names, reason=f"version {version} could not be sent")
        if all(replica.excluded or replica in behind for replica in self._replicas):
            raise UserError(f"no replica took version {version}: look at logs/ in the run directory, then --resume")
        for replica in behind:
            self._replicas.exclude(replica, time.monotonic())

    async def run(self) -> None:
        """Runs until cancelled. Raises UserError if no replica has ever taken weights, and none will."""
        with ungrouped(UserError):
            await self._transfers()

    async def _transfers(self) -> None:
        async with asyncio.TaskGroup() as transfers:
            while True:
                self._changed.clear()
                while self._tensors and (chosen := self._replicas.next_update()):
                    transfers.create_task(self._update(*chosen))
                await self._changed.wait()

    def _replicas_changed(self) -> None:
        self._changed.set()
        if self._replicas.settled:
            self._settled.set()
        else:
            self._settled.clear()

    async def _update(self, replica: Replica[Worker], version: int) -> None:
        started, began, served = time.time(), time.monotonic(), replica.serving
        self._journal.event("sync_started", replica=replica.name, version=version, versions=self._replicas.versions)
        try:
            with self._in_time():
                pause_seconds = 0.0 if self._ahead(replica) else await self._leave_rotation(replica)
                # While it drained, the trainer may have made another version and dropped this one.
                version = self._replicas.retarget(replica)
                loaded = await self._transfer(replica, version)
        except InfrastructureError as error:
            group = self._groups.pop(replica, None)
            why = f"{error} (weights come from {group.host})" if group else str(error)
            log.warning("sync of %s to version %d failed: %s", replica.name, version, why)
            self._journal.event("sync_failed", replica=replica.name, version=version, why=why)
            replica.session.last_failure = why
            if self._first and self._first.broke(time.monotonic(), _reported(error)):
                await self._end_if_none_was_taken(self._first.broken, f"{replica.name}: {why}")
            serve = served and isinstance(error, _Untouched)
            rest_seconds = self._replicas.update_broke(replica, time.monotonic(), serve=serve)
            await asyncio.sleep(min(self._settings.timeout_seconds, rest_seconds))
            self._replicas.update_failed(replica, time.monotonic())
            return
        if not self._replicas.updated(replica, version, time.monotonic()):
            return
        self._first = None
        self._progress.weights_synced()
        seconds = time.monotonic() - began  # the wall clock may have been set meanwhile
        pause_seconds += loaded.pause_seconds
        self._journal.event(
            "sync", replica=replica.name, version=version, seconds=round(seconds, 4),
            pause_seconds=round(pause_seconds, 4), bytes=loaded.bytes, versions=self._replicas.versions,
            checksum=f"{loaded.checksum:x}",
        )  # fmt: skip
        await self._database.add_sync(
            SyncRecord(version, replica.name, started, started + seconds, pause_seconds, loaded.bytes)
        )

    async def _end_if_none_was_taken(self, broken: int, last: str) -> None:
        """Raises UserError, unless a replica has taken weights before the run was resumed."""
        if await self._database.newest_events("sync", 1):
            self._first = None
            return
        raise UserError(
            f"no replica has ever taken the trainer's weights: {broken} transfers have failed, the last one to {last}: "
            "if replicas cannot reach that address, start rank 0 of the trainer with one that they do reach in "
            "DART_TRANSFER_HOST; if they can, the logs of the replica and the trainer say more. All finished work is "
            "kept: continue with --resume"
        )

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Raises InfrastructureError for a TimeoutError."""
        try:
            yield
        except TimeoutError:
            raise InfrastructureError(
                "the transfer, or the pause for it, took longer than sync.timeout_seconds "
                f"({self._settings.timeout_seconds:g} s)"
            ) from None

    def _ahead(self, replica: Replica[Worker]) -> bool:
        """Whether the replica receives weights while it serves, ahead of loading them."""
        return self._settings.transport == "gloo" and has(replica.session.hello, RECEIVES_WHILE_SERVING)

    async def _leave_rotation(self, replica: Replica[Worker]) -> float:
        """Take the replica out of the rotation and, with `sync.mode: drain`, wait until it has drained.

        Returns how long that took, in seconds. Raises InfrastructureError.
        """
        _check_there(replica)
        began = time.monotonic()
        self._replicas.pause(replica, began)
        if self._settings.mode == "drain":
            await self._drained(replica)
        return time.monotonic() - began

    async def _transfer(self, replica: Replica[Worker], version: int) -> pb.WeightsLoaded:
        """Transfer weights from rank 0 into the replica's model. Raises InfrastructureError when either end fails, and
        TimeoutError.

        `pause_seconds` of the answer includes the time to drain, if the replica has left the rotation only here.
        """
        worker = replica.session
        name = f"w{next(self._numbers)}"
        work = pb.Assignment(assignment_id=name, attempt=1)
        group, tensors = self._group(replica), self._tensors
        load = pb.LoadWeights(assignment=work, version=version, pause_mode=_MODES[self._settings.mode], tensors=tensors)
        ahead = self._ahead(replica)
        receive = pb.ReceiveWeights(assignment=work, version=version, group=group, tensors=tensors)
        if not ahead:
            load.group.CopyFrom(group)
        try:
            with ungrouped(InfrastructureError):
                async with asyncio.timeout(self._settings.timeout_seconds), asyncio.TaskGroup() as ends:
                    answer = ends.create_task(worker.call(receive) if ahead else _load(worker, load))
                    sending = ends.create_task(self._ranks.send_weights(work, version, group))
            loaded: pb.WeightsLoaded = answer.result()
            if ahead:
                drain_seconds = await self._leave_rotation(replica)
                async with asyncio.timeout(self._settings.timeout_seconds):
                    loaded = await _load(worker, load)
                loaded.pause_seconds += drain_seconds
            if loaded.checksum and (sent := sending.result().checksum) not in (0, loaded.checksum):
                why = f"{replica.name} holds other weights than the trainer has sent as version {version}: their "
                raise InfrastructureError(f"{why}checksums are {loaded.checksum:x} and {sent:x}", replica.name)
        finally:
            worker.end_assignment(name, 1)
        return loaded

    async def _drained(self, replica: Replica[Worker]) -> None:
        """Wait until a replica that is out of the rotation has no request left.

        Raises _Untouched if they take too long, and InfrastructureError if it is gone: the trainer would wait for it in
        a group of its own.
        """
        seconds = self._settings.timeout_seconds
        changed = asyncio.Event()
        self._replicas.on_change.append(changed.set)
        try:
            async with asyncio.timeout(seconds):
                while replica.busy and not replica.gone:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise _Untouched(
                f"{replica.name}: requests in flight did not end within sync.timeout_seconds ({seconds:g} s): "
                "raise it, or set sync.mode to keep or abort"
            ) from None
        finally:
            self._replicas.on_change.remove(changed.set)
        _check_there(replica)

    def _group(self, replica: Replica[Worker]) -> weights_pb2.TransferGroup:
        """The replica's transfer group: made once per replica instance, and again after a failure."""
        if replica not in self._groups:
            self._groups = {known: group for known, group in self._groups.items() if not known.gone}
            self._groups[replica] = weights_pb2.TransferGroup(
                group_id=f"{replica.name}-{next(self._numbers)}",
                transport=self._settings.transport,
                host=self._ranks.rank0.ready.transfer_host or "127.0.0.1",
                port=free_port(),  # for the trainer: if it is taken by then, the transfer fails and is retried
                world_size=1 + replica.session.ready.engine_ranks,
            )
        return self._groups[replica]


def _reported(error: InfrastructureError) -> bool:
    """Whether one of the two ends said that the transfer failed, as it does where it finds no peer at the address."""
    told = error.__cause__ if isinstance(error, _Untouched) else error
    return isinstance(told, CommandFailed) and told.code == pb.FAILURE_CODE_TRANSFER


def _check_there(replica: Replica[Worker]) -> None:
    if replica.gone:
        raise InfrastructureError(f"{replica.name} is gone", replica.name)


async def _load(worker: Worker, command: pb.LoadWeights) -> pb.WeightsLoaded:
    """Raises _Untouched if the replica says that the transfer failed: it has gone on with the weights that it had."""
    try:
        reply: pb.WeightsLoaded = await worker.call(command)
    except CommandFailed as error:
        if error.code != pb.FAILURE_CODE_TRANSFER:
            raise
        raise _Untouched(str(error), error.worker) from error
    return reply
