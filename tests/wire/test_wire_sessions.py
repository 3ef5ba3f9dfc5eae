"""Sessions over real gRPC: calls, dedupe, lost streams, resumption, rejection, goodbye."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from dart import config, failpoints
from dart.coordinator.fleet.server import CoordinatorService, Server, heartbeat_interval
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, Rejected, Worker, WorkerLost
from dart.errors import UserError
from dart.v1 import control_pb2_grpc, session_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire import worker as worker_module
from dart.wire.capabilities import NOTICES
from dart.wire.channel import Dial
from dart.wire.role import Command, CommandError, Reply, WorkerRole
from dart.wire.rules import Limits, Violation
from dart.wire.worker import WorkerOptions, serve


class CountingRole(WorkerRole):
    """A real role on the worker's side of the wire: it answers Release, and counts how often it really worked."""

    role = pb.ROLE_ENV

    def __init__(self) -> None:
        self.worked = 0
        self.prepared = 0
        self.closed = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()

    async def prepare(self, config_json: str) -> pb.Ready:
        self.prepared += 1
        assert config_json == "{}"
        return pb.Ready(slots=2)

    async def handle(self, command: Command) -> Reply | None:
        self.worked += 1
        self.begun.set()
        await self.gate.wait()
        if command.assignment.assignment_id == "bad":
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, "the page crashed")
        return pb.Released()

    async def close(self) -> None:
        self.closed += 1


class Rig:
    def __init__(self, settings: config.Server) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.lost_after_seconds)
        self.ready: asyncio.Queue[Worker] = asyncio.Queue()
        self.fleet.on_ready.append(self.ready.put_nowait)
        self.server = Server(settings)
        self.role = CountingRole()
        self.stop = asyncio.Event()

    async def start(self) -> None:
        service = CoordinatorService(self.fleet, self.settings, "run", self.welcome)
        await self.server.start(service, control_pb2_grpc.ControlServiceServicer())

    def welcome(self, hello: pb.Hello) -> str:
        if hello.worker_id == "unwanted":
            raise Rejected("this run only evaluates", "use dart train")
        return "{}"

    async def work(self, worker_id: str = "w", token: str | None = None, seconds: float = 5.0) -> str:
        options = WorkerOptions(Dial(self.server.address, token), worker_id, connect_seconds=seconds)
        return await serve(self.role, options, self.stop)


@asynccontextmanager
async def rig(**settings: object) -> AsyncIterator[Rig]:
    made = Rig(config.Server(**{"heartbeat_seconds": 0.1, "lost_after_seconds": 1.0, **settings}))  # type: ignore[arg-type]
    await made.start()
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        await made.server.stop()


def release(name: str = "a", attempt: int = 1) -> pb.Release:
    return pb.Release(assignment=pb.Assignment(assignment_id=name, attempt=attempt))


async def test_a_worker_that_fails_after_its_work_is_lost_and_another_one_does_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failpoints, "_all", failpoints.armed("before-Released:1=delay:0.2,before-Released:2=fail:EIO"))
    async with rig() as r, asyncio.TaskGroup() as tasks:
        first = asyncio.create_task(r.work())
        worker = await r.ready.get()
        reaping = tasks.create_task(r.fleet.reap())
        assert isinstance(await worker.call(release()), pb.Released)  # late, and once
        assert r.role.worked == 1
        with pytest.raises(WorkerLost):
            await worker.call(release("b"))
        with pytest.raises(ExceptionGroup) as ended:
            await first
        assert ended.value.subgroup(OSError) is not None
        serving = tasks.create_task(r.work())
        worker = await r.ready.get()
        assert isinstance(await worker.call(release("b")), pb.Released)
        assert r.role.worked == 3
        r.fleet.say_goodbye("over")
        assert await serving == "over"
        reaping.cancel()


async def test_call_reply_failure_and_goodbye() -> None:
    async with rig() as r, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(r.work())
        worker = await r.ready.get()
        assert worker.slots == 2
        reply = await worker.call(release())
        assert isinstance(reply, pb.Released)
        assert reply.assignment.sequence == 1
        with pytest.raises(CommandFailed, match="the page crashed") as failed:
            await worker.call(release("bad"))
        assert failed.value.code == pb.FAILURE_CODE_ENVIRONMENT
        r.fleet.say_goodbye("over")
        assert await serving == "over"
        async with asyncio.timeout(30):
            while r.fleet.workers:  # until the coordinator has seen it hang up
                await asyncio.sleep(0.01)
    assert r.role.closed == 1


async def test_a_worker_introduces_itself_as_its_role_says() -> None:
    async with rig() as r, asyncio.TaskGroup() as tasks:
        r.role.role, r.role.capabilities, r.role.rank, r.role.world_size = pb.ROLE_TRAIN, ("rescore",), 1, 2
        serving = tasks.create_task(r.work())
        hello = (await r.ready.get()).hello
        assert (hello.role, hello.rank, hello.world_size) == (pb.ROLE_TRAIN, 1, 2)
        assert "rescore" in hello.capabilities
        r.stop.set()
        await serving


