"""What follows when a worker says what no worker may say: on a real stream, in the pools, and in the store."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fleet_samples import World, fleet, replica, screen, served
from run_processes.told import events

from benchmarks.instant import settings as run_settings
from benchmarks.simulation import virtual_time
from benchmarks.simulation.timings import EnvTimes, Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica
from dart import config
from dart.coordinator.fleet.boundary import ASK_AGAIN, broken_screenshot
from dart.coordinator.fleet.environments import EnvPool, EnvSession
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.roster import Roster
from dart.coordinator.fleet.server import Server
from dart.coordinator.fleet.sessions import CommandFailed, Fleet, InfrastructureError, RuleBroken, Worker
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.service.journal import Journal
from dart.core.curation.orders import Order
from dart.core.fleet.conduct import FIRST_SECONDS, PROBES, STRIKES
from dart.core.types import Block, Image, Observation, Prompt, Task, Trajectory
from dart.errors import UserError
from dart.screenshots.stored import StoredScreenshots
from dart.store.blobs import BlobCorrupt, BlobStore
from dart.v1 import session_pb2 as pb
from dart.wire.channel import OPTIONS, Dial
from dart.wire.convert import observation_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.rules import Limits
from dart.wire.worker import WorkerOptions, serve

PROMPT = Prompt((Block((screen(),)),), (screen(),))
METHOD = f"/{pb.DESCRIPTOR.services_by_name['CoordinatorService'].full_name}/Session"


# ---- on a real stream ----


class Place:
    server: Server

    def __init__(self) -> None:
        self.fleet = Fleet(20.0)
        self.ready: asyncio.Queue[Worker] = asyncio.Queue()
        self.fleet.on_ready.append(self.ready.put_nowait)
        self.loop_was_held = 0.0

    @asynccontextmanager
    async def session(self, name: str = "env-1") -> AsyncIterator[grpc.aio.StreamStreamCall[bytes, bytes]]:
        """A stream of a worker that has said Hello; its first answer is still to be read."""
        hello = pb.Hello(worker_id=name, instance_id=name, role=pb.ROLE_ENV, protocol_version=1)
        async with grpc.aio.insecure_channel(self.server.address, options=OPTIONS) as channel:
            call: Any = channel.stream_stream(METHOD, None, None)()
            await call.write(pb.SessionRequest(hello=hello).SerializeToString())
            yield call

    async def watch(self) -> None:
        while True:
            asked = time.thread_time()
            await asyncio.sleep(0.01)
            self.loop_was_held = max(self.loop_was_held, time.thread_time() - asked)


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    made, settings = Place(), config.Server(heartbeat_seconds=0.5, lost_after_seconds=20.0)
    async with served(made.fleet, settings) as made.server:
        watch = asyncio.create_task(made.watch())
        try:
            async with asyncio.timeout(30):
                yield made
        finally:
            watch.cancel()


async def read(call: Any) -> pb.SessionResponse:
    return pb.SessionResponse.FromString(await call.read())


@pytest.mark.parametrize("field", ["slots", "engine_ranks"])
async def test_a_ready_that_would_fill_the_memory_ends_that_worker_alone(field: str) -> None:
    """Point 2: slots of 2^32 - 1 hung the coordinator, engine_ranks of 2^32 - 1 ended the run."""
    async with place() as at, at.session() as call:
        assert (await read(call)).HasField("welcome")
        ready = pb.Ready(**{"slots": 1, field: 2**32 - 1})  # type: ignore[arg-type]
        await call.write(pb.SessionRequest(ready=ready).SerializeToString())
        while not (told := await read(call)).HasField("bye"):
            pass
        assert f"this worker cannot be used: Ready.{field} is 4294967295, and must be from" in told.bye.reason
        assert at.ready.empty() and at.loop_was_held < 1.0


async def test_millions_of_empty_entries_do_not_hold_the_coordinator() -> None:
    """Point 7: 15 MB of them took 17 s."""
    async with place() as at, at.session() as call:
        await call.read()
        await call.write(pb.SessionRequest(ready=pb.Ready(slots=1)).SerializeToString())
        worker = await at.ready.get()
        await call.write(b"\xc2\x02\x00" * 5_000_000)
        while worker.connections:
            await asyncio.sleep(0.01)
        assert worker.state == "ready", "it may dial again"
        assert at.loop_was_held < 5.0, "seconds of processor time, of which it takes one beside other work"
        assert "broke a rule once, the last: SessionRequest is 15,000,000 bytes" in at.fleet.boundary.told(
            (pb.ROLE_ENV, "env-1")
        )


async def test_a_worker_that_keeps_sending_rubbish_is_refused_for_a_while_and_told_so() -> None:
    async with place() as at:
        for _ in range(STRIKES):
            async with at.session() as call:
                assert (await read(call)).HasField("welcome")
                await call.write(b"\xff\xff\xff")
                with contextlib.suppress(grpc.aio.AioRpcError):  # the stream ends
                    while await call.read() is not grpc.aio.EOF:
                        pass
        async with at.session() as call:
            reject = (await read(call)).reject
        assert "env-1 is quarantined for" in reject.reason and "3 bytes that do not parse" in reject.reason
        assert FIRST_SECONDS - 5 < reject.retry_after_seconds <= FIRST_SECONDS
        async with at.session("env-2") as call:
            assert (await read(call)).HasField("welcome"), "another worker is not concerned"


class Idle(WorkerRole):
    """A worker's role that does no work. `answer`: to every command, if it is to give one."""

    role = pb.ROLE_ENV

    def __init__(self, slots: int = 1, answer: Reply | None = None) -> None:
        self.slots, self.answer = slots, answer

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=self.slots)

    async def handle(self, command: Command) -> Reply | None:
        return self.answer


