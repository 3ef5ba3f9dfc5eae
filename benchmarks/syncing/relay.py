"""Would relaying weights from replica to replica pay off? The same transfers, in three orders, without a coordinator.

in turn   the trainer sends to one replica after the other, as rolling sync does
at once   the trainer sends to all of them at the same time, as `schedule.sync: all` does
relay     every process that holds all of the weights sends them on: after k rounds 2^k processes have them

The project has no relay; this is an estimate with the project's senders and receivers. Groups stay open, as in the
project, and the first round of each order, which opens them, is not counted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from typing import Any

from benchmarks.syncing.cell import SLOWEST_BYTES_PER_SECOND, CellError, reasons
from benchmarks.syncing.crew import Crew, CrewError, Member
from benchmarks.syncing.plan import tensor_list
from dart.wire.channel import free_port

Order = dict[int, list[int]]
"""The transfers (source, target), one after the other; 0 is the trainer."""


def relay_order(replicas: int) -> Order:
    """In round k every process that has the weights sends them to the process 2^k places further on."""
    everyone = range(replicas + 1)
    return {
        source: [source + (1 << k) for k in range(replicas.bit_length()) if source < 1 << k <= replicas - source]
        for source in everyone
    }


async def measure(crew: Crew, size: int, replicas: int, repeats: int, transport: str) -> dict[str, Any]:
    """Seconds until all hold the bytes, by order. Raises CellError."""
    try:
        members = await crew.members(1 + replicas)
        relaying = _Relaying(members, size, transport)
        await relaying.hold()
        seconds: dict[str, list[float]] = {"in_turn": [], "at_once": [], "relay": []}
        singles: list[float] = []
        for number in range(1 + repeats):
            for name, times in seconds.items():
                order = relay_order(replicas) if name == "relay" else {0: list(range(1, 1 + replicas))}
                ends = await relaying.spread(order, at_once=name == "at_once")
                if number:
                    times.append(ends[-1])
                if number and name == "in_turn":
                    singles += [end - began for began, end in itertools.pairwise([0.0, *ends])]
        await relaying.drop()
    except (CrewError, TimeoutError, ExceptionGroup) as errors:
        raise CellError("; ".join(dict.fromkeys(reasons(errors)))) from None
    medians = {name: round(statistics.median(times), 4) for name, times in seconds.items()}
    single, rounds = statistics.median(singles), math.ceil(math.log2(1 + replicas))
    return {
        "bytes": relaying.bytes,
        "replicas": replicas,
        "seconds": medians,
        "in_turn_over_relay": round(medians["in_turn"] / medians["relay"], 2),
        "single_transfer_seconds": round(single, 4),
        "rounds": rounds,
        "calculated_if_links_shared_nothing": {
            "in_turn": round(single * replicas, 4),
            "relay": round(single * rounds, 4),
        },
    }


class _Relaying:
    """Members that hold tensors and send them to each other."""

    def __init__(self, members: list[Member], size: int, transport: str) -> None:
        self._members, self._size, self._transport = members, size, transport
        self._limit = 60 + len(members) * size / SLOWEST_BYTES_PER_SECOND
        self._groups: dict[tuple[int, int], dict[str, Any]] = {}
        self._version = 0
        self.bytes = sum(spec.bytes for spec in tensor_list(size))

    async def hold(self) -> None:
        tensors = {"bytes": self._size, "transport": self._transport}
        members = enumerate(self._members)
        await asyncio.gather(*(one.ask("hold", self._limit, random=number == 0, **tensors) for number, one in members))

    async def drop(self) -> None:
        sums = await asyncio.gather(*(one.ask("checksum", self._limit) for one in self._members))
        await asyncio.gather(*(one.ask("drop", self._limit) for one in self._members))
        if len({answer["checksum"] for answer in sums}) != 1:
            raise CrewError("not all hold the same bytes")

    async def spread(self, order: Order, at_once: bool) -> list[float]:
        """Send a new version to all; returns the seconds until each holds it, sorted."""
        self._version += 1
        await self._members[0].ask("mark", self._limit, version=self._version % 256)
        began = time.monotonic()
        ends: list[float] = []
        async with asyncio.TaskGroup() as tasks:

            async def send(source: int, target: int) -> None:
                ends.append(await self._transfer(source, target))
                tasks.create_task(pass_on(target))

            async def pass_on(source: int) -> None:
                for target in order.get(source, []):
                    if at_once:
                        tasks.create_task(send(source, target))
                    else:
                        await send(source, target)

            tasks.create_task(pass_on(0))
        return sorted(end - began for end in ends)

    async def _transfer(self, source: int, target: int) -> float:
        """Transfer everything; returns when the target held it."""
        group = self._groups.setdefault((source, target), self._new_group(source, target))
        end = {"group": group, "timeout_seconds": self._limit}
        async with asyncio.TaskGroup() as ends:
            ends.create_task(self._members[source].ask("send", self._limit, **end))
            receiving = ends.create_task(self._members[target].ask("receive", self._limit, bytes=self._size, **end))
        answer = receiving.result()
        if answer["version"] != self._version % 256:
            raise CrewError(f"version {self._version} arrived as {answer['version']}")
        return float(answer["loaded"])

    def _new_group(self, source: int, target: int) -> dict[str, Any]:
        return {"group_id": f"{source}-{target}", "transport": self._transport, "host": "127.0.0.1",
                "port": free_port(), "world_size": 2}  # fmt: skip
