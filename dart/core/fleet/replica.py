"""The records behind `dart.core.fleet.replicas`: a replica, a request, offers of replicas, and whose turn it is."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dart.core.fleet.health import Condition, Health
from dart.core.usage import ReplicaState

S = TypeVar("S")

LOOK_AHEAD = 16
"""How many queued requests are looked through for one whose prefix is where there is room, and how often the first of
them is passed over."""


@dataclass(slots=True, eq=False)
class Replica(Generic[S]):
    """One replica instance. Read by everybody, changed by its `Replicas` alone. `session`: how to reach it."""

    name: str
    slots: int
    version: int
    session: S
    number: int = 0
    """Replicas are numbered as they join."""
    serving: bool = True
    """It is in the rotation, so it may be given requests."""
    busy: int = 0
    """Requests that it is working on."""
    probes: int = 0
    """How many of those are probes, which show whether it works again."""
    target: int | None = None
    """The version that is being sent to it."""
    resting: bool = False
    """A transfer to it broke a moment ago. It keeps its `target` until it is tried again."""
    excluded: bool = False
    """It could not be updated in time, and nothing waits for it."""
    gone: bool = False
    health: Health = field(default_factory=Health)
    capacity: int = 0
    """The most requests at once: its slots while it serves and is healthy, else 0."""
    booked: ReplicaState = ReplicaState.IDLE
    """The state to which its time is booked."""
    turn: int = 0
    """The lower number is updated first, where two replicas have the same version."""
    offer: Offer[S] | None = field(default=None, repr=False)
    """Its entry in `Offers`, while it could take one more request."""
    rank: tuple[int, str, int] = (0, "", 0)
    """Breaks ties between equal prices, smallest first: (-version, name, number)."""

    @property
    def has_room(self) -> bool:
        """It could take one more request, healthy or not."""
        return self.serving and self.busy < self.slots

    @property
    def doing(self) -> ReplicaState:
        if self.busy:
            return ReplicaState.BUSY
        if not self.serving:
            return ReplicaState.SYNCING
        return ReplicaState.IDLE if self.health.condition is Condition.HEALTHY else ReplicaState.QUARANTINED

    @property
    def condition(self) -> str:
        """One word for people: "ready", "syncing", "quarantined" or "probing"."""
        if not self.serving:
            return "syncing"
        return "ready" if self.health.condition is Condition.HEALTHY else str(self.health.condition)


Offer = tuple[int, tuple[int, str, int], Replica[S]]
"""(price, rank, replica): the smallest is the best."""


class Offers(Generic[S]):
    """Replicas that could take one more request, best first: a heap that skips outdated entries.

    An entry is valid while it is its replica's `offer`.
    """

    def __init__(self) -> None:
        self._heap: list[Offer[S]] = []
        self._most = 64

    def best(self) -> Offer[S] | None:
        heap = self._heap
        while heap:
            offer = heap[0]
            if offer[2].offer is offer:
                return offer
            heapq.heappop(heap)
        return None

    def best_but(self, names: frozenset[str]) -> Offer[S] | None:
        """The best offer from a replica that is not one of these."""
        passed_over = []
        while (best := self.best()) and best[2].name in names:
            passed_over.append(heapq.heappop(self._heap))
        for offer in passed_over:
            heapq.heappush(self._heap, offer)
        return best

    def update(self, replica: Replica[S]) -> None:
        """The replica's price, rank or capacity has changed."""
        busy = replica.busy
        if busy >= replica.capacity:
            replica.offer = None
            return
        heap, old = self._heap, replica.offer
        replica.offer = offer = (busy + replica.health.price, replica.rank, replica)
        if heap and heap[0] is old:
            heapq.heapreplace(heap, offer)
            return
        heapq.heappush(heap, offer)
        if len(heap) > self._most:
            self._heap = [one for one in heap if one[2].offer is one]
            heapq.heapify(self._heap)
            self._most = 64 + 4 * len(self._heap)

    def validate(self, replicas: Iterable[Replica[S]]) -> None:
        """Assert that every replica that could take a request has an offer here, and that the offer is current."""
        here = {id(offer) for offer in self._heap}
        assert len(here) <= self._most
        for replica in replicas:
            assert (replica.offer is not None) == (replica.busy < replica.capacity)
            if replica.offer is not None:
                assert id(replica.offer) in here
                assert replica.offer == (replica.busy + replica.health.price, replica.rank, replica)


class Request(Generic[S]):
    """A request for one turn, until served or given up. `affinity`: the replica of the trajectory's last turn."""

    replica: Replica[S] | None = None
    """The replica that has it, or had it last."""
    failed_on: frozenset[str] = frozenset()
    """The names of the replicas that failed it."""
    failures: int = 0
    earliest: float = 0.0
    """The time from which it may go to a replica that is not healthy."""
    probe: bool = False
    """Its replica was not healthy when it was given the request."""
    passed_over: int = 0
    """How often a request behind it in the queue was preferred."""

    def __init__(self, affinity: str | None = None) -> None:
        self.affinity = affinity


def offer_with_prefix(request: Request[S], replicas: Mapping[str, Replica[S]]) -> Offer[S] | None:
    """The offer of the replica that has the request's prefix; None if it has no room, or there is none."""
    replica = None if request.affinity is None else replicas.get(request.affinity)
    return None if replica is None else replica.offer


def next_in_line(line: Iterable[Request[S]], replicas: Mapping[str, Replica[S]]) -> Request[S]:
    """The first of LOOK_AHEAD queued requests whose prefix is with a replica that has room, or simply the first.

    Where all replicas are full, the one that gets room next is seldom the one with the first request's prefix.
    """
    first, *others = itertools.islice(line, LOOK_AHEAD)
    if first.passed_over < LOOK_AHEAD and offer_with_prefix(first, replicas) is None:
        for request in others:
            if offer_with_prefix(request, replicas) is not None:
                first.passed_over += 1
                return request
    return first
