"""Everything the coordinator knows about its replicas, and the two questions that it asks about them.

*Who takes this request?* `take`: capacity first, then the replica that served the trajectory's last turn (its prefix
cache is warm), then the least busy one, and among equals the newest version. A request that finds none queues (`wait`)
until `grants` gives it one, in their order, but for one whose prefix is where there is room; one that has failed tries
another replica first. A quarantined replica (`fleet.health`) gets only probes, unless no healthy one is left.

*Who is updated next?* Every `every_updates`-th version that the trainer stages is published: from then on replicas with
older ones are to be updated. `next_update`: at most `max_unavailable` at once, the oldest version first, straight to
the newest staged one, because the trainer keeps no older ones. A replica whose transfer broke takes no turn from
others, and rests for longer each time. It serves on if the transfer left it as it was; with weights older than
`max_staleness` it leaves the rotation where a fresher one serves. If the newest version gets through to nobody, the
rest serve on. With `together`, all are updated at once, and none serves until all are done. A replica that joins with
old weights serves nothing before its first update.

Others query `Replicas`, or report events to it. A listener in `on_change` is called after each change is complete, and
asks again, in any order. Times are seconds of any origin, passed in as arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Generic

from dart.core.fleet.health import FIRST_BREAK_SECONDS, Condition, Lost
from dart.core.fleet.replica import Offers, Replica, Request, S, next_in_line, offer_with_prefix
from dart.core.usage import Ledger, ReplicaState

AFFINITY_SLACK = 2
"""How many requests busier than the least busy replica the one with the trajectory's prefix may be."""
FIRST_RETRY_SECONDS, MOST_RETRY_SECONDS = 0.25, 2.0
"""How long a request that has failed waits before it goes to a replica that is not healthy."""


