"""The coordinator's step path against the raw gRPC ceiling, in one run: `python -m benchmarks.step_path`.

Real: the coordinator's server, sessions, pools, episode coroutine, grammar, prompt builder; gRPC over loopback; an env
worker and a roll-out worker in processes of their own, speaking the project's protocol.
Simulated: the two workers answer at once, with a fixed screenshot of random bytes and a fixed token sequence
(`benchmarks.instant`). There is no store.

A step is two round trips through the coordinator: observe → generate, act → observe. With pixels, one of the two
carries the screenshot: the replica keeps it, because it is always the same. The raw ceiling is round trips with answers
of the same sizes, one with a screenshot and one without in turn, on bidirectional grpc.aio streams with a peer process
and nothing behind them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.instant import coordinator, settings
from benchmarks.results import write
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.coordinator.sampling.episodes import sample
from dart.core.curation.orders import Order
from dart.core.types import Task, Trajectory
from dart.malloc import keep_memory
from dart.processes.settings import collect_seldom
from dart.wire.channel import OPTIONS

ITSELF = (sys.executable, "-m", "benchmarks.step_path")
RAW_METHOD = "/benchmark.Raw/Echo"
SMALL_BYTES = 64
"""Of a request, and of an answer without a screenshot."""


class Source:
    """Orders for `seconds`, then none."""

    temperature = 1.0

    def __init__(self, seconds: float, steps: int) -> None:
        self._until = time.perf_counter() + seconds
        self._steps_per_episode = steps
        self._number = 0
        self.steps = 0

    async def next(self) -> Order | None:
        if time.perf_counter() > self._until:
            return None
        self._number += 1
        return Order(f"t{self._number}", "g", Task("bench", "instant"), self._steps_per_episode)

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        self.steps += len(trajectory.steps)

    def failed(self, order: Order, error: InfrastructureError) -> None:
        raise error


async def step_path(seconds: float, slots: int, image_bytes: int) -> float:
    """Steps per second through the whole coordinator."""
    made = settings()
    env = ("env", "--slots", str(slots), "--image-bytes", str(image_bytes))
    async with coordinator(made, env, ("rollout", "--slots", str(slots))) as parts:
        source = Source(seconds, 30)
        began = time.perf_counter()
        await sample(source, parts.envs, parts.policy, made)
        return source.steps / (time.perf_counter() - began)


async def raw_ceiling(seconds: float, streams: int, payload: int) -> float:
    """Round trips per second on `streams` bidirectional streams to a peer process. Every second one has `payload`."""
    peer = await asyncio.create_subprocess_exec(*ITSELF, "--peer", str(payload), stdout=subprocess.PIPE)
    assert peer.stdout is not None
    address = (await peer.stdout.readline()).decode().strip()
    count = 0
    until = time.perf_counter() + seconds

    async def pump(channel: grpc.aio.Channel) -> None:
        nonlocal count
        call: Any = channel.stream_stream(RAW_METHOD)()
        while time.perf_counter() < until:
            await call.write(b"x" * SMALL_BYTES)
            await call.read()
            count += 1
        await call.done_writing()

    began = time.perf_counter()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        await asyncio.gather(*(pump(channel) for _ in range(streams)))
    rate = count / (time.perf_counter() - began)
    peer.terminate()
    await peer.wait()
    return rate


async def echo(payload: int, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """One answer with `payload`, as an environment's, then a small one, as a replica's, and so on."""
    answers = itertools.cycle((b"y" * payload, b"y" * SMALL_BYTES))
    async for _ in requests:
        yield next(answers)


async def echo_peer(payload: int) -> None:
    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for one in echo(payload, requests):
            yield one

    server = grpc.aio.server(options=OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(answer)
    service, method = RAW_METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def measure(seconds: float, slots: int) -> dict[str, Any]:
    results = {}
    for name, image_bytes, payload in (("no_pixels", SMALL_BYTES, SMALL_BYTES), ("pixels_200kb", 200_000, 200_000)):
        raw = await raw_ceiling(seconds, slots, payload)
        steps = await step_path(seconds, slots, image_bytes)
        results[name] = {
            "raw_round_trips_per_second": round(raw),
            "steps_per_second": round(steps),
            "step_path_round_trips_per_second": round(2 * steps),
            "ratio_to_raw": round(2 * steps / raw, 3),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_path.json")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        uvloop.run(echo_peer(int(given.peer)))
        return
    collect_seldom()
    keep_memory()
    results = uvloop.run(measure(given.seconds, given.slots))
    write(given.out, "step_path", "real coordinator, protocol and gRPC; workers answer at once; no store", results)
    for name, row in results.items():
        print(f"{name:14s} " + ", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
