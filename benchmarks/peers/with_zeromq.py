"""ZeroMQ as a contender of `benchmarks.transport`: what a hand-written transport could be.

It stores, checks and acknowledges nothing, and loses what is in flight when an end dies. Run by the peers' interpreter.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import zmq

from benchmarks.peers import shared

SPAWN = multiprocessing.get_context("spawn")
REQUESTS_AT_ONCE = {"64 at once": 64, "1000 at once": 1000}


@contextmanager
def _peers(target: Any, sockets: list[zmq.Socket[bytes]], *arguments: Any) -> Iterator[None]:
    """Bind these sockets and start a process for each, which gets its socket's address."""
    started: list[BaseProcess] = []
    for socket in sockets:
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        started.append(SPAWN.Process(target=target, args=(address, *arguments), daemon=True))
        started[-1].start()
    try:
        yield
    finally:
        for process in started:
            process.terminate()
            process.join()


def _address(transport: str, number: int) -> str:
    return "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{Path(gettempdir(), f'z{number}')}"


def _answer(address: str, size: int) -> None:
    """Be an environment process: answer each request with a fresh screenshot."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    socket.send(b"here")
    screenshots = shared.Screenshots(size)
    while True:
        number = socket.recv()
        socket.send_multipart([number, screenshots.next()], copy=size < zmq.COPY_THRESHOLD)


def _ask(sockets: list[zmq.Socket[bytes]], size: int, at_once: int, warm: float, seconds: float) -> None:
    """Keep `at_once` requests in flight, spread over the sockets, and print the results."""
    poller = zmq.Poller()
    peers: dict[zmq.Socket[bytes], bytes] = {}
    for socket in sockets:
        peers[socket], _ = socket.recv_multipart()
        poller.register(socket, zmq.POLLIN)
    paths = shared.Paths(at_once)
    asked = [0.0] * at_once
    tally = shared.Tally(warm, seconds)

    def ask(socket: zmq.Socket[bytes], number: int) -> None:
        asked[number] = time.perf_counter()
        socket.send_multipart([peers[socket], number.to_bytes(4, "little")])

    for number in range(at_once):
        ask(sockets[number % len(sockets)], number)
    while not tally.over:
        for socket, _ in poller.poll(1000):
            while True:
                try:
                    _, which, screenshot = socket.recv_multipart(zmq.NOBLOCK, copy=size < zmq.COPY_THRESHOLD)
                except zmq.Again:
                    break
                number = int.from_bytes(_data(which), "little")
                shared.touch(_data(screenshot))
                tally.ended(asked[number], steps=1, trajectories=paths.step(number, screenshot))
                ask(socket, number)
                if tally.over:
                    break
    tally.report()


def _data(part: bytes | zmq.Frame) -> Any:
    return part if isinstance(part, bytes) else part.buffer


def _asking(size: int, transport: str, processes: int, at_once: int, warm: float, seconds: float) -> None:
    context = zmq.Context()
    sockets = []
    for number in range(processes):
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(_address(transport, number))
        sockets.append(socket)
    with _peers(_answer, sockets, size):
        _ask(sockets, size, at_once, warm, seconds)
    context.destroy(linger=0)


def steps(variant: str, warm: float, seconds: float) -> None:
    """ROUTER here, a DEALER in each environment process; each environment has one request in flight at a time."""
    transport, processes = variant.split(", ")
    _asking(shared.SCREENSHOT_BYTES, transport, int(processes.split()[0]), shared.ENVIRONMENTS, warm, seconds)


def small(variant: str, warm: float, seconds: float) -> None:
    """Single round trips: the same as `steps`, without pixels."""
    transport, at_once = variant.split(", ")
    _asking(shared.SMALL_BYTES, transport, 1, REQUESTS_AT_ONCE[at_once], warm, seconds)


def _push(address: str) -> None:
    """Be a producer: each trajectory is one message, the time followed by its screenshots."""
    socket = zmq.Context().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, shared.AHEAD // 2)
    socket.connect(address)
    ring = shared.trajectories()
    for number in range(1 << 60):
        stamp = str(time.perf_counter()).encode()
        socket.send_multipart([stamp, *ring[number % len(ring)]], copy=False)


def whole(variant: str, warm: float, seconds: float) -> None:
    """PULL here, PUSH in one producer process; each end holds four trajectories at most."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, shared.AHEAD // 2)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)
    socket.bind(_address(variant, 0))
    with _peers(_push, [socket]):
        first = True
        tally = shared.Tally(warm, seconds)
        while not tally.over:
            stamp, *screenshots = socket.recv_multipart(copy=False)
            if first:  # the producer is up
                first, tally = False, shared.Tally(warm, seconds)
            for screenshot in screenshots:
                shared.touch(screenshot.buffer)
            # Both ends share the machine's clock.
            tally.ended(float(stamp.bytes), steps=len(screenshots), trajectories=1)
        tally.report()
    context.destroy(linger=0)


if __name__ == "__main__":
    shared.run({"steps": steps, "whole": whole, "small": small})
