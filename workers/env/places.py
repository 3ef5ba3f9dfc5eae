"""The env worker's environments: each boots, is offered, held by one episode at a time, renewed, and offered again.

`Places.keep` runs a coroutine for each environment that is wanted, and its position is that environment's state:

    booting → free → held → renewing → free …            a boot that fails, or finds no room, is retried later
                               ├→ disposed → booting     a renewal that fails
                               └→ disposed → quarantined → booting
                                                         its episodes keep failing while others work (`Record`)

Every change is reported in a `Slots` message (`dart/v1/session.proto` says how it counts). A Reset takes a free
environment and a Release gives it back; neither waits for a boot or a renewal, because the coordinator begins no more
episodes than were granted. Calls to one environment never overlap: the renewal waits for a verb that is still running.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, TypeVar

from dart.core.cutting import encodable
from dart.errors import UserError
from dart.v1 import session_pb2 as pb
from dart.worlds import Env, EnvironmentFailure, Full, Timeouts, World

log = logging.getLogger(__name__)
T = TypeVar("T")

Verb = Literal["reset", "act", "judge", "probe"]
FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 1.0, 60.0
"""How long to wait before a boot that failed, or found no room, is retried: twice as long each time."""
STRIKES = 3
"""An environment is quarantined after this many failed episodes in a row, if others on its worker work meanwhile."""
FIRST_QUARANTINE_SECONDS, MOST_QUARANTINE_SECONDS = 10.0, 640.0
"""An environment's first quarantine, and the longest: each is twice as long as the one before."""
MOST_REASON = 500


class State(Enum):
    BOOTING = auto()
    FREE = auto()
    HELD = auto()
    RENEWING = auto()
    WAITING = auto()
    """Its boot failed and will be retried later."""
    QUARANTINED = auto()
    """Its episodes failed one after the other while others worked."""


HAS_BOOTED = (State.FREE, State.HELD, State.RENEWING)


@dataclass(slots=True)
class Record:
    """How one environment's episodes ended: decides when it is quarantined, and for how long. Times are in seconds.

    An environment is compared with the others of its worker: if they fail as well, a machine, a network or a task is at
    fault, and the coordinator makes all of them rest (`dart.core.usage.rest_seconds`). After a quarantine one more
    failure begins the next, and one good episode clears the record.
    """

    failures: int = 0
    """Failed episodes in a row."""
    since: float = 0.0
    """When the first of them ended."""
    quarantines: int = 0
    """In a row."""

    def ended_well(self) -> None:
        self.failures = self.quarantines = 0

    def failed(self, now: float, other_ended_well: float, other_goes_on_since: float = math.inf) -> float:
        """An episode failed. Returns for how long to quarantine the environment, or 0.

        `other_ended_well`: when an episode of another environment last ended well. `other_goes_on_since`: when the
        oldest one that goes on began: it may last much longer than it takes to fail.
        """
        if not self.failures:
            self.since = now
        self.failures += 1
        others_work = other_ended_well > self.since or other_goes_on_since < self.since
        if self.failures < STRIKES or not others_work:
            return 0.0
        seconds = min(MOST_QUARANTINE_SECONDS, FIRST_QUARANTINE_SECONDS * 2.0 ** min(self.quarantines, 16))
        self.quarantines += 1
        self.failures, self.since = STRIKES - 1, now
        return seconds


@dataclass(slots=True, eq=False)
class Place:
    """One of the environments that are wanted."""

    number: int = 0
    state: State = State.BOOTING
    record: Record = field(default_factory=Record)
    why: str = ""
    """Why it is quarantined."""
    ended_well: float = -math.inf
    """When an episode here last ended with a verdict."""
    began: float = math.inf
    """When the episode that holds it began; infinity if none does."""


@dataclass(slots=True, eq=False)
class Lease:
    """One episode's hold on an environment."""

    place: Place
    env: Env
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a verb runs."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    judged: bool = False
    failure: str = ""
    """What the environment failed with in this episode."""


async def bounded(
    verb: Callable[[], Awaitable[T]], seconds: float, what: str, passing: tuple[type[Exception], ...] = ()
) -> T:
    """The verb's result. Raises EnvironmentFailure for whatever it raises, except that `passing` ones pass through.

    The verb is called here, because one that is not async raises already then.
    """
    try:
        async with asyncio.timeout(seconds) as bound:
            return await verb()
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        log.exception("%s failed", what)  # of a task of the world's own, which it has cancelled and awaited
        raise EnvironmentFailure(f"{what} failed: something that it awaited was cancelled") from None
    except Exception as error:  # A world is the user's code: whatever it raises costs only this attempt.
        if isinstance(error, TimeoutError) and bound.expired():
            raise EnvironmentFailure(f"{what} took longer than {seconds:g} s") from None
        if isinstance(error, (EnvironmentFailure, *passing)):
            raise
        log.exception("%s failed", what)
        raise EnvironmentFailure(f"{what} failed: {type(error).__name__}: {error}") from error