async def test_lost_stream_is_resumed_and_nothing_is_done_twice() -> None:
    async with rig() as r, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(r.work())
        worker = await r.ready.get()
        await worker.call(release("before"))
        r.role.gate.clear()
        r.role.begun.clear()
        calling = tasks.create_task(worker.call(release("during")))
        await r.role.begun.wait()
        first = worker.hung_up
        first.set()  # the stream breaks while the command runs
        while worker.hung_up is first:
            await asyncio.sleep(0.01)
        r.role.gate.set()
        assert isinstance(await calling, pb.Released)
        assert r.role.worked == 2, "the command came again with the new stream, and was not carried out again"
        assert r.role.prepared == 1, "the same instance goes on as it is"
        assert r.fleet.workers[worker.hello.instance_id] is worker
        r.stop.set()
        await serving


async def test_silent_worker_is_lost_and_its_calls_end() -> None:
    async with rig() as r:
        channel = Dial(r.server.address).channel()
        call = session_pb2_grpc.CoordinatorServiceStub(channel).Session()
        await call.write(
            pb.SessionRequest(hello=pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV, protocol_version=1))
        )
        welcome = (await call.read()).welcome
        await call.write(pb.SessionRequest(ready=pb.Ready(slots=1)))
        worker = await r.ready.get()
        lost: list[Worker] = []
        r.fleet.on_lost.append(lost.append)
        reaper = asyncio.ensure_future(r.fleet.reap())
        with pytest.raises(WorkerLost, match="silent for 1 s"):
            await worker.call(release())
        reaper.cancel()
        assert lost == [worker]
        # Its stream is over, and its late answer is taken by nobody.
        assert welcome.epoch == worker.epoch and worker.end.stale == 0
        late = pb.Released(assignment=pb.Assignment(assignment_id="a", attempt=1, sequence=1, epoch=worker.epoch))
        r.fleet.receive(worker, pb.SessionRequest(released=late))
        assert worker.end.stale == 0 and worker.state == "lost"
        with pytest.raises(WorkerLost):
            await worker.call(release())
        await channel.close()


async def test_a_worker_whose_ready_can_be_mended_is_taken() -> None:
    """A world may report a version of two lines, which is nothing that a run has to do without the worker for."""
    fleet = Fleet(60.0)
    told: list[Violation] = []
    fleet.boundary.on_violation.append(lambda worker, broken, quarantine: told.append(broken))
    worker, _ = fleet.admit(pb.Hello(worker_id="env", instance_id="e", role=pb.ROLE_ENV, world_size=1))
    ready = pb.Ready(slots=1, versions={"qemu": "7.2\nCopyright", "x": "1"})
    fleet.receive(worker, pb.SessionRequest(ready=ready))
    assert worker.state == "ready" and dict(worker.ready.versions) == {"x": "1"}
    assert [(broken.field, broken.mended) for broken in told] == [("Ready.versions[qemu]", True)]
    assert not len(worker.outbox), "it gets no Bye"


async def test_a_replica_whose_ready_can_be_mended_still_needs_weights_that_were_published() -> None:
    fleet = Fleet(60.0)
    fleet.boundary.limits = Limits(version=4)
    worker, _ = fleet.admit(pb.Hello(worker_id="r", instance_id="r", role=pb.ROLE_ROLLOUT, world_size=1))
    ready = pb.Ready(slots=1, engine_ranks=1, weight_version=9, versions={"qemu": "7.2\nCopyright"})
    fleet.receive(worker, pb.SessionRequest(ready=ready))
    assert worker.state == "starting"
    assert "Ready.weight_version" in (await worker.outbox.get()).bye.reason


def test_all_that_a_worker_is_told_goes_where_its_commands_go() -> None:
    """A simulated worker reads them elsewhere than from a stream."""
    told: list[str | None] = []
    fleet = Fleet(60.0)
    fleet.boundary.limits = Limits(version=4)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ROLLOUT, capabilities=[NOTICES]))
    worker.end.outbox = SimpleNamespace(put=lambda message, rest=(): told.append(message.WhichOneof("body")))
    fleet.became_ready(worker, pb.Ready(slots=1, engine_ranks=1, weight_version=9))
    assert told == ["bye", "notice"]


