"""One of the benchmark's processes: `python -m benchmarks.syncing.member INDEX`. Started by `benchmarks.syncing.crew`.

Commands come on standard input, a JSON line each, and are carried out side by side; answers and events go to standard
output. When standard input closes, the parent is gone or has done with it, and the process ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # of the plain link; the project's groups choose by address

import torch
import torch.distributed as dist
import uvloop

from benchmarks.syncing.plan import tensor_list
from benchmarks.syncing.roles import (
    RandomTrainer,
    Receiver,
    SleepingReplica,
    checksum,
    device_of,
    empty_weights,
    make_receiver,
    mark_of,
    marked,
    random_weights,
)
from dart.errors import UserError
from dart.v1 import weights_pb2 as wpb
from dart.wire.channel import Dial
from dart.wire.worker import WorkerOptions, serve
from dart.workers.weights.transfer import Sender, TransferError, make_sender

ROLES = {"train": RandomTrainer, "rollout": SleepingReplica}
Command = dict[str, Any]


class Process:
    def __init__(self, index: int, output: int) -> None:
        self._index, self._output = index, output
        self._weights: dict[str, torch.Tensor] = {}
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[str, Receiver] = {}

    def say(self, message: dict[str, Any]) -> None:
        os.write(self._output, json.dumps(message).encode() + b"\n")

    async def run(self) -> None:
        """Until standard input closes, which ends the process."""
        loop = asyncio.get_running_loop()
        commands: asyncio.Queue[Command] = asyncio.Queue()
        watch = threading.Thread(target=_read, args=(loop, commands), daemon=True, name="commands")
        watch.start()
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._answer(await commands.get()))

    async def _answer(self, command: Command) -> None:
        try:
            done = await getattr(self, f"do_{command['do']}")(command)
        except (UserError, TransferError, RuntimeError, OSError, ValueError, ExceptionGroup) as error:
            self.say({"id": command["id"], "error": f"{type(error).__name__}: {error}"})
        else:
            self.say({"id": command["id"], "done": done or {}})

    async def do_look(self, _: Command) -> dict[str, Any]:
        """What there is here."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return {"torch": torch.__version__, "gpus": gpus}

    async def do_serve(self, command: Command) -> None:
        """A session with a coordinator, until it says goodbye."""
        role = ROLES[command["role"]](command["name"], self._index, self.say)
        await serve(role, WorkerOptions(Dial(command["address"]), command["name"]), asyncio.Event())
        del role
        gc.collect()

    async def do_link(self, command: Command) -> dict[str, Any]:
        """One end of plain sends and receives; when each began and ended here."""
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
        """Tensors for transfers without a session: random ones, or empty ones to receive into."""
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
        """Receive everything from a group's sender; when it was here, and what it says that it is."""
        group, specs = wpb.TransferGroup(**command["group"]), tensor_list(command["bytes"])
        if group.group_id not in self._receivers:
            device = device_of(group.transport, self._index)
            made = make_receiver(group.transport, self._weights, device, command["timeout_seconds"])
            self._receivers[group.group_id] = made
        _, _, loaded = await asyncio.to_thread(self._receivers[group.group_id].take, group, specs)
        return {"loaded": loaded, "version": mark_of(self._weights)}

    async def do_checksum(self, _: Command) -> dict[str, Any]:
        return {"checksum": await asyncio.to_thread(checksum, self._weights)}

    async def do_drop(self, _: Command) -> None:
        """Leave all groups and let the tensors go."""
        for end in (*self._senders.values(), *self._receivers.values()):
            await asyncio.to_thread(end.close)
        self._senders, self._receivers, self._weights = {}, {}, {}
        gc.collect()


def _read(loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Command]) -> None:
    # Not sys.stdin: a thread that waits in it holds its lock.
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
    os._exit(0)


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    uvloop.run(Process(int(sys.argv[1]), output).run())


if __name__ == "__main__":
    main()
