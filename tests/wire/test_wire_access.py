"""Who may begin a session, who may resume it, and what a stranger costs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from dart import config
from dart.coordinator.fleet import door
from dart.coordinator.fleet.door import Door, RareLine, Refused
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, Worker
from dart.core.loopback import is_loopback
from dart.errors import UserError
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire import channel
from dart.wire.channel import MAX_MESSAGE_BYTES, OPTIONS, Dial, authorised
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.stream import Stream
from dart.wire.worker import WorkerOptions, serve

METHOD = f"/{pb.DESCRIPTOR.services_by_name['CoordinatorService'].full_name}/Session"
TOKENS = {"env": "env:ENV_TOKEN", "rollout": "env:ROLLOUT_TOKEN", "train": "env:TRAIN_TOKEN"}


class Place:
    """A coordinator that anybody can dial."""

    def __init__(self, settings: config.Server) -> None:
        self.fleet = Fleet(settings.lost_after_seconds)
        self.ready: asyncio.Queue[Worker] = asyncio.Queue()
        self.fleet.on_ready.append(self.ready.put_nowait)
        self.server = Server(settings)
        self.service = CoordinatorService(self.fleet, settings, "run", lambda hello: "{}")

    @asynccontextmanager
    async def call(self, token: str | None = None) -> AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]:
        """A stream, with the role's token, that has said nothing yet."""
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        async with grpc.aio.insecure_channel(self.server.address, options=OPTIONS) as channel:
            yield channel.stream_stream(METHOD, None, None)(metadata=metadata)

    async def says(self, hello: pb.Hello, token: str | None = None) -> pb.SessionResponse:
        """What the coordinator answers to a Hello."""
        async with self.call(token) as call:
            await call.write(pb.SessionRequest(hello=hello).SerializeToString())
            return pb.SessionResponse.FromString(await call.read())


@asynccontextmanager
async def place(**settings: object) -> AsyncIterator[Place]:
    made = Place(config.Server.model_validate({"heartbeat_seconds": 0.1, "lost_after_seconds": 2.0, **settings}))
    await made.server.start(made.service, control_pb2_grpc.ControlServiceServicer())
    reaping = asyncio.create_task(made.fleet.reap())
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        reaping.cancel()
        await made.server.stop()


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for source in TOKENS.values():
        name = source.removeprefix("env:")
        monkeypatch.setenv(name, name.lower())
    return TOKENS


def hello(name: str = "train", role: pb.Role = pb.ROLE_TRAIN, **more: int | str) -> pb.Hello:
    said: dict[str, int | str] = {"instance_id": name, "protocol_version": 1, "world_size": 1, **more}
    return pb.Hello(worker_id=name, role=role, **said)  # type: ignore[arg-type]