async def test_a_worker_that_cannot_be_used_ends_with_the_reason_and_is_named_until_it_is_mended() -> None:
    async with place() as at:
        options = WorkerOptions(Dial(at.server.address), "env-1")
        with pytest.raises(UserError, match=r"this worker cannot be used: Ready.slots is 0, and must be from 1"):
            await serve(Idle(slots=0), options, asyncio.Event())
        (told,) = at.fleet.boundary.without_work(time.monotonic())
        assert (told.kind, told.name) == ("refused", "env-1") and told.reason.startswith("Ready.slots is 0")
        async with asyncio.TaskGroup() as tasks:
            stop = asyncio.Event()
            tasks.create_task(serve(Idle(), options, stop))
            await at.ready.get()
            assert at.fleet.boundary.without_work(time.monotonic()) == []
            stop.set()


async def test_a_worker_reads_in_its_own_log_which_rule_it_broke(caplog: pytest.LogCaptureFixture) -> None:
    wrong = Idle(answer=pb.Observed(reward=float("nan")))
    async with place() as at, asyncio.TaskGroup() as tasks:
        stop = asyncio.Event()
        tasks.create_task(serve(wrong, WorkerOptions(Dial(at.server.address), "env-1"), stop))
        worker = await at.ready.get()
        for _ in range(STRIKES):
            with pytest.raises(RuleBroken):
                await worker.call(pb.Reset(assignment=pb.Assignment(assignment_id="t", attempt=1)))
        while sum("the coordinator says" in record.message for record in caplog.records) < STRIKES:
            await asyncio.sleep(0.01)
        assert any("says that this worker broke a rule: Observed" in record.message for record in caplog.records)
        (told,) = at.fleet.boundary.without_work(time.monotonic())
        assert (told.kind, told.name) == ("worker", "env-1") and told.seconds_left > FIRST_SECONDS - 5
        stop.set()


async def test_a_worker_that_does_not_read_notices_gets_none() -> None:
    async with place() as at, at.session() as call:
        await read(call)
        odd = pb.SessionRequest(heartbeat=pb.Heartbeat(sent_unix_seconds=float("nan")))
        await call.write(odd.SerializeToString())
        await call.write(pb.SessionRequest(ready=pb.Ready(slots=0)).SerializeToString())
        while not (told := await read(call)).HasField("bye"):
            assert told.HasField("heartbeat")


async def test_a_worker_that_is_refused_for_a_while_dials_again_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async with place() as at, asyncio.TaskGroup() as tasks:
        waits = iter([0.3])
        monkeypatch.setattr(at.fleet, "refused", lambda hello: next(waits, 0.0))
        began, stop = time.monotonic(), asyncio.Event()
        working = tasks.create_task(serve(Idle(), WorkerOptions(Dial(at.server.address), "env-1"), stop))
        await at.ready.get()
        assert time.monotonic() - began >= 0.3 and not working.done()
        stop.set()


# ---- an answer that breaks a rule ------


async def test_an_odd_answer_fails_its_command_alone_and_is_an_event(tmp_path: Path) -> None:
    """Point 3, and what the journal and the status say of it."""
    world = World()

    def odd(command: Any) -> Any:
        if isinstance(command, pb.Reset) and command.task.seed == 13:
            return observation_to_proto(Observation(screen("x"), "click", False, float("nan")), 0.0)
        return world(command)

    journal = Journal(tmp_path / "metrics.jsonl")
    async with fleet(env=odd) as (envs, _):
        Roster(envs._fleet, journal)
        good, bad = [EnvSession(envs, await envs.acquire(), Order(name, "g", Task("s", "a"), 3)) for name in "ab"]
        with pytest.raises(
            RuleBroken, match=r"^env broke a rule: Observed\.reward is nan, and must be a finite"
        ) as raised:
            await bad.reset(Task("s", "a", 13))
        assert raised.value.worker == "env"
        assert (await good.reset(Task("s", "a", 2))).instruction == "click left"
        told = envs._fleet.boundary.told((pb.ROLE_ENV, "env"))
        assert told.startswith("broke a rule once, the last: Observed.reward is nan")
    journal.close()
    (event,) = events(tmp_path / "metrics.jsonl", "violation")
    assert event.items() >= {
        "worker": "env", "field": "Observed.reward", "value": "nan", "quarantine_seconds": 0.0
    }.items()  # fmt: skip


