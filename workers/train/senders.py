"""Weights on their way out of the trainer: the staged versions, and the trainer's ends of the transfer groups.

A group stays open from one version to the next. After an error it is left, because one end cannot know what the other
has seen, and the coordinator then names a new one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from dart.shortage import shortage
from dart.v1 import weights_pb2 as wpb
from dart.workers.weights.transfer import Sender, TransferError, make_sender, reason

T = TypeVar("T")
Weights = dict[str, torch.Tensor]

MAX_GROUPS = 256
"""The most open groups; beyond that, the least recently used one is left."""
MOST_PASSED_OVER = 4
"""A gloo group that is passed over so many times, while all others send, is left: its replica has gone, and it would
keep two buffers as large as the largest weight. Should the replica still be there, one transfer to it fails, and the
next one is in a new group."""
MOST_PASSED_OVER_NCCL = 64
"""The same over NCCL, where a group has smaller buffers, and a replica that is still there would wait in the group that
was left until its engine has to end."""


class Senders:
    """Used from the event loop; the transfers themselves run in threads, groups side by side."""

    def __init__(self, transport: str, timeout_seconds: float, begin: Callable[[], object] | None = None) -> None:
        """`begin`: called once in each thread, for example to choose its GPU."""
        self._transport = transport
        self._timeout_seconds = timeout_seconds
        self._threads = ThreadPoolExecutor(MAX_GROUPS, "weights", begin)
        """Not asyncio's default executor: there, a few transfers would block everything else, and each other."""
        self._open: OrderedDict[str, Sender] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._ended: dict[str, Future[str]] = {}
        """What ends each group before its time (`make_sender`)."""
        self._sent = 0
        """Transfers so far."""
        self._last: dict[str, int] = {}
        """The number of each open group's last transfer."""
        self._patience: dict[str, int] = {}
        """How often each open group may be passed over."""

    async def send(self, group: wpb.TransferGroup, weights: dict[str, torch.Tensor]) -> int:
        """Send all weights to the group's replica; returns the bytes sent. Raises TransferError."""
        async with self._locks.setdefault(group.group_id, asyncio.Lock()):
            self._sent += 1
            self._last[group.group_id] = self._sent
            gloo = (group.transport or self._transport) == "gloo"
            self._patience[group.group_id] = MOST_PASSED_OVER if gloo else MOST_PASSED_OVER_NCCL
            self._ended.setdefault(group.group_id, Future())
            if group.group_id not in self._open:
                await self._leave_former(group.group_id)
            try:
                sender = await self._sender(group)

                def transfer() -> int:
                    sender.open(group)
                    return sender.send(weights.items())

                return await self._in_thread(transfer)
            except TransferError:
                self._forget(group.group_id)
                raise
            finally:
                await self._leave_oldest()

    def end(self, group_id: str, why: str) -> None:
        """End the group, if it is open, and with it a transfer that is under way: `send` then raises TransferError."""
        ended = self._ended.get(group_id)
        if ended is not None and not ended.done():
            ended.set_result(why)

    async def close(self) -> None:
        """Leave all groups; replicas that wait in one get an error."""
        for group_id in self._ended:
            self.end(group_id, "the trainer is closing")
        senders = list(self._open.values())
        self._open.clear()
        for sender in senders:
            await self._in_thread(sender.close)
        self._threads.shutdown(wait=False)

    async def _sender(self, group: wpb.TransferGroup) -> Sender:
        if (sender := self._open.get(group.group_id)) is None:
            # In a thread, because it may import vLLM, which takes seconds.
            sender = self._open[group.group_id] = await self._in_thread(lambda: self._make(group))
        self._open.move_to_end(group.group_id)
        return sender

    def _make(self, group: wpb.TransferGroup) -> Sender:
        transport = group.transport or self._transport
        try:
            return make_sender(transport, self._timeout_seconds, self._ended[group.group_id])
        except Exception as error:  # noqa: BLE001 - of any vLLM's making: the transfer fails, and the trainer goes on
            raise TransferError(f"group {group.group_id}: {reason(transport, error)}") from None

    def _forget(self, group_id: str) -> None:
        self._open.pop(group_id, None)
        self._locks.pop(group_id, None)
        self._ended.pop(group_id, None)
        self._last.pop(group_id, None)
        self._patience.pop(group_id, None)

    async def _leave_former(self, group_id: str) -> None:
        """Leave the groups (and free the buffers) of this replica's earlier instances; ids are REPLICA-NUMBER."""
        replica, _, _ = group_id.rpartition("-")
        if not replica:
            return
        await self._leave([one for one in self._open if one.rpartition("-")[0] == replica])

    async def _leave_oldest(self) -> None:
        idle = [group_id for group_id in self._open if not self._locks[group_id].locked()]
        rounds = {group_id: (self._sent - self._last[group_id]) / len(self._open) for group_id in idle}
        gone = [group_id for group_id in idle if rounds[group_id] > self._patience[group_id]]
        await self._leave(gone or idle[: max(0, len(self._open) - MAX_GROUPS)])

    async def _leave(self, group_ids: Iterable[str]) -> None:
        """Leave those of the groups that are still open and idle: while one is left, others may be left elsewhere, or
        be sent to."""
        for group_id in group_ids:
            sender, lock = self._open.get(group_id), self._locks.get(group_id)
            if sender is not None and not (lock and lock.locked()):
                self._forget(group_id)
                await self._in_thread(sender.close)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Raises TransferError where the machine has no thread for it: a transfer is repeated, the trainer is not."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError as error:
            if not (short := shortage(error)):
                raise
            raise TransferError(short) from None