async def refusal(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    return error.value


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What the coordinator and gRPC say; asyncio may still complain about the loop of an earlier test."""
    return [record for record in caplog.records if record.name.startswith(("dart", "grpc"))]


async def test_no_other_role_name_or_rank_takes_a_session_over(tokens: dict[str, str]) -> None:
    async with place(tokens=tokens) as at, at.call("train_token") as call:
        await call.write(pb.SessionRequest(hello=hello()).SerializeToString())
        welcome = pb.SessionResponse.FromString(await call.read()).welcome
        await call.write(pb.SessionRequest(ready=pb.Ready(slots=1)).SerializeToString())
        trainer = await at.ready.get()
        epoch = welcome.epoch
        for thief, token in (
            (pb.Hello(worker_id="train", instance_id="train", role=pb.ROLE_ENV, protocol_version=1), "env_token"),
            (pb.Hello(worker_id="e", instance_id="train", role=pb.ROLE_ENV, protocol_version=1), "env_token"),
            (hello("x", instance_id="train", rank=5), "train_token"),
        ):  # fmt: skip
            for last_epoch in (epoch, 0):
                thief.last_epoch = last_epoch
                answer = await at.says(thief, token)
                assert answer.reject.reason.startswith("the session to resume belongs to train"), answer
        async with at.call("env_token") as other:
            await other.write(pb.SessionRequest(hello=hello(last_epoch=epoch)).SerializeToString())
            assert (await refusal(other)).code() == grpc.StatusCode.UNAUTHENTICATED
        assert trainer.state == "ready" and not trainer.hung_up.is_set()


async def test_a_second_live_rank_is_rejected_and_a_restarted_one_is_not() -> None:
    async with place() as at:
        async with at.call() as call:
            await call.write(pb.SessionRequest(hello=hello("first")).SerializeToString())
            await call.read()
            await call.write(pb.SessionRequest(ready=pb.Ready(slots=1)).SerializeToString())
            first = await at.ready.get()

            async def alive() -> None:
                while True:
                    await call.write(pb.SessionRequest(heartbeat=pb.Heartbeat()).SerializeToString())
                    await asyncio.sleep(0.1)

            beating = asyncio.create_task(alive())
            answer = await at.says(hello("second"))
            assert answer.reject.reason == "rank 0 is in use by first, which is alive"
            assert answer.reject.remedy == "stop that worker first, or give this one another name or rank"
            beating.cancel()
            await asyncio.wait({beating})
            # Its stream is there, but nothing comes on it any more.
            assert (await at.says(hello("second"))).HasField("welcome")
            assert first.state == "lost"
        assert (await at.says(hello("third"))).HasField("welcome"), "that of the second has ended"


async def test_a_wrong_token_is_refused_before_anything_is_read(tokens: dict[str, str]) -> None:
    async with place(tokens=tokens) as at:
        for token in (None, "wrong"):
            async with at.call(token) as call:
                assert (await refusal(call)).code() == grpc.StatusCode.UNAUTHENTICATED
    assert not authorised({"authorization": "Bearer \u00fc"}, "secret"), "what is not ASCII is no error"


async def test_a_stream_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HELLO_SECONDS", 0.2)
    async with place() as at, at.call() as call:
        error = await refusal(call)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no Hello within" in (error.details() or "")


async def test_the_oldest_silent_stream_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MOST_WAITING", 2)
    async with place() as at, at.call() as oldest:
        ending = asyncio.create_task(refusal(oldest))
        while not at.service._door._places:
            await asyncio.sleep(0.01)
        async with at.call() as second, at.call() as third:
            reading = [asyncio.create_task(call.read()) for call in (second, third)]
            assert "newer streams are waiting" in ((await ending).details() or "")
            assert not any(task.done() for task in reading)
            assert (await at.says(hello("a-worker"))).HasField("welcome")
            for task in reading:
                task.cancel()


async def test_a_stream_whose_time_is_just_up_gives_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the moment when the time is up and the one when its coroutine hears of it."""
    monkeypatch.setattr(door, "MOST_WAITING", 1)
    monkeypatch.setattr(door, "HELLO_SECONDS", 0.0)

    class Silent:
        async def read(self) -> object:
            return await asyncio.Event().wait()

        async def write(self, encoded: bytes, /) -> None: ...

    here = Door(config.Server())

    async def dials(after: int) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        await here.hello(Stream(Silent()), {})

    ends = await asyncio.gather(dials(0), dials(1), return_exceptions=True)
    assert [type(end) for end in ends] == [Refused, Refused], ends


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (b"\xff" * 500, "500 bytes that are not a SessionRequest"),
        (bytes(door.HELLO_BYTES + 1), "the first message has 65,537 bytes, and a Hello may have 65,536"),
        (pb.SessionRequest(ready=pb.Ready()).SerializeToString(), "must be Hello"),
        (pb.SessionRequest(hello=pb.Hello(role=9)).SerializeToString(), "role 9 is unknown"),  # type: ignore[arg-type]
    ],
)
async def test_a_malformed_stream_is_refused_and_many_are_one_line(
    first: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with place() as at:
        with caplog.at_level(logging.WARNING):
            for _ in range(10):
                async with at.call() as call:
                    await call.write(first)
                    error = await refusal(call)
                    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
                    assert words in (error.details() or "")
        (line,) = ours(caplog)
        assert words in line.getMessage()
        assert len(line.getMessage()) < 400


async def test_rubbish_in_the_middle_of_a_session_ends_the_stream_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with place() as at, at.call() as call:
        await call.write(pb.SessionRequest(hello=hello("env", pb.ROLE_ENV)).SerializeToString())
        await call.read()
        await call.write(pb.SessionRequest(ready=pb.Ready(slots=1)).SerializeToString())
        worker = await at.ready.get()
        await call.write(b"\xff\xff")
        while worker.connections:
            await asyncio.sleep(0.01)
        assert worker.state == "ready", "it may dial again"
        assert not [record for record in ours(caplog) if record.levelno >= logging.ERROR]


def test_a_rare_line_says_how_many_were_left_out() -> None:
    line = RareLine(10.0)
    assert [line.due(now) for now in (0.0, 1.0, 9.9, 10.0, 11.0, 30.0)] == [0, None, None, 2, None, 1]


async def test_a_worker_that_leaves_while_it_is_rejected_is_no_error() -> None:
    here = Place(config.Server())
    first = pb.SessionRequest(hello=hello(protocol_version=0)).SerializeToString()

    class Leaves:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        def peer(self) -> str:
            return "a machine"

        async def read(self) -> object:
            return first

        async def write(self, encoded: bytes, /) -> None:
            assert pb.SessionResponse.FromString(encoded).HasField("reject")
            raise grpc.aio.UsageError("the call has ended")

    context: Any = Leaves()
    await here.service.Session(context, context)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    Dial(f"{host}:50051", "secret")


@pytest.mark.parametrize("host", ["10.0.0.7", "coordinator", "0.0.0.0", "[2001:db8::1]", "localhost.example.com", ""])
def test_a_token_goes_out_over_tls_alone(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UserError, match="--tls-ca") as error:
        Dial(f"{host}:50051", "secret")
    assert "secret" not in str(error.value)
    Dial(f"{host}:50051", "secret", Path("ca.pem"))
    Dial(f"{host}:50051")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tls_ca": "ca.pem", "tls_certificate": "own.pem"}, "--tls-certificate and --tls-key go together"),
        ({"tls_ca": "ca.pem", "tls_key": "own.key"}, "--tls-certificate and --tls-key go together"),
        ({"tls_certificate": "own.pem", "tls_key": "own.key"}, "--tls-certificate needs .* give --tls-ca as well"),
    ],
)
def test_a_certificate_of_ones_own_is_never_left_out_in_silence(files: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        Dial("localhost:50051", **{name: Path(path) for name, path in files.items()})  # type: ignore[arg-type]


class Large(WorkerRole):
    """Answers with more than a message may have."""

    role = pb.ROLE_ENV

    def __init__(self) -> None:
        self.worked = 0

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=1)

    async def handle(self, command: Command) -> Reply | None:
        self.worked += 1
        if isinstance(command, pb.Reset):
            return pb.Observed(image={"data": bytes(MAX_MESSAGE_BYTES)})
        return pb.Released()


