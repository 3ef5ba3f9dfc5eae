"""The groups that wait for the trainer, in the order in which an update takes them: those with the oldest tokens first.

A group of long episodes closes late, with tokens that are old already. If it waited behind all groups that closed
before it, long episodes would be the ones that grow stale, and so would the tasks that need them.

The line is bounded by the budget of trajectories (`core.curation.judging.start_budget`); updates and the staleness
bound empty it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from dart.core.curation.group import Group
from dart.core.curation.judging import Stage


class WaitingLine:
    def __init__(self) -> None:
        self._groups: list[Group] = []
        """Sorted by `_turn`."""
        self.trajectories = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group) -> None:
        group.oldest = min(trajectory.oldest_version for trajectory in group.members)
        group.stage = Stage.WAITING
        insort(self._groups, group, key=_turn)
        self.trajectories += group.size

    def take(self, trajectories: int) -> list[Group]:
        """The first groups that together have at least this many trajectories, or all groups."""
        taken: list[Group] = []
        count = 0
        while count < trajectories and len(taken) < len(self._groups):
            taken.append(self._groups[len(taken)])
            count += taken[-1].size
        self.remove(taken)
        return taken

    def remove(self, groups: Sequence[Group]) -> None:
        gone = {group.id for group in groups}
        self._groups = [group for group in self._groups if group.id not in gone]
        self.trajectories -= sum(group.size for group in groups)

    def older_than(self, version: int) -> list[Group]:
        """The groups with a token from an older weight version."""
        return [group for group in self._groups if group.oldest < version]

    def validate(self) -> None:
        """Check the order and the counter. Raises AssertionError."""
        assert self._groups == sorted(self._groups, key=_turn)
        assert self.trajectories == sum(group.size for group in self._groups)


def _turn(group: Group) -> tuple[int, int, str]:
    """Of equally old groups, the one that opened first. The batch that the trainer was lost with must not come up again
    at once, however old it is."""
    return group.losses, group.oldest, group.id
