"""Which replica gets the newest weights next: rolling, per worker, at most `max_unavailable` at once; or all together.

Events in, decisions out: `published`, `joined`, `left`, `updated`, `failed` change the state; `next` says which
replica to update now. A replica jumps straight to the newest version; the oldest version goes first, and one whose
transfer broke comes after those that have not had their turn since. A replica that joins with old weights serves
nothing until its first update.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _State:
    version: int
    target: int | None = None
    """The version that is being sent to it."""
    tried: int = -1
    """The newest version whose transfer broke."""


class SyncPlan:
    def __init__(self, max_unavailable: int, version: int = 0, *, together: bool = False) -> None:
        self._max_unavailable = max_unavailable
        self.together = together
        """All replicas at once, and none serves until all are updated: what rolling is compared with."""
        self._replicas: dict[str, _State] = {}
        self.version = version
        """The newest published version."""

    def published(self, version: int) -> None:
        if version <= self.version:
            raise ValueError(f"version {version} was published after {self.version}: versions only grow")
        self.version = version

    def joined(self, replica: str, version: int) -> None:
        self._replicas[replica] = _State(version)

    def left(self, replica: str) -> None:
        self._replicas.pop(replica, None)

    def updated(self, replica: str, version: int) -> None:
        if state := self._replicas.get(replica):
            state.version, state.target = version, None

    def failed(self, replica: str) -> None:
        """The transfer broke; the replica is tried again, after the others."""
        if state := self._replicas.pop(replica, None):
            state.tried, state.target = state.target or self.version, None
            self._replicas[replica] = state

    def next(self) -> tuple[str, int] | None:
        """A replica to update and the version to send, or None while nothing may start. Marks it as begun."""
        begun = sum(state.target is not None for state in self._replicas.values())
        if not self.together and begun >= self._max_unavailable:
            return None
        behind = [(max(s.version, s.tried), i, name) for i, (name, s) in enumerate(self._replicas.items())
                  if s.target is None and s.version < self.version]  # fmt: skip
        if not behind:
            return None
        _, _, replica = min(behind)
        self._replicas[replica].target = self.version
        return replica, self.version

    @property
    def versions(self) -> dict[str, int]:
        return {name: state.version for name, state in self._replicas.items()}

    @property
    def settled(self) -> bool:
        """Every replica serves the newest version."""
        return all(state.target is None and state.version == self.version for state in self._replicas.values())
