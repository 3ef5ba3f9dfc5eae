"""What one of the benchmark's processes can do (`benchmarks.syncing.member`): sessions, plain links, transfers."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for the plain link; the project's groups choose by address

import torch
import torch.distributed as dist

from benchmarks.syncing.plan import tensor_list
from benchmarks.syncing.roles import (
    RandomTrainer,
    Receiver,
    SleepingReplica,
    device_of,
    empty_weights,
    make_receiver,
    mark_of,
    marked,
    random_weights,
)
from dart.v1 import weights_pb2 as wpb
from dart.wire.channel import Dial
from dart.wire.worker import WorkerOptions, serve
from dart.workers.weights.transfer import Sender, checksum, make_sender

ROLES: dict[str, Any] = {"train": RandomTrainer, "rollout": SleepingReplica}
Command = dict[str, Any]


class Hands:
    """`do_NAME` carries out the command NAME; commands run side by side. Blocking work goes to threads."""

    def __init__(self, index: int, say: Callable[[dict[str, Any]], None]) -> None:
        self._index, self._say = index, say
        self._weights: dict[str, torch.Tensor] = {}
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[str, Receiver] = {}
        torch.set_num_threads(1)

    async def do_look(self, _: Command) -> dict[str, Any]:
        """Report what this machine has."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {"torch": torch.__version__, "gpus": gpus}

    async def do_serve(self, command: Command) -> None:
        """Hold a session with a coordinator until it says goodbye."""
        role = ROLES[command["role"]](command["name"], self._index, self._say)
        await serve(
            role,
            WorkerOptions(Dial(command["address"]), command["name"]),
            asyncio.Event(),
        )
        del role
        _let_go()

    async def do_link(self, command: Command) -> dict[str, Any]:
        """Be one end of plain sends and receives; returns when each began and ended here."""
        return {"spans": await asyncio.to_thread(self._link, command)}

    def _link(self, command: Command) -> list[tuple[float, float]]:
        device = device_of(command["transport"], self._index)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        meeting = f"tcp://127.0.0.1:{command['port']}"
        patience = timedelta(seconds=command["timeout_seconds"])
        rank = command["rank"]
        dist.init_process_group(command["transport"], init_method=meeting, rank=rank, world_size=2, timeout=patience)
        try:
            buffer = torch.ones(command["bytes"], dtype=torch.uint8, device=device)
            spans = []
            for _ in range(command["times"]):
                dist.barrier()
                began = time.monotonic()
                if rank == 0:
                    dist.send(buffer, 1)
                else:
                    dist.recv(buffer, 0)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                spans.append((began, time.monotonic()))
            dist.barrier()
            return spans
        finally:
            dist.destroy_process_group()

    async def do_hold(self, command: Command) -> None:
        """Make tensors for transfers without a session: random ones, or empty ones to receive into."""
        specs, device = tensor_list(command["bytes"]), device_of(command["transport"], self._index)
        if command["random"]:
            self._weights = await asyncio.to_thread(random_weights, specs, device, 0)
        else:
            self._weights = await asyncio.to_thread(empty_weights, specs, device)

    async def do_mark(self, command: Command) -> None:
        self._weights = marked(self._weights, command["version"])

    async def do_send(self, command: Command) -> dict[str, Any]:
        """Send everything to a group's other end; the group stays open."""
        group = wpb.TransferGroup(**command["group"])
        if group.group_id not in self._senders:
            self._senders[group.group_id] = make_sender(group.transport, command["timeout_seconds"])
        sender, weights = self._senders[group.group_id], self._weights
        device = device_of(group.transport, self._index)

        def send() -> int:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            sender.open(group)
            return sender.send(weights.items())

        return {"bytes": await asyncio.to_thread(send)}

    async def do_receive(self, command: Command) -> dict[str, Any]:
        """Receive everything from a group's sender; returns when it had arrived, and the version in it."""
        group, specs = wpb.TransferGroup(**command["group"]), tensor_list(command["bytes"])
        if group.group_id not in self._receivers:
            device = device_of(group.transport, self._index)
            made = make_receiver(group.transport, self._weights, device, command["timeout_seconds"])
            self._receivers[group.group_id] = made
        _, _, loaded = await asyncio.to_thread(self._receivers[group.group_id].take, group, specs)
        return {"loaded": loaded, "version": mark_of(self._weights)}

    async def do_checksum(self, _: Command) -> dict[str, Any]:
        return {"checksum": await asyncio.to_thread(checksum, self._weights.items())}

    async def do_drop(self, _: Command) -> None:
        """Leave all groups and free the tensors."""
        ends: list[Any] = [*self._senders.values(), *self._receivers.values()]
        self._senders, self._receivers, self._weights = {}, {}, {}
        while ends:
            await asyncio.to_thread(ends.pop().close)
        _let_go()


def _let_go() -> None:
    """Return free memory to the system: malloc keeps tensors of up to 32 MiB, and the next cell may be larger."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
