"""Real workers and a real server over connections that are cut and held, and streams that repeat what they carry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from fleet_samples import served

from benchmarks.endurance.proxy import Proxy
from benchmarks.endurance.redial import SLOTS, Apart, Calls, Counting, episodes
from dart import config
from dart.coordinator.fleet import server as server_module
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire import worker as worker_module
from dart.wire.channel import Dial
from dart.wire.stream import Call, Stream
from dart.wire.worker import WorkerOptions, serve

WORKERS, CUTS = 5, 12


class Repeating(Stream):
    """Every now and then a message arrives a second time; the first one of a stream, its introduction, does not."""

    chance = random.Random(1)

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._first = True
        self._again: bytes | None = None

    async def read(self) -> bytes:
        if self._again is not None:
            repeated, self._again = self._again, None
            return repeated
        received = await super().read()
        if not self._first and self.chance.random() < 0.2:
            self._again = received
        self._first = False
        return received


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_worker_ends_and_every_command_is_carried_out_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (worker_module, server_module):
        monkeypatch.setattr(module, "Stream", Repeating)
    monkeypatch.setattr(worker_module, "_FIRST_DELAY_SECONDS", 0.05)
    settings = config.Server(heartbeat_seconds=0.2, lost_after_seconds=10.0)
    fleet, calls, stop = Fleet(settings.lost_after_seconds), Calls(), asyncio.Event()
    ready: asyncio.Queue[Worker] = asyncio.Queue()
    lost: list[Worker] = []
    fleet.on_ready.append(ready.put_nowait)
    fleet.on_lost.append(lost.append)
    chance = random.Random(seed)
    roles = [Counting(seed + number) for number in range(WORKERS)]
    async with served(fleet, settings) as server, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        proxy = Proxy(server.port)
        await proxy.start()
        serving = [
            tasks.create_task(serve(role, WorkerOptions(Apart(f"127.0.0.1:{proxy.port}"), f"w{n}"), asyncio.Event()))
            for n, role in enumerate(roles)
        ]
        sampling = []
        for _ in range(WORKERS):
            worker = await ready.get()
            for slot in range(SLOTS):
                name = f"{worker.id}-{slot}"
                sampling.append(tasks.create_task(episodes(worker, calls, random.Random(name), stop, name)))
        for _ in range(CUTS):
            await asyncio.sleep(chance.uniform(0.05, 0.3))
            if chance.random() < 0.3:
                await proxy.hold(chance.uniform(0.0, 0.2))
            proxy.cut_all() if chance.random() < 0.5 else proxy.cut_one(chance)
        stop.set()
        await asyncio.wait(sampling)
        while any(worker.end.unanswered for worker in fleet.workers.values()):
            await asyncio.sleep(0.01)
        assert not lost and len(fleet.workers) == WORKERS, "nobody was given up"
        fleet.say_goodbye("over")
        assert [await one for one in serving] == ["over"] * WORKERS
        await proxy.stop()
    assert calls.lost == 0
    assert calls.made == calls.answered + calls.given_up
    assert calls.answered > 100 and calls.given_up > 0
    assert sum(role.twice for role in roles) == 0
    assert sum(role.overtaken for role in roles) == 0, "nothing overtook a command of the same episode"


async def test_a_worker_dials_for_as_long_as_its_coordinator_remembers_it() -> None:
    settings = config.Server(heartbeat_seconds=0.2, lost_after_seconds=30.0)
    fleet, ready = Fleet(settings.lost_after_seconds), asyncio.Queue[Worker]()
    fleet.on_ready.append(ready.put_nowait)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        async with served(fleet, settings) as server:
            port = server.port
            options = WorkerOptions(Dial(f"127.0.0.1:{port}", None), "w", connect_seconds=0.5)
            serving = tasks.create_task(serve(Counting(1), options, asyncio.Event()))
            worker = await ready.get()
        await asyncio.sleep(2.0)
        assert not serving.done()
        async with served(fleet, settings.model_copy(update={"port": port})):
            while not worker.epoch > 1:
                await asyncio.sleep(0.02)
            fleet.say_goodbye("over")
            assert await serving == "over"


class Wrong(Counting):
    """Cannot be prepared from the time `wrong_from` on."""

    def __init__(self, wrong_from: int) -> None:
        super().__init__(1)
        self.wrong_from, self.times = wrong_from, 0

    async def prepare(self, config_json: str) -> pb.Ready:
        self.times += 1
        if self.times >= self.wrong_from:
            raise UserError("the memory of the former engine is not free yet")
        return await super().prepare(config_json)


class Elastic(Wrong):
    """Its only machine cannot be used from the time `wrong_from` on."""

    capabilities = ("slots",)

    async def prepare(self, config_json: str) -> pb.Ready:
        self.times += 1
        return pb.Ready(slots=1)

    async def run(self, say: Callable[[pb.Slots], None]) -> None:
        if self.times >= self.wrong_from:
            raise UserError("the memory of its machine is not free yet")
        say(pb.Slots(count=1))
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", [Wrong, Elastic])
@pytest.mark.parametrize(("wrong_from", "code"), [(1, 2), (2, 3)])
async def test_a_worker_that_was_ready_once_blames_nobodys_input(kind: type[Wrong], wrong_from: int, code: int) -> None:
    """Code 2 would end the run. After a silence the coordinator has forgotten it, and it prepares again."""
    settings = config.Server(heartbeat_seconds=0.2, lost_after_seconds=10.0)
    fleet, ready = Fleet(settings.lost_after_seconds), asyncio.Queue[Worker]()
    fleet.on_ready.append(ready.put_nowait)
    async with served(fleet, settings) as server, asyncio.timeout(60):
        options = WorkerOptions(Dial(f"127.0.0.1:{server.port}", None), "w")
        serving = asyncio.create_task(serve(kind(wrong_from), options, asyncio.Event()))
        if wrong_from > 1:
            fleet.lose(await ready.get(), "it was silent")
        with pytest.raises(UserError, match="not free yet") as raised:
            await serving
    assert raised.value.exit_code == code