async def trainer_asked(answers: list[dict[str, Any]]) -> Any:
    """The reply that a TrainBatch gets when the trainer gives these answers, one each time that it is asked."""
    made = Fleet(60.0)
    made.boundary.limits = Limits(version=4)
    worker, _ = made.admit(pb.Hello(worker_id="train", instance_id="t", role=pb.ROLE_TRAIN, world_size=1))
    made.became_ready(worker, pb.Ready(slots=1, weight_version=4))
    batch = pb.TrainBatch(assignment=pb.Assignment(assignment_id="u5", attempt=1), update=5)
    call = asyncio.create_task(worker.call(batch))
    for answer in answers:
        async with asyncio.timeout(60):
            asked = (await worker.outbox.get()).train_batch
        trained = pb.Trained(assignment=asked.assignment, **{"update": 5, "weight_version": 5} | answer)
        made.receive(worker, pb.SessionRequest(trained=trained))
    async with asyncio.timeout(60):
        return await call


async def test_a_trainer_is_asked_again_before_its_update_has_failed() -> None:
    """Point 3: a weight_version that repeats ended the run."""
    assert (await trainer_asked([{"weight_version": 4}, {"seconds": float("inf")}, {}])).weight_version == 5
    with pytest.raises(CommandFailed, match=r"train broke a rule: Trained\.weight_version is 9, and must be 5, as it"):
        await trainer_asked([*[{"weight_version": 4}] * ASK_AGAIN, {"weight_version": 9}])


async def test_a_replica_that_calls_a_request_wrong_is_believed_when_another_agrees() -> None:
    asked: Counter[str] = Counter()

    def refuses(name: str) -> Any:
        def answer(command: Any) -> Any:
            asked[name] += isinstance(command, pb.Generate)
            return pb.Failure(code=pb.FAILURE_CODE_INVALID, message="a bad picture")

        return answer

    world = World()
    async with fleet(env=world, rollout_a=refuses("a"), rollout_b=replica) as (_, pool):
        for _ in range(4):
            await pool.generate(PROMPT, 1.0, 40, "rollout_a")
    assert asked["a"]
    async with fleet(env=world, rollout_a=refuses("a"), rollout_b=refuses("b")) as (_, pool):
        with pytest.raises(InfrastructureError, match="a bad picture") as raised:
            await pool.generate(PROMPT, 1.0, 40, None)
        assert not raised.value.worker and asked["b"] == 1


# ---- screenshots ----


