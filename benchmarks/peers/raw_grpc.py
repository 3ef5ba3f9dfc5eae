"""Plain grpc.aio as a contender of `benchmarks.transport`: the ceiling for anything built on it, such as `dart`.

Bidirectional streams of bytes to one peer process, no protocol messages, no coordinator, nothing stored or checked. Run
by the project's interpreter.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from benchmarks.peers import shared
from dart.wire.channel import OPTIONS

SERVICE, METHOD = "benchmark.Raw", "Step"
PEER = "peer"
SMALL_STREAMS = 64


async def _answer(size: int) -> None:
    """Be the peer: answer each message with a fresh screenshot."""
    screenshots = shared.Screenshots(size)

    async def step(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield screenshots.next()

    server = grpc.aio.server(options=OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(step)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _ask(size: int, streams: int, warm: float, seconds: float) -> None:
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.peers.raw_grpc", PEER, "--variant", str(size), stdout=subprocess.PIPE
    )
    assert peer.stdout is not None
    address = (await peer.stdout.readline()).decode().strip()
    paths = shared.Paths(streams)

    async def environment(channel: grpc.aio.Channel, number: int, tally: shared.Tally) -> None:
        call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        while not tally.over:
            asked = time.perf_counter()
            await call.write(b"x" * shared.SMALL_BYTES)
            screenshot = await call.read()
            shared.touch(screenshot)
            tally.ended(asked, steps=1, trajectories=paths.step(number, screenshot))
        await call.done_writing()

    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        tally = shared.Tally(warm, seconds)
        await asyncio.gather(*(environment(channel, number, tally) for number in range(streams)))
    tally.report()
    peer.terminate()
    await peer.wait()


def steps(variant: str, warm: float, seconds: float) -> None:
    """One stream per environment."""
    uvloop.run(_ask(shared.SCREENSHOT_BYTES, shared.ENVIRONMENTS, warm, seconds))


def small(variant: str, warm: float, seconds: float) -> None:
    uvloop.run(_ask(shared.SMALL_BYTES, SMALL_STREAMS, warm, seconds))


def answer(variant: str, warm: float, seconds: float) -> None:
    uvloop.run(_answer(int(variant)))


if __name__ == "__main__":
    shared.run({"steps": steps, "small": small, PEER: answer})
