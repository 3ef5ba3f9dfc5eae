"""Which replica serves the next generate call: capacity first, then prefix-cache affinity, then the newest version.

`Router` owns the replicas' load. A choice costs the logarithm of their number.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class Replica:
    """Changed by its router alone."""

    id: str
    slots: int
    version: int
    serving: bool = True
    busy: int = 0

    @property
    def free(self) -> int:
        """Requests that it could take."""
        return self.slots - self.busy if self.serving else 0


class Router:
    AFFINITY_SLACK = 2
    """Requests by which the replica that holds a trajectory's prefix may be busier than the least busy one."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.free = 0
        """Requests that all replicas together could take."""
        self._line: list[tuple[int, int, str]] = []
        """A heap of (busy, -version, id). What is true of no replica any more is passed over when it comes up."""

    def join(self, replica: Replica) -> None:
        """Take it into the rotation, in the place of one of the same id."""
        self.leave(replica.id)
        self.replicas[replica.id] = replica
        self.free += replica.free
        self._line_up(replica)

    def leave(self, replica_id: str) -> None:
        if replica := self.replicas.pop(replica_id, None):
            self.free -= replica.free

    def take(self, affinity: str | None = None) -> Replica | None:
        """One request more for the replica of the next call; None when none has capacity.

        `affinity`: who served the last turn.
        """
        least = self._least_busy()
        if least is None:
            return None
        preferred = self.replicas.get(affinity) if affinity else None
        chosen = least
        if preferred and preferred.free > 0 and preferred.busy <= least.busy + self.AFFINITY_SLACK:
            chosen = preferred
        chosen.busy += 1
        self.free -= 1
        self._line_up(chosen)
        return chosen

    def give_back(self, replica: Replica) -> bool:
        """A request has ended. False when the replica has left meanwhile."""
        if self.replicas.get(replica.id) is not replica:
            return False
        before = replica.free
        replica.busy -= 1
        self.free += replica.free - before
        self._line_up(replica)
        return True

    def set_serving(self, replica: Replica, serving: bool) -> None:
        """Out of the rotation for a weight update, or back into it."""
        self.free -= replica.free
        replica.serving = serving
        self.free += replica.free
        self._line_up(replica)

    def set_version(self, replica: Replica, version: int) -> None:
        replica.version = version
        self._line_up(replica)

    def _least_busy(self) -> Replica | None:
        """Of those with capacity, the newest among equals."""
        while self._line:
            busy, version, replica_id = self._line[0]
            replica = self.replicas.get(replica_id)
            if replica and replica.free > 0 and (replica.busy, -replica.version) == (busy, version):
                return replica
            heapq.heappop(self._line)
        return None

    def _line_up(self, replica: Replica) -> None:
        if replica.free > 0:
            heapq.heappush(self._line, (replica.busy, -replica.version, replica.id))
        if len(self._line) > 64 + 4 * len(self.replicas):
            self._line = [(r.busy, -r.version, r.id) for r in self.replicas.values() if r.free > 0]
            heapq.heapify(self._line)