def png(width: int, height: int, tail: bytes = b"") -> bytes:
    """As much of a picture as its header: what a bomb consists of."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    named = ((b"IHDR", header), (b"IDAT", tail), (b"IEND", b""))
    chunks = b"".join(struct.pack(">I", len(data)) + name + data + bytes(4) for name, data in named)
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (Image.of(png(30_000, 30_000), "image/png", 30_000, 30_000), "30000×30000, and must be 1 to 67,108,864 pixels"),
        (Image.of(png(30_000, 30_000), "image/png", 160, 224), "a whole screenshot: it claims 30000×30000 pixels"),
        (Image.of(png(161, 224), "image/png", 160, 224), "160×224, and must be those of the screenshot itself"),
        (Image.of(png(160, 224)[:-20], "image/png", 160, 224), "a whole screenshot: it is a PNG that is cut short"),
        (Image.of(b"", "image/png", 160, 224), "empty, and must be sent, because this worker shares no directory"),
        (Image.of(png(160, 224), "image/gif", 160, 224), "'image/gif', and must be one of"),
        (Image.of(png(160, 224), "image/png", 0, 0), "0×0, and must be 1 to"),
        (Image.of(png(3, 3000), "image/png", 3, 3000), "3×3000, and must be sides of a ratio"),
    ],
)
def test_a_screenshot_is_refused_by_its_first_bytes(image: Image, why: str) -> None:
    """Point 10: a PNG of 69 bytes that says 30,000×30,000 ended a replica, and so did a truncated one."""
    assert why in str(broken_screenshot(image, shared=False))


def test_a_screenshot_as_honest_workers_send_it_is_taken() -> None:
    for data in (png(160, 224), b"of a kind whose size is not known here"):
        assert broken_screenshot(Image.of(data, "image/png", 160, 224), shared=False) is None
    assert broken_screenshot(Image(bytes(32), "image/png", 160, 224), shared=True) is None


def test_a_digest_that_lies_about_its_bytes_is_not_stored(tmp_path: Path) -> None:
    """Point 9: it was believed where the length fitted, and the wrong bytes reached the trainer."""
    store = BlobStore(tmp_path)
    true = Image.of(b"what was seen", "image/png", 2, 2)
    lie = Image(true.sha256, "image/png", 2, 2, b"other 13 byte")
    assert len(lie.data) == len(true.data)
    store.put(true)
    with pytest.raises(BlobCorrupt):
        store.put(lie)
    for order in ([true, lie], [lie, true]):
        with pytest.raises(BlobCorrupt):
            store.put_many(order)
    assert store.get(true.sha256) == true.data


async def test_a_digest_that_lies_is_its_environments_fault_and_no_replicas() -> None:
    """Point 9, on the way to a replica, which looks at the bytes and refuses them."""
    lie = Image(hashlib.sha256(b"a").digest(), "image/png", 160, 224, b"b")

    def refuses(command: Any) -> Any:
        return pb.Failure(code=pb.FAILURE_CODE_INVALID, message="bytes of another digest")

    class Source:
        temperature = 1.0
        told: tuple[Order, InfrastructureError] | None = None

        async def next(self) -> Order | None:
            return None if self.told else Order("t", "g", Task("s", "a"), 3)

        async def finished(self, order: Order, trajectory: Trajectory) -> None:
            raise AssertionError

        def failed(self, order: Order, error: InfrastructureError) -> None:
            self.told = order, error

    def lying(command: Any) -> Any:
        return observation_to_proto(Observation(lie, "click"), 0.0) if isinstance(command, pb.Reset) else None

    source = Source()
    async with fleet(env=lying, rollout_a=refuses, rollout_b=refuses) as (envs, pool):
        sampling = asyncio.create_task(sample(source, envs, pool, run_settings()))
        while source.told is None:
            await asyncio.sleep(0.01)
        sampling.cancel()
        order, error = source.told
        assert order.failed_on == {"env"}
        assert "env broke a rule: Observed.image: Image.data is 1 bytes, and must be those that sha256 is of" in str(
            error
        )
        assert not any(one.health.failures for one in pool.replicas)


# ---- quarantine ----


class Lying(SimulatedEnvs):
    """Its rewards are no numbers, until it is mended."""

    mended = False

    def act(self, command: pb.Act) -> None:
        if self.mended:
            super().act(command)
        else:
            self.answer(command, 1.0, observed=pb.Observed(done=True, reward=float("nan")))


class Orders:
    """Without end; counts what came of them, by env worker."""

    temperature = 1.0

    def __init__(self) -> None:
        self.made, self.failures, self.finished_at = 0, Counter[str](), list[float]()

    async def next(self) -> Order:
        self.made += 1
        return Order(f"t{self.made}", "g", Task("simulated", "task-0"), 3)

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        self.finished_at.append(time.monotonic())

    def failed(self, order: Order, error: InfrastructureError) -> None:
        self.failures[error.worker] += 1


def test_an_environment_that_lies_is_quarantined_and_let_back_after_probes() -> None:
    timings = Timings(env=EnvTimes(boot=(5, 5), settle=(5, 5), step=(5, 5), grade=(5, 5)), failures_per_step=0.0)

    async def hours() -> tuple[Orders, int, int, str]:
        made, source = Fleet(1e9), Orders()
        envs, policy = EnvPool(made), RolloutPool(made, StoredScreenshots(None))
        SimulatedReplica(made, "rollout-0", timings, 0)
        SimulatedEnvs(made, "honest", 4, timings, ["task-0"], 0)
        liar = Lying(made, "liar", 4, timings, ["task-0"], 0)
        sampling = asyncio.create_task(sample(source, envs, policy, run_settings()))
        await asyncio.sleep(3600)
        failed, told = source.failures["liar"], made.boundary.told((pb.ROLE_ENV, "liar"))
        liar.mended = True
        await asyncio.sleep(3600)
        sampling.cancel()
        return source, failed, source.failures["liar"] - failed, told

    source, failed, after, told = virtual_time.run(hours())
    assert STRIKES <= failed < 25, "one probe at a time, ever more rarely"
    assert after == 0
    assert told.startswith(("quarantined for", "on probation"))
    first_hour = sum(at < virtual_time.START + 3600 for at in source.finished_at)
    second_hour = len(source.finished_at) - first_hour
    assert second_hour > 1.5 * first_hour, "all its environments work again"
    assert not source.failures["honest"] and second_hour > PROBES