class Replicas(Generic[S]):
    def __init__(
        self, now: float, version: int = 0, max_unavailable: int = 1, *, together: bool = False,
        every_updates: int = 1, max_staleness: int | None = None,
    ) -> None:  # fmt: skip
        self.version = version
        """The newest published version. A replica that was updated late may have a newer one."""
        self.newest = version
        """The newest staged version: what a replica gets when it is updated."""
        self.together = together
        """Update all replicas at once, and let none serve until all are done: the baseline for rolling updates."""
        self.usage = Ledger({ReplicaState.BUSY}, now)
        self.on_change: list[Callable[[], None]] = []
        """Called when a replica has joined or left, changed its version or health, or entered or left the rotation."""
        self.on_condition: list[Callable[[Replica[S]], None]] = []
        """Called with a replica that has entered or left quarantine, or may be probed from now on."""
        self._max_unavailable, self._every_updates, self._max_staleness = max_unavailable, every_updates, max_staleness
        self._replicas: dict[str, Replica[S]] = {}
        self._numbers = itertools.count(1)
        self._offers: Offers[S] = Offers()
        self._to_probe: dict[str, Replica[S]] = {}
        self._line: dict[Request[S], None] = {}
        self._retry_line: dict[Request[S], None] = {}
        """Requests that have failed, which come before those in `_line`."""
        self._lost = Lost()

    # ---- facts ----

    def __iter__(self) -> Iterator[Replica[S]]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, name: str) -> Replica[S] | None:
        return self._replicas.get(name)

    @property
    def versions(self) -> dict[str, int]:
        """The version of each replica."""
        return {replica.name: replica.version for replica in self}

    @property
    def wanted(self) -> list[Replica[S]]:
        """Those whose weights are waited for: all but the excluded ones, or all if every one is."""
        return [one for one in self if not one.excluded] or list(self)

    @property
    def settled(self) -> bool:
        """Every wanted replica has the newest published version, or a newer one."""
        return all(one.target is None and one.version >= self.version for one in self.wanted)

    @property
    def behind(self) -> list[Replica[S]]:
        """Wanted replicas with an older version than the newest published one."""
        return [one for one in self.wanted if one.version < self.version]

    @property
    def waiting(self) -> int:
        """The number of queued requests."""
        return len(self._line) + len(self._retry_line)

    @property
    def free(self) -> int:
        """Requests that the healthy replicas could take."""
        return sum(replica.slots - replica.busy for replica in self if replica.offer)

    # ---- members ----

    def join(self, name: str, slots: int, version: int, session: S, now: float) -> Replica[S]:
        """Add a new instance, which replaces one of the same name."""
        if old := self._replicas.pop(name, None):
            self._retire(old)
            self._remember(old, now)
        if self.usage.counts(name):
            self.usage.left(name, now)
        number = next(self._numbers)
        replica = Replica(name, slots, version, session, number, serving=version >= self.version, turn=number)
        replica.health = self._lost.back(name, now)
        self._replicas[name] = replica
        replica.booked = replica.doing
        self.usage.joined(name, replica.booked, 1, now)
        self._refresh(replica, now)
        self._serve_together(now)  # the one that it replaces may have been the last that was behind
        self._changed()
        return replica

    def resize(self, replica: Replica[S], slots: int, now: float) -> None:
        """It takes this many requests at once from now on. Those that it has, it keeps, even if they are more."""
        replica.slots = slots
        self._refresh(replica, now)
        self._changed()

    def leave(self, replica: Replica[S], now: float, *, for_good: bool) -> None:
        """Remove a replica. `for_good`: it said goodbye; else it may come back, and its health is remembered."""
        if replica.gone:
            return  # another instance of this name has replaced it
        del self._replicas[replica.name]
        self._retire(replica)
        self.usage.lost(replica.name, ReplicaState.LOST, now, for_good=for_good)
        if not for_good:
            self._remember(replica, now)
        self._serve_together(now)
        self._changed()

    # ---- which replica takes a request ----

    def take(self, request: Request[S], now: float) -> Replica[S] | None:
        """The replica for the request, until it is `served`, `failed` or `ended`; None if the request has to wait."""
        if request.failed_on:
            return self._take_retry(request, now)
        if self._to_probe:
            return self._give(request, next(iter(self._to_probe.values())), now)
        best = self._offers.best()
        if best is None:
            return None if self._any_hope() else self._least_bad(request, now)
        chosen = best[2]
        warm = offer_with_prefix(request, self._replicas)
        if warm is not None and warm[0] <= best[0] + AFFINITY_SLACK:
            chosen = warm[2]
        request.replica, request.probe = chosen, False
        chosen.busy += 1
        if chosen.busy == 1:
            self._book(chosen, now)
        self._offers.update(chosen)
        return chosen

    def served(self, request: Request[S], now: float) -> None:
        """The replica has answered the request."""
        replica = request.replica
        assert replica is not None, "`take` has given it a replica"
        if replica.gone:
            return
        if replica.health.failures:
            self._ended(request, now)
            restored = replica.health.served(request.probe, now)
            self._refresh(replica, now)
            if restored:
                self._condition_changed(replica)
            return
        replica.busy -= 1
        self._offers.update(replica)
        if not replica.busy:
            self._book(replica, now)

    def failed(self, request: Request[S], why: str, now: float) -> None:
        """The replica is to blame for a failure of the request. `why`: in its own words."""
        replica = self._ended(request, now)
        request.failures += 1
        request.failed_on |= {replica.name}
        seconds = FIRST_RETRY_SECONDS * 2.0 ** (request.failures - 1)
        request.earliest = now + min(MOST_RETRY_SECONDS, seconds)
        if replica.gone:
            return  # its health was settled when it left
        before = replica.health.condition
        replica.health.failed(why, now)
        self._refresh(replica, now)
        if replica.health.condition is before:
            self._changed()
        else:
            self._condition_changed(replica)

    def ended(self, request: Request[S], now: float) -> None:
        """It was cancelled or ended by a weight update, or no replica could have served it: none is to blame."""
        self._ended(request, now)

    def declined(self, request: Request[S], now: float) -> None:
        """The replica says that the request itself is wrong: another one is asked next, and nobody is blamed."""
        request.failed_on |= {self._ended(request, now).name}

    def _ended(self, request: Request[S], now: float) -> Replica[S]:
        replica = request.replica
        assert replica is not None, "`take` has given it a replica"
        if not replica.gone:
            replica.busy -= 1
            replica.probes -= request.probe
            self._refresh(replica, now)
        return replica

    def wait(self, request: Request[S]) -> None:
        """Queue the request."""
        (self._retry_line if request.failed_on else self._line)[request] = None

    def withdraw(self, request: Request[S]) -> None:
        """Take the request out of the queue."""
        self._line.pop(request, None)
        self._retry_line.pop(request, None)

    def grants(self, now: float) -> list[Request[S]]:
        """Queued requests that have been given a replica. Ask after every change and every request that ends."""
        granted = []
        for request in [*self._retry_line] if self._retry_line else ():
            if self.take(request, now):
                del self._retry_line[request]
                granted.append(request)
        while self._line:
            request = next_in_line(self._line, self._replicas)
            if not self.take(request, now):
                break
            del self._line[request]
            granted.append(request)
        return granted

    # ---- which replica is updated next ----

    def staged(self, version: int, now: float) -> None:
        """The trainer has made a version. It is published if the last published one is `every_updates` older.
        Raises ValueError unless it is newer than the last."""
        if version <= self.newest:
            raise ValueError(f"version {version} was staged after {self.newest}: versions only grow")
        self.newest = version
        if version - self.version >= self._every_updates:
            self.publish_newest(now)
        else:
            self._changed()

    def publish_newest(self, now: float) -> None:
        """Publish the newest staged version, if it is not published yet."""
        if self.newest == self.version:
            return
        self.version = self.newest
        if self.together:
            for replica in self:
                self._set_serving(replica, False, now)
            self._serve_together(now)
        self._changed()

    def next_update(self) -> tuple[Replica[S], int] | None:
        """A replica to update and the version to send it, or None while nothing may start. Marks it as begun."""
        behind = [one for one in self if one.target is None and one.version < self.version]
        begun = [bool(one.health.breaks) for one in self if one.target is not None and not one.resting]
        for broke in () if self.together else (False, True):  # each kind has its own turns
            if begun.count(broke) >= self._max_unavailable:
                behind = [one for one in behind if bool(one.health.breaks) is not broke]
        if not (behind := self._updatable(behind)):
            return None
        replica = min(behind, key=lambda one: (max(one.version, one.health.broken), one.turn))
        return replica, self.retarget(replica)

    def retarget(self, replica: Replica[S]) -> int:
        """The version to send to a replica whose update begins, or has begun: the newest by now."""
        replica.target = self.newest
        return self.newest

    def _updatable(self, behind: list[Replica[S]]) -> list[Replica[S]]:
        """Those that may be updated now: only those out of service anyway, where the newest version has broken on its
        way to more than `max_unavailable`, and nobody has it. Then the trainer is at fault."""
        out = itertools.chain(self._lost.expected, (one.health for one in self if not one.serving))
        broken = sum(health.broken >= self.version for health in out)
        nobody = all(one.version < self.version for one in self)
        return [one for one in behind if not one.serving] if nobody and broken > self._max_unavailable else behind

    def pause(self, replica: Replica[S], now: float) -> None:
        """The replica loads new weights: it gets no requests until it is `updated`, or `update_broke` lets it serve."""
        if not replica.gone:
            self._set_serving(replica, False, now)
            self._changed()

    def updated(self, replica: Replica[S], version: int, now: float) -> bool:
        """The replica has the version. Returns False if it has left meanwhile."""
        if replica.gone:
            return False
        replica.version, replica.target, replica.excluded, replica.health.breaks = version, None, False, 0
        self._set_serving(replica, replica.serving or not self.together, now)
        self._serve_together(now)
        self._changed()
        return True

    def update_broke(self, replica: Replica[S], now: float, *, serve: bool = False) -> float:
        """The transfer to the replica broke. Returns how long it is to rest before `update_failed`, in seconds.
        `serve`: it is as it was before the transfer, and served then, so it goes on with the weights that it has."""
        if replica.gone and replica.name not in self._lost:
            return 0.0
        seconds = replica.health.broke(replica.target or self.newest)
        replica.resting = not replica.gone
        if serve and not (self.together or replica.gone or replica.excluded or self._too_old(replica)):
            self._set_serving(replica, True, now)
        self._changed()
        return FIRST_BREAK_SECONDS if self.together else seconds  # then all others wait with it

    def update_failed(self, replica: Replica[S], now: float) -> None:
        """The replica is tried again from now on, after the others."""
        if replica.gone:
            return
        replica.target, replica.resting = None, False
        replica.turn = next(self._numbers)
        if self._too_old(replica):
            self._set_serving(replica, False, now)
        self._changed()

    def _too_old(self, replica: Replica[S]) -> bool:
        """Whether what it samples would be dropped, and a fresher replica serves."""
        stale = self._max_staleness is not None and self.newest - replica.version > self._max_staleness
        return stale and any(one.capacity and one.version > replica.version for one in self)

    def exclude(self, replica: Replica[S], now: float) -> None:
        """The replica cannot be updated in time: it gets no requests unless it is `updated` after all."""
        replica.excluded = True
        self._set_serving(replica, False, now)
        self._serve_together(now)
        self._changed()

    # ---- time ----

    def next_alarm(self, now: float) -> float:
        """When to call `time_passed`: a change is due then that nothing else would bring about."""
        healths = (replica.health.until for replica in self)
        retries = (request.earliest for request in self._retry_line if request.earliest > now)
        return min(itertools.chain(healths, retries, [self._lost.next_alarm]), default=math.inf)

    def time_passed(self, now: float) -> None:
        """End the rests and forgive the failures that are due, and let requests be tried again."""
        for replica in [replica for replica in self if replica.health.until <= now]:
            before = replica.health.condition
            replica.health.time_passed(now)
            self._refresh(replica, now)
            if replica.health.condition is not before:
                self._condition_changed(replica)
        self._lost.time_passed(now)
        self._changed()

    # ---- inside ----

    def _take_retry(self, request: Request[S], now: float) -> Replica[S] | None:
        """Prefer another replica if there is one, even if the request has to wait for it."""
        best = self._offers.best_but(request.failed_on)
        if best is None and not self._any_hope(request.failed_on):
            best = self._offers.best()
        if best is not None:
            return self._give(request, best[2], now)
        return None if self._any_hope() or now < request.earliest else self._least_bad(request, now)

    def _least_bad(self, request: Request[S], now: float) -> Replica[S] | None:
        """When no replica is healthy: one that may still serve the request, which shows whether it works again."""
        able = [replica for replica in self if replica.has_room]
        if not able:
            return None
        chosen = min(able, key=lambda r: (r.name in request.failed_on, r.health.quarantines, r.busy, r.number))
        return self._give(request, chosen, now)

    def _any_hope(self, but: AbstractSet[str] = frozenset()) -> bool:
        """Whether a healthy replica not in `but` can take a request now, or will after a request or an update ends."""
        return any(
            replica.health.condition is Condition.HEALTHY
            and replica.slots
            and (replica.serving or self._comes_back(replica))
            and replica.name not in but
            for replica in self
        )

    def _comes_back(self, replica: Replica[S]) -> bool:
        """Whether it is out of the rotation for an update that has gone well so far."""
        if self.together and replica.version >= self.version:
            return True
        return replica.target is not None and replica.health.broken <= replica.version and not replica.excluded

    def _give(self, request: Request[S], replica: Replica[S], now: float) -> Replica[S]:
        request.replica = replica
        request.probe = replica.health.condition is not Condition.HEALTHY
        replica.busy += 1
        replica.probes += request.probe
        self._refresh(replica, now)
        return replica

    def _refresh(self, replica: Replica[S], now: float) -> None:
        """Bring the replica's capacity, its offer and the booking of its time up to date after a change."""
        condition = replica.health.condition
        replica.capacity = replica.slots if replica.serving and condition is Condition.HEALTHY else 0
        replica.rank = (-replica.version, replica.name, replica.number)
        if condition is Condition.PROBING and replica.has_room and not replica.probes:
            self._to_probe[replica.name] = replica
        else:
            self._to_probe.pop(replica.name, None)
        self._offers.update(replica)
        self._book(replica, now)

    def _retire(self, replica: Replica[S]) -> None:
        replica.gone, replica.offer = True, None
        self._to_probe.pop(replica.name, None)

    def _remember(self, replica: Replica[S], now: float) -> None:
        """It ended unexpectedly, which counts as a failure if it comes back."""
        replica.health.failed("its session was lost", now)
        self._lost.left(replica.name, replica.health, now)

    def _set_serving(self, replica: Replica[S], serving: bool, now: float) -> None:
        replica.serving = serving
        self._refresh(replica, now)

    def _serve_together(self, now: float) -> None:
        """With `together`, all of them again once none is behind that is not excluded."""
        if self.together and self.settled:
            for replica in self:
                self._set_serving(replica, not replica.excluded, now)

    def _book(self, replica: Replica[S], now: float) -> None:
        """Book the replica's time from now on to its present state."""
        doing = replica.doing
        if doing is not replica.booked:
            self.usage.move(replica.name, replica.booked, doing, now)
            before, replica.booked = replica.booked, doing
            if (before, doing) == (ReplicaState.BUSY, ReplicaState.SYNCING):  # it has drained
                self._changed()

    def _condition_changed(self, replica: Replica[S]) -> None:
        for listener in self.on_condition:
            listener(replica)
        self._changed()

    def _changed(self) -> None:
        for listener in self.on_change:
            listener()