async def test_a_lost_worker_keeps_nothing_of_what_it_was_asked() -> None:
    """It is seldom collected, and a prompt may have screenshots. What its stream has yet to write stays there."""
    fleet = Fleet(60.0)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ROLLOUT))
    fleet.became_ready(worker, pb.Ready(slots=1, image_cache_entries=8))
    worker.screenshots.note(b"x" * 32, True)
    stream = worker.outbox
    work = pb.Assignment(assignment_id="a", attempt=1)
    call = asyncio.create_task(worker.call(pb.Generate(assignment=work)))
    await asyncio.sleep(0)
    fleet.say_goodbye("the run is over")
    assert worker.end.unanswered == 1 and len(stream) == 2
    fleet.lose(worker, "silent")
    with pytest.raises(WorkerLost):
        await call
    worker.end_assignment("a", 1)
    assert worker.end.unanswered == 0 and len(worker.outbox) == len(worker.screenshots) == 0
    assert len(stream) == 2
    worker.end.validate()


async def test_heartbeats_keep_an_idle_worker() -> None:
    async with rig(lost_after_seconds=3.0) as r, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(r.work())
        worker = await r.ready.get()
        reaping = tasks.create_task(r.fleet.reap())
        await asyncio.sleep(4.0)
        assert worker.state == "ready"
        reaping.cancel()
        r.stop.set()
        await serving


async def test_reply_of_another_epoch_or_without_a_call_is_dropped_and_counted() -> None:
    fleet = Fleet(60.0)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV))
    for epoch in (worker.epoch - 1, worker.epoch):
        assignment = pb.Assignment(assignment_id="a", epoch=epoch)
        fleet.receive(worker, pb.SessionRequest(released=pb.Released(assignment=assignment)))
    assert worker.end.stale == 2


async def test_restarted_worker_takes_its_name_over() -> None:
    async with rig() as r, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(r.work())
        old = await r.ready.get()
        first.cancel()
        await asyncio.wait({first})
        while old.connections:
            await asyncio.sleep(0.01)
        again = tasks.create_task(r.work())
        new = await r.ready.get()
        assert new is not old
        assert new.epoch > old.epoch
        assert old.state == "lost"
        r.stop.set()
        await again


@pytest.mark.parametrize(
    ("worker_id", "token", "message"),
    [
        ("unwanted", "right", "this run only evaluates: use dart train"),
        ("w", "wrong", "refused the token: set DART_TOKEN"),
        ("w", None, "refused the token: set DART_TOKEN"),
    ],
)
async def test_rejections_say_what_to_do(
    worker_id: str, token: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TOKEN", "right")
    async with rig(tokens={"env": "env:TEST_TOKEN"}) as r:
        with pytest.raises(UserError, match=message):
            await r.work(worker_id, token)


async def test_too_old_protocol_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "PROTOCOL_VERSION", 0)
    async with rig() as r:
        with pytest.raises(UserError, match=r"speaks protocol version 0.*update dart"):
            await r.work()


async def test_unreachable_coordinator_is_named() -> None:
    async with rig() as r:
        await r.server.stop()
        with pytest.raises(UserError, match=r"127.0.0.1:\d+ could not be reached for 1 s"):
            await r.work(seconds=1.0)


async def test_a_coordinator_that_takes_no_more_connections_is_not_called_absent() -> None:
    async def full(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(full, "127.0.0.1", 0) as server, rig() as r:
        address = "{}:{}".format(*server.sockets[0].getsockname())
        options = WorkerOptions(Dial(address, None), "w", connect_seconds=0.5)
        with pytest.raises(UserError, match=r"closed as soon as they are made.*raise `ulimit -Hn` where it starts"):
            await serve(r.role, options, r.stop)


async def test_a_worker_may_wait_longer_for_its_first_coordinator() -> None:
    """One of a run that continues reads its checkpoint before it listens."""
    async with rig() as r, asyncio.TaskGroup() as tasks:
        port = r.server.port
        await r.server.stop()
        options = WorkerOptions(Dial(f"127.0.0.1:{port}", None), "w", connect_seconds=0.5, first_seconds=30.0)
        serving = tasks.create_task(serve(r.role, options, r.stop))
        await asyncio.sleep(1.0)
        r.server = Server(config.Server(**(r.settings.model_dump() | {"port": port})))
        await r.start()
        await r.ready.get()
        r.fleet.say_goodbye("over")
        assert await serving == "over"


async def test_port_in_use_is_named() -> None:
    async with rig() as r:
        other = Server(config.Server(port=r.server.port))
        service = CoordinatorService(r.fleet, r.settings, "run", r.welcome)
        with pytest.raises(UserError, match=r"server.port: cannot listen on 127.0.0.1:\d+"):
            await other.start(service, control_pb2_grpc.ControlServiceServicer())


async def test_stop_says_goodbye() -> None:
    async with rig() as r, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(r.work())
        worker = await r.ready.get()
        r.stop.set()
        assert await serving == "stopped"
        await worker.lost.wait()


def test_heartbeats_grow_rarer_with_the_number_of_workers() -> None:
    usual = config.Server(heartbeat_seconds=2.0, lost_after_seconds=15.0)
    assert [heartbeat_interval(usual, workers) for workers in (1, 400, 1000, 100_000)] == [2.0, 2.0, 4.0, 5.0]
    hurried = config.Server(heartbeat_seconds=2.0, lost_after_seconds=3.0)
    assert heartbeat_interval(hurried, 100_000) == 2.0


async def test_a_release_is_sent_again_after_a_lost_stream() -> None:
    fleet = Fleet(60.0)
    hello = pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV)
    worker, _ = fleet.admit(hello)
    fleet.became_ready(worker, pb.Ready(slots=1))
    worker.tell(pb.Release(assignment=pb.Assignment(assignment_id="t1", attempt=1)))
    worker.end_assignment("t1", 1)
    await worker.outbox.get()  # and the stream that carried it was dead
    hello.last_epoch = worker.epoch
    assert fleet.admit(hello) == (worker, True)
    again = await asyncio.wait_for(worker.outbox.get(), 60)
    assert again.release.assignment.assignment_id == "t1"
    fleet.receive(worker, pb.SessionRequest(released=pb.Released(assignment=again.release.assignment)))
    await asyncio.sleep(0)
    assert fleet.admit(hello) == (worker, True) and not worker.outbox
    worker.tell(pb.Release(assignment=pb.Assignment(assignment_id="t2", attempt=1)))
    fleet.lose(worker, "silent")  # nobody waits for what it owes


