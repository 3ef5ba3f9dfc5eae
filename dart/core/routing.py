"""Which replica serves the next generate call: capacity first, then prefix-cache affinity, then the newest version.

`Router` owns the replicas' load. Replicas number in the tens, so a choice is one pass over them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Replica:
    id: str
    slots: int
    version: int
    serving: bool = True
    busy: int = 0

    @property
    def has_capacity(self) -> bool:
        return self.serving and self.busy < self.slots


class Router:
    AFFINITY_SLACK = 2
    """Requests by which the replica that holds a trajectory's prefix may be busier than the least busy one."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}

    def pick(self, affinity: str | None = None) -> Replica | None:
        """The replica for the next call, or None when no replica has capacity. `affinity`: who served the last turn."""
        free = [replica for replica in self.replicas.values() if replica.has_capacity]
        if not free:
            return None
        least = min(free, key=lambda r: (r.busy, -r.version))
        preferred = self.replicas.get(affinity) if affinity else None
        if preferred and preferred.has_capacity and preferred.busy <= least.busy + self.AFFINITY_SLACK:
            return preferred
        return least
