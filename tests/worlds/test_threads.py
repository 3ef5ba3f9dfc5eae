"""Synchronous environments on threads of their own: what becomes of one whose caller has gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dart.core.action import Action
from dart.core.types import Observation, Task
from dart.worlds import Env, SyncEnv, Verdict, WorldOptions
from dart.worlds.plugs import make
from dart.worlds.threads import Threaded

HANG_GUARD_SECONDS = 30.0


class Still(SyncEnv):
    """Does nothing."""

    def reset(self, task: Task) -> Observation:
        raise NotImplementedError

    def act(self, action: Action) -> Observation:
        raise NotImplementedError

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        raise NotImplementedError


class Slow(Still):
    """Is made once `go` is set; notes the threads on which it was made and closed."""

    making, go, closed = threading.Event(), threading.Event(), threading.Event()
    threads: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.making.set()
        self.go.wait(HANG_GUARD_SECONDS)
        self.threads.append(threading.get_ident())
        super().__init__(WorldOptions(), (1, 1))

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.closed.set()


async def test_one_that_is_made_too_late_is_closed_on_its_thread() -> None:
    leasing = asyncio.create_task(Threaded.start(Slow, "slow"))
    assert await asyncio.to_thread(Slow.making.wait, HANG_GUARD_SECONDS)
    leasing.cancel()
    await asyncio.wait({leasing})
    assert leasing.cancelled()
    Slow.go.set()
    assert await asyncio.to_thread(Slow.closed.wait, HANG_GUARD_SECONDS)
    made, closed = Slow.threads
    assert made == closed != threading.get_ident()


class Stubborn(Slow):
    def close(self) -> None:
        raise OSError("it cannot be closed")


async def test_the_thread_of_one_that_cannot_be_closed_ends_all_the_same() -> None:
    Slow.go.set()
    before = set(threading.enumerate())
    made = await Threaded.start(Stubborn, "stubborn")
    (thread,) = set(threading.enumerate()) - before
    with pytest.raises(OSError, match="cannot be closed"):
        await made.close()
    await asyncio.to_thread(thread.join, HANG_GUARD_SECONDS)
    assert not thread.is_alive()


class Busy(Still):
    """Its reset takes until `go` is set."""

    within, go, closed = threading.Event(), threading.Event(), threading.Event()

    def reset(self, task: Task) -> Observation:
        self.within.set()
        self.go.wait(HANG_GUARD_SECONDS)
        raise NotImplementedError

    def close(self) -> None:
        self.closed.set()


async def test_a_world_closes_after_the_calls_that_are_under_way() -> None:
    """The process ends when its world has closed, and these threads with it."""
    world = make(Busy)
    await world.start(WorldOptions(), (1, 1))
    env = await world.lease()
    resetting = asyncio.create_task(env.reset(Task("suite", "task")))
    assert await asyncio.to_thread(Busy.within.wait, HANG_GUARD_SECONDS)
    resetting.cancel()
    await asyncio.wait({resetting})
    closing = asyncio.create_task(world.close())
    done, _ = await asyncio.wait({closing}, timeout=0.2)
    assert not done and not Busy.closed.is_set()
    Busy.go.set()
    await closing
    assert Busy.closed.is_set()


class Lingering(Env):
    """Its close takes until `go` is set."""

    go, closings = asyncio.Event(), list[str]()

    async def reset(self, task: Task) -> Observation:
        raise NotImplementedError

    async def act(self, action: Action) -> Observation:
        raise NotImplementedError

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        raise NotImplementedError

    async def close(self) -> None:
        self.closings.append("begun")
        await self.go.wait()
        self.closings.append("over")


async def test_a_close_that_is_cut_off_is_done_again_at_the_end() -> None:
    """At the end of a run environments are being disposed of, whose machines would be left."""
    world = make(Lingering)
    await world.start(WorldOptions(), (1, 1))
    env = await world.lease()
    disposing = asyncio.create_task(world.dispose(env))
    await asyncio.sleep(0)
    disposing.cancel()
    await asyncio.wait({disposing})
    assert Lingering.closings == ["begun"]
    Lingering.go.set()
    await world.close()
    assert Lingering.closings == ["begun", "begun", "over"]
