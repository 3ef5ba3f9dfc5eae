"""Worlds that do what a test tells them, and the env worker's role that hosts one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dart.config import Environment, EnvWorkerConfig
from dart.core import action as a
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.workers.env.role import EnvRole
from dart.worlds import (
    Action,
    Env,
    Observation,
    SyncEnv,
    Task,
    Timeouts,
    Verdict,
    World,
    WorldOptions,
    from_pixels,
)

PICTURE = from_pixels(bytes(3), 1, 1)


@dataclass
class Script:
    """What the next environments do, and what was done to them."""

    leases: list[Exception | None] = field(default_factory=list)
    """What each lease raises, in turn; none when it is empty."""
    alive: bool = True
    renews: bool = True
    reward: float = 0.5
    raises: Exception | None = None
    """From `act`."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """`act` waits for it."""
    opening: asyncio.Event = field(default_factory=asyncio.Event)
    """`reset` waits for it."""
    log: list[str] = field(default_factory=list)

    def begin_anew(self) -> None:
        """For the next test: nothing hangs or fails."""
        vars(self).update(vars(Script()))
        self.gate.set()
        self.opening.set()


script = Script()


class Stage(World):
    timeouts = Timeouts(act=30.0, lease=5.0)
    actions = frozenset({"click", "wait"})

    class Options(WorldOptions):
        colour: str = "red"

    async def lease(self) -> Env:
        if script.leases and (error := script.leases.pop(0)) is not None:
            raise error
        script.log.append("lease")
        return Actor(self.Options(), (1, 1))

    async def dispose(self, env: Env) -> None:
        script.log.append("dispose")


class Actor(Env):
    async def reset(self, task: Task) -> Observation:
        if task.name == "none":
            raise UserError("there is no task none: use a")
        script.log.append("reset")
        await script.opening.wait()
        return Observation(PICTURE, f"do {task.name}")

    async def act(self, action: Action) -> Observation:
        script.log.append(f"act {type(action).__name__}")
        if script.raises is not None:
            raise script.raises
        await script.gate.wait()
        script.log.append("acted")
        return Observation(PICTURE, done=isinstance(action, a.Wait))

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        script.log.append(f"judge {type(last).__name__} {at_limit}")
        return Verdict(script.reward, {"seen": "twice"})

    async def probe(self) -> bool:
        return script.alive

    async def renew(self) -> bool:
        script.log.append("renew")
        return script.renews


class Threads(SyncEnv):
    """Notes the threads that it is called on; hangs in `act` until `hang` is set."""

    made: list[Threads] = []  # noqa: RUF012
    timeouts = Timeouts(act=30.0)
    hang = threading.Event()

    def __init__(self, options: object, screen: tuple[int, int]) -> None:
        self.threads = {threading.get_ident()}
        self.closed = 0
        self.options, self.screen = WorldOptions(), screen
        self.made.append(self)

    def reset(self, task: Task) -> Observation:
        self.threads.add(threading.get_ident())
        return Observation(PICTURE, task.name)

    def act(self, action: Action) -> Observation:
        self.threads.add(threading.get_ident())
        if isinstance(action, a.Wait):
            self.hang.wait(30)
        return Observation(PICTURE)

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        self.threads.add(threading.get_ident())
        return Verdict(1.0)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed += 1


class Host:
    """The role, and what it says of its slots."""

    def __init__(self) -> None:
        self.role = EnvRole()
        self.said: list[pb.Slots] = []
        self._changed = asyncio.Event()

    def say(self, slots: pb.Slots) -> None:
        self.said.append(slots)
        self._changed.set()

    async def until(self, count: int, granted: int, booting: int = 0) -> pb.Slots:
        async with asyncio.timeout(60):
            while not self.said or (self.now.count, self.now.granted, self.now.booting) != (count, granted, booting):
                self._changed.clear()
                await self._changed.wait()
        return self.now

    @property
    def now(self) -> pb.Slots:
        return self.said[-1]

    async def reset(self, name: str, task: str = "a", suite: str | None = None) -> pb.Observed:
        asked = task_to_proto(Task(suite or self.role._suite, task, 1))
        reply = await self.role.handle(pb.Reset(assignment=assignment(name), task=asked))
        assert isinstance(reply, pb.Observed)
        return reply

    async def act(self, name: str, action: Action, last: bool = False) -> pb.Observed:
        command = pb.Act(assignment=assignment(name), action=action_to_proto(action), last=last)
        reply = await self.role.handle(command)
        assert isinstance(reply, pb.Observed)
        return reply

    async def release(self, name: str) -> None:
        assert isinstance(await self.role.handle(pb.Release(assignment=assignment(name))), pb.Released)


def assignment(name: str) -> pb.Assignment:
    return pb.Assignment(assignment_id=name, attempt=1)


@asynccontextmanager
async def hosted(world: type = Stage, slots: int = 1, **changes: object) -> AsyncIterator[Host]:
    raw = {"kind": f"{world.__module__}:{world.__name__}", "tasks": {"names": ["a"]}, "slots": slots, **changes}
    host = Host()
    try:
        ready = await host.role.prepare(EnvWorkerConfig(environment=Environment.model_validate(raw)).model_dump_json())
        assert ready.slots == slots
        running = asyncio.create_task(host.role.run(host.say))
        yield host
        running.cancel()
        await asyncio.wait({running})
    finally:
        await host.role.close()
