"""What a receiver keeps by digest, evicting the least recently used first.

One class serves the replica's screenshots, the coordinator's mirror of them, and what the trainer computed from
screenshots. Two instances of the same capacity that note the same digests in the same order hold the same digests.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Held(Generic[Value]):
    """Values by digest, of at most `capacity` together; without `weigh` each weighs 1, so `capacity` is their
    number."""

    def __init__(self, capacity: int, weigh: Callable[[Value], int] | None = None) -> None:
        self.capacity = capacity
        self._weigh = weigh
        self._weight = 0
        """The weight of all values together; 0 without `weigh`."""
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, digest: object) -> bool:
        """Looking does not count as use."""
        return digest in self._values

    def __iter__(self) -> Iterator[bytes]:
        """The digests, the least recently used first."""
        return iter(self._values)

    def get(self, digest: bytes) -> Value | None:
        """Looking does not count as use."""
        return self._values.get(digest)

    def note(self, digest: bytes, value: Value) -> None:
        """The screenshot was used, and keeps this value from now on; the oldest are evicted if room is short."""
        values, weigh = self._values, self._weigh
        if weigh is None:
            values[digest] = value
            values.move_to_end(digest)
            if len(values) > self.capacity:
                values.popitem(last=False)
            return
        if digest in values:
            self._weight -= weigh(values.pop(digest))
        values[digest] = value
        self._weight += weigh(value)
        while self._weight > self.capacity and values:
            _, dropped = values.popitem(last=False)
            self._weight -= weigh(dropped)

    def lacking(self, digests: Sequence[bytes]) -> set[bytes]:
        """The digests missing when each is noted in turn, at weight 1: a new one may evict one that comes later.

        Cheap unless one of them is about to be evicted.
        """
        wanted = set(digests)
        new = {digest for digest in wanted if digest not in self._values}
        spare = self.capacity - len(self._values)
        if len(new) <= spare:
            return new
        # At most as many are evicted as there are new ones, and none that is younger than all of these.
        oldest = itertools.islice(self._values, len(new) - spare + len(wanted))
        if wanted.isdisjoint(oldest) and len(wanted) <= self.capacity:
            return new
        replay: Held[bool] = Held(self.capacity)
        replay._values = OrderedDict.fromkeys(self._values, True)
        lacking = set()
        for digest in digests:
            if digest not in replay:
                lacking.add(digest)
            replay.note(digest, True)
        return lacking

    def drop(self, digest: bytes) -> None:
        """Forget one value, if it is held."""
        if digest in self._values:
            value = self._values.pop(digest)
            self._weight -= self._weigh(value) if self._weigh else 0

    def forget(self) -> None:
        self._values.clear()
        self._weight = 0