class Snapshots:
    """The staged weights of the newest versions, each immutable, kept for as long as a transfer may want them.

    It keeps the newest version, those being sent, and the one before the newest until a transfer of the newest is
    requested: a command to send the older one may have crossed the report of the newer one on the wire. When the next
    update begins, that can no longer be, and the memory of a version that was dropped is used for the next one: so
    there are two copies of the weights, and more only while replicas are being sent older ones. Owned by the role; used
    from the event loop only.
    """

    def __init__(self) -> None:
        self._weights: dict[int, Weights] = {}
        self._sending: dict[int, int] = {}
        self._newest = -1
        self._newest_asked_for = False
        self._spare: Weights | None = None

    @property
    def versions(self) -> list[int]:
        return sorted(self._weights)

    def stage(self, version: int, weights: Weights) -> None:
        if version <= self._newest:
            raise ValueError(f"version {version} is not newer than {self._newest}")
        previous, self._newest, self._newest_asked_for = self._newest, version, False
        self._weights[version] = weights
        self._drop(keep=previous)

    def spare(self) -> Weights | None:
        """A dropped version's memory, for the next one; None if there is none. Called when an update begins."""
        self._drop(keep=None)
        spare, self._spare = self._spare, None
        return spare

    def give_back(self, spare: Weights | None) -> None:
        """The update was refused, and made no version of this memory."""
        self._spare = self._spare or spare

    @contextmanager
    def sending(self, version: int) -> Iterator[Weights]:
        """The version's weights, kept while the context is open. Raises KeyError if they are gone."""
        weights = self._weights[version]
        self._sending[version] = self._sending.get(version, 0) + 1
        self._newest_asked_for = self._newest_asked_for or version == self._newest
        try:
            yield weights
        finally:
            self._sending[version] -= 1
            if not self._sending[version]:
                del self._sending[version]
            previous = max((v for v in self._weights if v != self._newest), default=None)
            self._drop(keep=None if self._newest_asked_for else previous)

    def _drop(self, keep: int | None) -> None:
        for version in list(self._weights):
            if version not in (self._newest, keep) and version not in self._sending:
                self._spare = self._weights.pop(version)
