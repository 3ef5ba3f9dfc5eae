"""The groups that wait for the trainer, in the order in which an update takes them.

It is bounded by the budget of trajectories (`core.curation.judging.start_budget`); updates and the staleness bound
empty it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from dart.core.curation.group import Group
from dart.core.curation.judging import Stage


class WaitingLine:
    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._oldest: int | None = None
        """The least `Group.oldest` among them, so that the queue is searched only when something is stale."""
        self.trajectories = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group, *, first: bool = False) -> None:
        group.oldest = min(trajectory.oldest_version for trajectory in group.members)
        group.stage = Stage.WAITING
        if first:
            self._groups.appendleft(group)
        else:
            self._groups.append(group)
        self.trajectories += group.size
        self._oldest = group.oldest if self._oldest is None else min(self._oldest, group.oldest)

    def take(self, trajectories: int) -> list[Group]:
        """The first groups that together have at least this many trajectories, or all groups."""
        taken: list[Group] = []
        count = 0
        while self._groups and count < trajectories:
            taken.append(self._groups.popleft())
            count += taken[-1].size
        self._left(taken)
        return taken

    def remove(self, groups: Sequence[Group]) -> None:
        gone = {group.id for group in groups}
        self._groups = deque(group for group in self._groups if group.id not in gone)
        self._left(groups)

    def older_than(self, version: int) -> list[Group]:
        """The groups with a token from an older weight version."""
        if self._oldest is None or self._oldest >= version:
            return []
        return [group for group in self._groups if group.oldest < version]

    def _left(self, groups: Iterable[Group]) -> None:
        self.trajectories -= sum(group.size for group in groups)
        self._oldest = min((group.oldest for group in self._groups), default=None)

    def validate(self) -> None:
        """Check the counters. Raises AssertionError."""
        assert self.trajectories == sum(group.size for group in self._groups)
        assert self._oldest == min((group.oldest for group in self._groups), default=None)
