"""Every way in which a stream can break is one event; a cancelled task is none."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from dart import config
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet, Worker, WorkerLost
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.channel import Dial
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.stream import Stream, StreamLostError
from dart.wire.worker import WorkerOptions, serve

REFUSED = grpc.aio.AioRpcError(grpc.StatusCode.UNAUTHENTICATED, details="wrong token")


class Broken:
    """A call that raises, as one that is over does."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    async def read(self) -> object:
        if self.error is not None:
            raise self.error
        return grpc.aio.EOF

    async def write(self, encoded: bytes) -> None:
        assert self.error is not None
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (asyncio.InvalidStateError("RPC already finished."), "RPC already finished"),
        (grpc.aio.UsageError("RPC already finished."), "RPC already finished"),
        (grpc.aio.InternalError("Failed grpc_call_start_batch"), "Failed grpc_call_start_batch"),
        (REFUSED, "wrong token"),
        (ConnectionResetError("reset by peer"), "reset by peer"),
        (EOFError(), "EOFError"),
        (asyncio.CancelledError(), "the call was cancelled"),
    ],
)
async def test_every_transport_error_is_a_lost_stream(error: BaseException, words: str) -> None:
    for attempt in (Stream(Broken(error)).read(), Stream(Broken(error)).write(b"")):
        with pytest.raises(StreamLostError, match=words) as met:
            await attempt
        assert met.value.code == (grpc.StatusCode.UNAUTHENTICATED if error is REFUSED else None)


async def test_the_end_of_a_stream_is_a_lost_stream() -> None:
    with pytest.raises(StreamLostError, match="without a goodbye"):
        await Stream(Broken()).read()


async def test_cancelling_the_task_passes_through() -> None:
    class Silent(Broken):
        async def read(self) -> object:
            await asyncio.Event().wait()
            return b""

    reading = asyncio.create_task(Stream(Silent()).read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()


class Prompt(WorkerRole):
    """Answers at once, so that there is nearly always something to write."""

    role = pb.ROLE_ENV

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=8)

    async def handle(self, command: Command) -> Reply | None:
        return pb.Released()


async def test_a_worker_that_writes_while_the_coordinator_dies_dials_again() -> None:
    """grpc.aio raises InvalidStateError for a write on a call that has just ended; it used to end the worker."""

    async def coordinator(port: int = 0) -> tuple[Server, Fleet, asyncio.Queue[Worker]]:
        settings = config.Server(port=port)
        fleet, ready = Fleet(settings.lost_after_seconds), asyncio.Queue[Worker]()
        fleet.on_ready.append(ready.put_nowait)
        server = Server(settings)
        await server.start(
            CoordinatorService(fleet, settings, "run", lambda hello: "{}"), control_pb2_grpc.ControlServiceServicer()
        )
        return server, fleet, ready

    async def calling(worker: Worker, name: str) -> None:
        try:
            while True:
                await worker.call(pb.Release(assignment=pb.Assignment(assignment_id=name, attempt=1)))
        except WorkerLost:
            pass

    stop = asyncio.Event()
    server, fleet, ready = await coordinator()
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        serving = [
            tasks.create_task(serve(Prompt(), WorkerOptions(Dial(server.address), f"w{number}"), stop))
            for number in range(4)
        ]
        for _ in range(6):
            async with asyncio.TaskGroup() as calls:
                for number in range(4):
                    worker = await ready.get()
                    for assignment in range(4):
                        calls.create_task(calling(worker, f"{number}-{assignment}"))
                await asyncio.sleep(0.05)
                await server._server.stop(None)  # as a killed process: no goodbye
                for worker in list(fleet.workers.values()):
                    fleet.lose(worker, "the coordinator died")
            server, fleet, ready = await coordinator(server.port)
        for _ in range(4):
            await ready.get()
        stop.set()
        assert {await one for one in serving} == {"stopped"}
    await server.stop()
