"""The trainer feed: released groups in order of release, batches cut from them, samples balanced over ranks.

Bound: the start budget (`core.curation.start_budget`) limits what can wait here; the trainer empties it. A group is
either wholly in one batch or dropped as stale, never split and never given twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dart.core.types import Step, Trajectory


@dataclass(frozen=True, slots=True)
class ReleasedGroup:
    id: str
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One step to train on."""

    trajectory: Trajectory
    step: Step
    advantage: float

    @property
    def tokens(self) -> int:
        return len(self.step.generation.prompt_token_ids) + len(self.step.generation.token_ids)


class Feed:
    def __init__(self, trajectories_per_update: int, max_staleness: int) -> None:
        self._size, self._max_staleness = trajectories_per_update, max_staleness
        self._waiting: deque[tuple[int, ReleasedGroup]] = deque()
        """(weight version of the group's oldest token, group)."""
        self._oldest = math.inf
        """The least of those versions, so that nothing is gone through while nothing is stale."""
        self.waiting_trajectories = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: ReleasedGroup) -> None:
        oldest = min(trajectory.oldest_version for trajectory in group.trajectories)
        self._waiting.append((oldest, group))
        self._oldest = min(self._oldest, oldest)
        self.waiting_trajectories += len(group.trajectories)

    def drop_stale(self, trainer_version: int) -> list[ReleasedGroup]:
        """Take out the groups with a trajectory past the staleness bound."""
        bound = trainer_version - self._max_staleness
        if self._oldest >= bound:
            return []
        stale = [group for oldest, group in self._waiting if oldest < bound]
        self._waiting = deque(entry for entry in self._waiting if entry[0] >= bound)
        self._removed(stale)
        return stale

    def take(self, least: int | None = None) -> list[ReleasedGroup] | None:
        """The oldest groups that make a batch, or None while there are too few trajectories.

        `least`: a batch may be as small as this.
        """
        if self.waiting_trajectories < max(1, self._size if least is None else least):
            return None
        batch: list[ReleasedGroup] = []
        count = 0
        while self._waiting and count < self._size:
            _, group = self._waiting.popleft()
            batch.append(group)
            count += len(group.trajectories)
        self._removed(batch)
        return batch

    def _removed(self, groups: Sequence[ReleasedGroup]) -> None:
        self.waiting_trajectories -= sum(len(group.trajectories) for group in groups)
        self._oldest = min((oldest for oldest, _ in self._waiting), default=math.inf)


def samples_of(groups: Sequence[ReleasedGroup]) -> list[Sample]:
    """Every step of every trajectory: no step is left out."""
    return [
        Sample(trajectory, step, advantage)
        for group in groups
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True)
        for step in trajectory.steps
    ]


def balance(samples: Sequence[Sample], ranks: int) -> list[list[Sample]]:
    """Share samples over ranks so that tokens are even: longest first, each to the rank with the fewest so far."""
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sample in sorted(samples, key=lambda s: s.tokens, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(sample)
        loads[rank] += sample.tokens
    return shares
