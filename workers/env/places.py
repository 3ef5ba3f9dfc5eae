"""The env worker's environments: each boots, is offered, held by one episode at a time, renewed, and offered again.

`Places.keep` runs a coroutine for each environment that is wanted, and its position is that environment's state:

    booting → free → held → renewing → free …            a boot that fails, or finds no room, is retried later
                               └→ disposed → booting     a renewal that fails

Every change is reported in a `Slots` message (`dart/v1/session.proto` says how it counts). A Reset takes a free
environment and a Release gives it back; neither waits for a boot or a renewal, because the coordinator begins no more
episodes than were granted. Calls to one environment never overlap: the renewal waits for a verb that is still running.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, TypeVar

from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.worlds import Env, EnvironmentFailure, Full, World

log = logging.getLogger(__name__)
T = TypeVar("T")

Verb = Literal["reset", "act", "judge", "probe"]
FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 1.0, 60.0
"""How long to wait before a boot that failed, or found no room, is retried: twice as long each time."""
MOST_REASON = 500


class State(Enum):
    BOOTING = auto()
    FREE = auto()
    HELD = auto()
    RENEWING = auto()
    WAITING = auto()
    """Its boot failed and will be retried later."""


HAS_BOOTED = (State.FREE, State.HELD, State.RENEWING)


@dataclass(slots=True, eq=False)
class Place:
    """One of the environments that are wanted."""

    state: State = State.BOOTING


@dataclass(slots=True, eq=False)
class Lease:
    """One episode's hold on an environment."""

    place: Place
    env: Env
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a verb runs."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False


async def bounded(verb: Awaitable[T], seconds: float, what: str, passing: tuple[type[Exception], ...] = ()) -> T:
    """The verb's result. Raises EnvironmentFailure for whatever it raises, except that `passing` ones pass through."""
    try:
        async with asyncio.timeout(seconds):
            return await verb
    except TimeoutError:
        raise EnvironmentFailure(f"{what} took longer than {seconds:g} s") from None
    except Exception as error:  # A world is the user's code: whatever it raises costs only this attempt.
        if isinstance(error, (EnvironmentFailure, *passing)):
            raise
        log.exception("%s failed", what)
        raise EnvironmentFailure(f"{what} failed: {type(error).__name__}: {error}") from error


class Places:
    """`wanted` environments of a world that has started."""

    def __init__(self, world: World, wanted: int) -> None:
        self._world, self._timeouts = world, world.timeouts
        self._places = [Place() for _ in range(wanted)]
        self._free: asyncio.Queue[Lease] = asyncio.Queue()
        self._granted = 0
        self._reason = ""
        self._say: Callable[[pb.Slots], None] = lambda slots: None

    async def keep(self, say: Callable[[pb.Slots], None]) -> None:
        """Boot and renew, and `say` what there is, until cancelled. Raises UserError if the world cannot lease."""
        self._say = say
        async with asyncio.TaskGroup() as tasks:
            for place in self._places:
                tasks.create_task(self._live(place))

    def slots(self) -> pb.Slots:
        """How many environments there are now, in each state."""
        counts = Counter(place.state for place in self._places)
        booted = sum(counts[state] for state in HAS_BOOTED)
        reason = self._reason if booted < len(self._places) else ""
        return pb.Slots(count=booted, granted=self._granted, booting=counts[State.BOOTING], reason=reason)

    async def take(self, seconds: float) -> Lease | None:
        """A free environment, which is now held; None if none becomes free within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                lease = await self._free.get()
        except TimeoutError:
            return None
        lease.place.state = State.HELD
        return lease

    async def call(
        self, lease: Lease, verb: Verb, call: Callable[[Env], Awaitable[T]], passing: tuple[type[Exception], ...] = ()
    ) -> T:
        """Call a verb of the environment through `bounded`. Raises EnvironmentFailure after `release`, too."""
        async with lease.busy:
            if lease.over.is_set():
                raise EnvironmentFailure("the episode was released before this was done")
            try:
                return await bounded(call(lease.env), getattr(self._timeouts, verb), verb, passing)
            except EnvironmentFailure:
                lease.failed = True
                raise

    def release(self, lease: Lease) -> None:
        """The episode is over; the environment is renewed in the background."""
        lease.over.set()

    async def _live(self, place: Place) -> None:
        while True:
            env, ready = await self._boot(place), True
            while ready:
                lease = self._offer(place, env)
                await lease.over.wait()
                self._change(place, State.RENEWING)
                async with lease.busy:
                    ready = await self._renew(env, lease.failed)
            self._change(place, State.BOOTING)
            await self._dispose(env)

    async def _boot(self, place: Place) -> Env:
        delay = FIRST_DELAY_SECONDS
        while True:
            self._change(place, State.BOOTING)
            try:
                return await self._lease()
            except (EnvironmentFailure, Full) as error:
                self._reason = str(error)[:MOST_REASON] or "the world is full"
                log.warning("no environment: %s; again in %.0f s", self._reason, delay)
            self._change(place, State.WAITING)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MOST_DELAY_SECONDS)

    async def _lease(self) -> Env:
        env = await bounded(self._world.lease(), self._timeouts.lease, "booting an environment", (UserError, Full))
        try:
            if await bounded(env.probe(), self._timeouts.probe, "the probe of a new environment"):
                return env
        except BaseException:  # cancelled too: nobody else knows this environment yet, so nobody else would end it
            await self._dispose(env)
            raise
        await self._dispose(env)
        raise EnvironmentFailure("a new environment did not answer its probe")

    async def _renew(self, env: Env, failed: bool) -> bool:
        """Whether it is ready for another episode; if it has failed, it must also answer its probe."""
        try:
            renewed = await bounded(env.renew(), self._timeouts.renew, "renewing an environment")
            if renewed and failed:
                renewed = await bounded(env.probe(), self._timeouts.probe, "the probe of a renewed environment")
        except EnvironmentFailure as error:
            self._reason, renewed = str(error)[:MOST_REASON], False
        else:
            self._reason = "" if renewed else "an environment could not be renewed"
        if not renewed:
            log.warning("an environment is replaced: %s", self._reason)
        return renewed

    async def _dispose(self, env: Env) -> None:
        try:
            await bounded(self._world.dispose(env), self._timeouts.renew, "disposing of an environment")
        except EnvironmentFailure as error:
            log.warning("%s", error)

    def _offer(self, place: Place, env: Env) -> Lease:
        lease = Lease(place, env)
        self._granted += 1
        self._change(place, State.FREE)
        self._free.put_nowait(lease)
        return lease

    def _change(self, place: Place, state: State) -> None:
        place.state = state
        self._say(self.slots())
