"""Connections on which nothing is said cost the coordinator no descriptor that it needs, and end by themselves."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from dart.wire.channel import KEPT_DESCRIPTORS, most_connections

LIMIT, IDLE = 150, 300
COORDINATOR = f"""
import asyncio, resource, sys, tempfile
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from dart import config
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet
from dart.v1 import control_pb2_grpc

async def main():
    settings = config.Server()
    server = Server(settings)
    service = CoordinatorService(Fleet(60.0), settings, "run", lambda hello: "{{}}")
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
        [sys.executable, "-c", COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