@pytest.mark.parametrize(("hanging", "lost"), [(1, False), (2, True)])
async def test_a_worker_that_hangs_behind_its_heartbeats(
    monkeypatch: pytest.MonkeyPatch, hanging: int, lost: bool
) -> None:
    fleet = Fleet(60.0, answer_within=30.0)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ROLLOUT))
    fleet.became_ready(worker, pb.Ready(slots=4))
    monotonic, later = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + later)

    def call(name: str) -> asyncio.Task[object]:
        return asyncio.create_task(worker.call(pb.Generate(assignment=pb.Assignment(assignment_id=name, attempt=1))))

    old = [call(f"old-{number}") for number in range(hanging)]
    update = asyncio.create_task(worker.call(pb.LoadWeights(assignment=pb.Assignment(assignment_id="w1", attempt=1))))
    await asyncio.sleep(0)
    later = 31.0
    new = [call(f"new-{number}") for number in range(2)]
    await asyncio.sleep(0)
    worker.last_heard = time.monotonic()
    reaping = asyncio.create_task(fleet.reap())
    done, _ = await asyncio.wait(old, timeout=60)
    assert len(done) == hanging
    assert {type(task.exception()) for task in done} == {WorkerLost if lost else CommandFailed}
    assert "no answer to generate for 30 s" in str(old[0].exception())
    assert (worker.state == "lost") is lost
    assert update.done() is lost, "a transfer has a timeout of its own"
    for task in (reaping, update, *new):
        task.cancel()
    await asyncio.gather(reaping, update, *new, return_exceptions=True)


async def test_nobody_is_lost_because_the_coordinator_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(1.0)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV))
    fleet.became_ready(worker, pb.Ready(slots=1))
    real, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)
    reaping = asyncio.create_task(fleet.reap())
    await asyncio.sleep(0.1)
    ahead, heard = 20.0, worker.last_heard
    await asyncio.sleep(0.5)
    assert worker.state == "ready"
    assert worker.last_heard == heard, "a rival's Hello would take it for a sign of life"
    reaping.cancel()


async def test_nobody_takes_a_place_because_the_coordinator_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(60.0)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV))
    worker.connected()
    twin = pb.Hello(worker_id="w", instance_id="twin", role=pb.ROLE_ENV)
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock)

    async def look() -> None:
        reaping = asyncio.create_task(fleet.reap())
        await asyncio.sleep(0)
        reaping.cancel()

    await look()
    clock += 40.0
    assert fleet.rival(twin) is worker, "its messages of the last 40 s are not read yet"
    await look()
    assert fleet.rival(twin) is None, "40 s of silence"


async def test_a_stall_may_have_begun_right_after_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both while the look is overdue, and once it has been made."""
    fleet = Fleet(4.0)
    worker, _ = fleet.admit(pb.Hello(worker_id="w", instance_id="i", role=pb.ROLE_ENV))
    worker.connected()
    twin = pb.Hello(worker_id="w", instance_id="twin", role=pb.ROLE_ENV)
    real, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)
    worker.last_heard -= 1.5
    reaping = asyncio.create_task(fleet.reap())
    await asyncio.sleep(0)
    ahead = 20.0
    assert fleet.rival(twin) is worker
    async with asyncio.timeout(60):
        while not fleet._stalls:
            await asyncio.sleep(0.05)
    assert fleet.rival(twin) is worker
    reaping.cancel()
