"""A world of simulated VMs for the real env worker: it boots, hangs and fails as `Options` says, and books its time.

`Desktops` is an ordinary world (`dart.worlds`), so the env worker's role leases, times out, renews and disposes of its
VMs as it does with real ones; only what happens inside a VM is a timing model (`timings`). Every second of every VM is
in one `Cause`: `Booked.seconds` adds up to VMs × time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel

from benchmarks.simulation.timings import EnvTimes, Lengths, success_rate
from dart.worlds import (
    Action,
    Env,
    EnvironmentFailure,
    Finish,
    Image,
    Observation,
    Task,
    Timeouts,
    Verdict,
    World,
    WorldOptions,
)

SCREEN = Image.of(b"a screenshot", "image/png", 1920, 1080)


class Cause(StrEnum):
    """What a VM's time went into."""

    SETTING_UP = "setting up the task"
    ACTING = "acting"
    GRADING = "grading"
    WAITING = "waiting for the model"
    BOOTING = "booting"
    """Before its first episode, or in the place of one that hung; where Reset boots, before every episode."""
    RENEWING = "renewing"
    """Reverted to its snapshot and booted again after an episode, in the background."""
    HUNG = "hangs"
    """Until the time limit, and what the episode had done before."""
    NOT_SET_UP = "failed set-ups"
    DISCARDED = "other failed attempts"
    IDLE = "idle"
    """Booted and free."""


USEFUL = (Cause.SETTING_UP, Cause.ACTING, Cause.GRADING, Cause.WAITING)
"""Within an episode that came to a verdict."""


@dataclass(slots=True)
class Booked:
    """What the VMs of a run spent their time on, in VM-seconds, and what happened to them."""

    seconds: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))
    events: Counter[str] = field(default_factory=Counter)
    """ "boots", "verdicts", "hangs" and "failed set-ups"."""
    clocks: list[Clock] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        """Book what is under way as if it came to a good end, and then no more."""
        for clock in self.clocks:
            clock.enter(clock.cause)
            clock.book()
        self.closed = True


@dataclass(slots=True, eq=False)
class Clock:
    """One VM's time. What an episode spends is kept until it is known whether the episode counts."""

    booked: Booked
    cause: Cause
    since: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    spent: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))

    def enter(self, cause: Cause) -> None:
        if self.booked.closed:
            return
        now = asyncio.get_running_loop().time()
        kept = self.spent if self.cause in USEFUL or self.cause is Cause.HUNG else self.booked.seconds
        kept[self.cause] += now - self.since
        self.cause, self.since = cause, now

    def book(self, lost_to: Cause | None = None) -> None:
        """The episode is over: book its time as it was spent, or all of it as lost."""
        if self.booked.closed:
            return
        if lost_to is None:
            for cause, seconds in self.spent.items():
                self.booked.seconds[cause] += seconds
        else:
            self.booked.seconds[lost_to] += sum(self.spent.values())
        self.spent = dict.fromkeys(Cause, 0.0)


class Options(WorldOptions):
    seed: str = "0"
    """Of the worker's own random numbers."""
    boots_in: Literal["background", "reset"] = "background"
    """reset: a lease is only a promise, and each Reset reverts and boots its VM, as a worker without a pool would."""
    tasks: int = 203
    hang_share: float = 0.01
    """Of the episodes, so many hang in their set-up or in one of their steps, until the time limit of the verb."""
    failed_set_up_share: float = 0.05
    """Of the set-ups, so many fail after they have taken their time."""


class Desktops(World):
    Options = Options
    timeouts = Timeouts(lease=120, reset=240, act=60, judge=60, probe=10, renew=120)
    """Some times what each takes at most: 39 s, 60 s (99 s with its boot), 10 s, 5 s, 0 s, 39 s."""
    booked: Booked = Booked()
    """Of all worlds of the run under way."""

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, Options)
        self._options, self._chance = options, random.Random(options.seed)

    async def lease(self) -> Env:
        vm = VM(self._options, self._chance, Clock(self.booked, Cause.BOOTING))
        if self._options.boots_in == "background":
            await vm.boot()
        vm.clock.enter(Cause.IDLE)
        return vm

    async def dispose(self, env: Env) -> None:
        assert isinstance(env, VM)
        env.clock.enter(Cause.IDLE)
        self.booked.clocks.remove(env.clock)


class VM(Env):
    def __init__(self, options: Options, chance: random.Random, clock: Clock) -> None:
        super().__init__(options, (SCREEN.width, SCREEN.height))
        self._plan, self._chance, self.clock = options, chance, clock
        self._times, self._lengths = EnvTimes(), Lengths()
        self._hung = self._verdict = False
        clock.booked.clocks.append(clock)

    async def boot(self) -> None:
        await asyncio.sleep(self._chance.uniform(*self._times.boot))
        self.clock.booked.events["boots"] += 1
        self._hung = False

    async def reset(self, task: Task) -> Observation:
        chance = self._chance
        if self._plan.boots_in == "reset":
            self.clock.enter(Cause.BOOTING)
            await self.boot()
        self.clock.enter(Cause.SETTING_UP)
        number = int(task.name.removeprefix("task-"))
        self._success = chance.random() < success_rate(number, self._plan.tasks)
        self._left = self._lengths.sample(chance, self._success)
        self._hangs_at = chance.randrange(self._left + 1) if chance.random() < self._plan.hang_share else -1
        self._lost_to, self._steps, self._verdict = Cause.DISCARDED, 0, False
        await self._may_hang()
        await asyncio.sleep(chance.uniform(*self._times.settle))
        if chance.random() < self._plan.failed_set_up_share:
            self._lost_to = Cause.NOT_SET_UP
            self.clock.booked.events["failed set-ups"] += 1
            raise EnvironmentFailure("the task's set-up failed: a download broke off")
        self.clock.enter(Cause.WAITING)
        return Observation(SCREEN, f"do {task.name}")

    async def act(self, action: Action) -> Observation:
        self.clock.enter(Cause.ACTING)
        self._steps += 1
        await self._may_hang()
        await asyncio.sleep(self._chance.uniform(*self._times.step))
        self._left -= 1
        self.clock.enter(Cause.WAITING)
        return Observation(SCREEN, done=self._left == 0)

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        self.clock.enter(Cause.GRADING)
        await asyncio.sleep(self._chance.uniform(*self._times.grade))
        self._verdict = True
        self.clock.booked.events["verdicts"] += 1
        done = self._left == 0 or isinstance(last, Finish)
        return Verdict(float(self._success and done))

    async def probe(self) -> bool:
        return not self._hung

    async def renew(self) -> bool:
        """Revert and boot, unless Reset will; one that hangs cannot be reverted and is replaced."""
        self.clock.enter(Cause.RENEWING)
        self.clock.book(None if self._verdict else self._lost_to)
        if self._plan.boots_in == "background":
            if self._hung:
                return False
            await self.boot()
        self._hung = False
        self.clock.enter(Cause.IDLE)
        return True

    async def _may_hang(self) -> None:
        if self._steps != self._hangs_at:
            return
        self._hung, self._lost_to = True, Cause.HUNG
        self.clock.enter(Cause.HUNG)
        self.clock.booked.events["hangs"] += 1
        await asyncio.Event().wait()  # until the env worker's time limit
