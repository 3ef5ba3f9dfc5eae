"""Connections on which nothing is said cost the coordinator no descriptor that it needs, and end by themselves."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import grpc
import pytest

from dart.v1 import session_pb2 as pb
from dart.wire.channel import (
    KEPT_DESCRIPTORS,
    OPTIONS,
    PROTOCOL_VERSION,
    Dial,
    most_connections,
    most_env_workers,
)
from dart.wire.stream import Stream
from dart.wire.worker import _session_call


class Apart(Dial):
    """Gives each channel its own connection; otherwise channels of one process to one address share one."""

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


LIMIT, IDLE = 150, 300
COORDINATOR = """
import asyncio, resource, sys, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
from dart import config
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet
from dart.v1 import control_pb2_grpc

async def main():
    settings = config.Server()
    server = Server(settings)
    service = CoordinatorService(Fleet(60.0), settings, "run", lambda hello: "{}")
    await server.start(service, control_pb2_grpc.ControlServiceServicer())
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.readline)
    opened = failed = 0
    while not ended.done():
        try:
            tempfile.TemporaryFile().close()
            opened += 1
        except OSError as error:
            failed += 1
        await asyncio.sleep(0.02)
    print(opened, failed, flush=True)
    await server.stop()

asyncio.run(main())
"""


@pytest.mark.parametrize(("open_files", "connections"), [(150, 75), (1024, 1024 - KEPT_DESCRIPTORS)])
def test_connections_leave_descriptors_for_everything_else(open_files: int, connections: int) -> None:
    assert most_connections(open_files) == connections


def test_idle_connections_take_no_descriptor_that_is_needed_and_are_closed() -> None:
    coordinator = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, str(LIMIT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert coordinator.stdin is not None and coordinator.stdout is not None
    with ExitStack() as undo:
        undo.callback(coordinator.kill)
        where = "127.0.0.1", int(coordinator.stdout.readline())
        idle = [undo.enter_context(socket.create_connection(where)) for _ in range(IDLE)]
        left, hang_guard = set(idle), time.monotonic() + 240
        while left:
            assert time.monotonic() < hang_guard, f"{len(left)} connections are still open"
            left = {one for one in left if not _closed(one)}
            time.sleep(0.2)
        output, _ = coordinator.communicate("end\n", timeout=120)
    opened, failed = map(int, output.split())
    assert opened > 0 and failed == 0, "files can be opened all the time"


async def _answer(address: str, role: pb.Role, number: int, stack: AsyncExitStack) -> pb.SessionResponse:
    channel = await stack.enter_async_context(Apart(address).channel())
    stream = Stream(_session_call(channel)())
    hello = pb.Hello(
        worker_id=f"w{number}", instance_id=f"w{number}", role=role, protocol_version=PROTOCOL_VERSION, world_size=1
    )
    await stream.write(pb.SessionRequest(hello=hello).SerializeToString())
    return pb.SessionResponse.FromString(await stream.read())


@pytest.fixture
def small() -> Iterator[subprocess.Popen[str]]:
    """A coordinator that may have 64 files open."""
    started = subprocess.Popen(
        [sys.executable, "-c", COORDINATOR, "64"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def test_an_env_worker_too_many_is_told_so_and_the_others_that_a_run_needs_come_in(
    small: subprocess.Popen[str],
) -> None:
    assert small.stdin is not None and small.stdout is not None
    most = most_env_workers(64)
    assert most < most_connections(64) < 64
    address = f"127.0.0.1:{int(small.stdout.readline())}"
    async with asyncio.timeout(240), AsyncExitStack() as others, AsyncExitStack() as first:
        assert (await _answer(address, pb.ROLE_ENV, 0, first)).HasField("welcome")
        for number in range(1, most):
            assert (await _answer(address, pb.ROLE_ENV, number, others)).HasField("welcome")
        refused = (await _answer(address, pb.ROLE_ENV, most, first)).reject
        assert refused.retry_after_seconds > 0, "another may leave"
        assert refused.reason.startswith(f"it may have only 64 files open, and {most} env workers are connected: ")
        assert (await _answer(address, pb.ROLE_ENV, 1, others)).HasField("welcome"), "it comes back"
        for role in (pb.ROLE_ROLLOUT, pb.ROLE_TRAIN):
            assert (await _answer(address, role, 1000 + role, others)).HasField("welcome")
        await first.aclose()
        admitted = False
        while not admitted:
            async with AsyncExitStack() as again:
                admitted = (await _answer(address, pb.ROLE_ENV, most, again)).HasField("welcome")
    output, _ = small.communicate("end\n", timeout=120)
    assert output.split()[1] == "0", "files can be opened all the time"


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