class Places:
    """`wanted` environments of a world that has started."""

    def __init__(self, world: World, wanted: int, timeouts: Timeouts | None = None) -> None:
        """`timeouts`: instead of the world's own."""
        self._world, self._timeouts = world, timeouts or world.timeouts
        self._places = [Place(number) for number in range(wanted)]
        self._free: asyncio.Queue[Lease] = asyncio.Queue()
        self._granted = 0
        self._reason = ""
        self._booted = False
        """An environment has booted: what the world calls the user's mistake from now on is one machine's."""
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
        quarantined = [place.why for place in self._places if place.state is State.QUARANTINED]
        reasons = [*([self._reason] if self._reason else []), *quarantined] if booted < len(self._places) else []
        return pb.Slots(
            count=booted, granted=self._granted, booting=counts[State.BOOTING], quarantined=len(quarantined),
            reason=encodable("; ".join(reasons)[:MOST_REASON]),
        )  # fmt: skip

    async def take(self, seconds: float) -> Lease | None:
        """A free environment, which is now held; None if none becomes free within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                lease = await self._free.get()
        except TimeoutError:
            return None
        lease.place.state, lease.place.began = State.HELD, time.monotonic()
        return lease

    async def call(
        self, lease: Lease, verb: Verb, call: Callable[[Env], Awaitable[T]], passing: tuple[type[Exception], ...] = ()
    ) -> T:
        """Call a verb of the environment through `bounded`. Raises EnvironmentFailure after `release`, too."""
        async with lease.busy:
            if lease.over.is_set():
                raise EnvironmentFailure("the episode was released before this was done")
            try:
                answer = await bounded(lambda: call(lease.env), getattr(self._timeouts, verb), verb, passing)
            except EnvironmentFailure as error:
                self.failed(lease, str(error))
                raise
            lease.judged |= verb == "judge"
            return answer

    def failed(self, lease: Lease, why: str) -> None:
        """The environment failed in this episode: it must answer its probe before the next one."""
        lease.failure = why

    def release(self, lease: Lease) -> None:
        """The episode is over; the environment is renewed in the background."""
        lease.over.set()

    async def _live(self, place: Place) -> None:
        while True:
            env, ready, seconds = await self._boot(place), True, 0.0
            while ready:
                lease = self._offer(place, env)
                await lease.over.wait()
                self._change(place, State.RENEWING)
                async with lease.busy:
                    if seconds := self._quarantine(lease):
                        break
                    ready = await self._renew(env, bool(lease.failure))
            if seconds:
                self._change(place, State.QUARANTINED)
                await self._dispose(env)
                await asyncio.sleep(seconds)
            else:
                self._change(place, State.BOOTING)
                await self._dispose(env)

    def _quarantine(self, lease: Lease) -> float:
        """For how many seconds the environment of this episode, which is over, gets none; 0: it may have the next."""
        now, place = time.monotonic(), lease.place
        place.began = math.inf
        if not lease.failure:
            if lease.judged:
                place.ended_well = now
                place.record.ended_well()
            return 0.0
        others = [other for other in self._places if other is not place]
        well = max((other.ended_well for other in others), default=-math.inf)
        seconds = place.record.failed(now, well, min((other.began for other in others), default=math.inf))
        if seconds:
            place.why = f"environment {place.number} is quarantined for {seconds:.0f} s, because its episodes fail and "
            place.why += f"others do not; the last failed with: {lease.failure}"
            log.warning("%s", place.why)
        return seconds

    async def _boot(self, place: Place) -> Env:
        delay = FIRST_DELAY_SECONDS
        while True:
            self._change(place, State.BOOTING)
            try:
                env = await self._lease()
            except (EnvironmentFailure, Full, UserError) as error:
                if isinstance(error, UserError) and not self._booted:
                    raise
                self._reason = str(error)[:MOST_REASON] or "the world is full"
                log.warning("no environment: %s; again in %.0f s", self._reason, delay)
            else:
                self._booted = True
                return env
            self._change(place, State.WAITING)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MOST_DELAY_SECONDS)

    async def _lease(self) -> Env:
        env = await bounded(self._world.lease, self._timeouts.lease, "booting an environment", (UserError, Full))
        try:
            probe = lambda: env.probe()  # noqa: E731, PLW0108  looked up in `bounded`: a world may have leased anything
            if await bounded(probe, self._timeouts.probe, "the probe of a new environment"):
                return env
        except BaseException:  # cancelled too: nobody else knows this environment yet, so nobody else would end it
            await self._dispose(env)
            raise
        await self._dispose(env)
        raise EnvironmentFailure("a new environment did not answer its probe")

    async def _renew(self, env: Env, failed: bool) -> bool:
        """Whether it is ready for another episode; if it has failed, it must also answer its probe."""
        try:
            renewed = await bounded(env.renew, self._timeouts.renew, "renewing an environment")
            if renewed and failed:
                renewed = await bounded(env.probe, self._timeouts.probe, "the probe of a renewed environment")
        except EnvironmentFailure as error:
            self._reason, renewed = str(error)[:MOST_REASON], False
        else:
            self._reason = "" if renewed else "an environment could not be renewed"
        if not renewed:
            log.warning("an environment is replaced: %s", self._reason)
        return renewed

    async def _dispose(self, env: Env) -> None:
        try:
            await bounded(lambda: self._world.dispose(env), self._timeouts.close, "disposing of an environment")
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