async def test_what_is_too_large_fails_at_once_and_the_stream_lives(caplog: pytest.LogCaptureFixture) -> None:
    # On a busy machine, making 16 MB may take longer than the silence that `place` allows.
    async with place(heartbeat_seconds=5.0, lost_after_seconds=60.0) as at, asyncio.TaskGroup() as tasks:
        role, stop = Large(), asyncio.Event()
        serving = tasks.create_task(serve(role, WorkerOptions(Dial(at.server.address), "w"), stop))
        worker = await at.ready.get()
        stream = worker.hung_up
        work = pb.Assignment(assignment_id="a", attempt=1)
        huge = pb.Generate(assignment=work, forced_text="x" * MAX_MESSAGE_BYTES)
        with pytest.raises(
            CommandFailed, match=r"generate is 16,7\d\d,\d{3} bytes, and the limit is 16,777,216"
        ) as sent:
            await worker.call(huge)
        assert sent.value.code == pb.FAILURE_CODE_INVALID
        assert role.worked == 0
        with pytest.raises(CommandFailed, match=r"observed is 16,7\d\d,\d{3} bytes, and the limit is 16,777,216"):
            await worker.call(pb.Reset(assignment=work))
        assert isinstance(await worker.call(pb.Release(assignment=work)), pb.Released)
        assert worker.hung_up is stream, "one stream from the beginning to the end"
        stop.set()
        assert await serving == "stopped"


class Control(control_pb2_grpc.ControlServiceServicer):
    """Counts what gets through."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def SubmitTasks(self, request: cpb.SubmitTasksRequest, context: Any) -> cpb.SubmitTasksResponse:
        self.asked.append(request)
        return cpb.SubmitTasksResponse(accepted=len(request.tasks))

    async def WatchEvents(
        self, request: cpb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[cpb.WatchEventsResponse]:
        self.asked.append(request)
        yield cpb.WatchEventsResponse(sequence=7)


async def test_control_asks_for_its_token_and_the_size_before_it_parses(
    tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTROL_SECRET", "secret")
    settings = config.Server.model_validate({"tokens": {**tokens, "control": "env:CONTROL_SECRET"}})
    server, control = Server(settings), Control()
    await server.start(CoordinatorService(Fleet(2.0), settings, "run", lambda hello: "{}"), control)
    right, wrong = (("authorization", "Bearer secret"),), (("authorization", "Bearer guess"),)
    tasks = cpb.SubmitTasksRequest(tasks=[{}] * 3)
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(server.address, options=OPTIONS) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            raw = channel.unary_unary("/dart.v1.ControlService/SubmitTasks")
            refused = [stub.SubmitTasks(tasks), stub.SubmitTasks(tasks, metadata=wrong), raw(b"\xff", metadata=wrong)]
            for call in refused:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.WatchEvents(cpb.WatchEventsRequest(), metadata=wrong).read()
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await raw(b"\xff" * 2_000_000, metadata=right)  # which no parser takes
            assert "and the limit is 1,048,576" in str(error.value.details()), "counted before it is parsed"
            assert control.asked == []
            assert (await stub.SubmitTasks(tasks, metadata=right)).accepted == 3
            assert (await stub.WatchEvents(cpb.WatchEventsRequest(), metadata=right).read()).sequence == 7
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("localhost", ["127.0.0.1"], "localhost"),
        ("127.0.1.1", ["127.0.1.1"], "127.0.1.1"),
        ("0.0.0.0", ["0.0.0.0"], "0.0.0.0"),
        ("node-7", ["127.0.1.1"], "0.0.0.0"),  # Debian's own entry for its name
        ("node-7", ["::1"], "::"),
        ("node-7", ["127.0.1.1", "10.0.0.5"], "node-7"),
        ("203.0.113.9", ["203.0.113.9"], "203.0.113.9"),  # not of this machine: an error, as before
        ("::1", ["::1"], "::1"),
        ("unknown.invalid", [], "unknown.invalid"),
    ],
)
def test_a_coordinator_listens_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, addresses: list[str], expected: str
) -> None:
    def looked_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert name == host
        if not addresses:
            raise socket.gaierror("unknown")
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in one], socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    assert channel.listening_host(host) == expected
