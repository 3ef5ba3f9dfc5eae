"""One group in the lifecycle machine: its roll-outs and its stage.

`core.curation.lifecycle` owns every group and is the only one that changes them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.judging import Stage
from dart.core.curation.orders import Order
from dart.core.types import Task, Trajectory


@dataclass(slots=True, eq=False)
class Group:
    """Roll-outs of one task, with rewards that are compared with each other."""

    id: str
    task: Task
    planned: int
    """Roll-outs that it will end up with: those that are given up are subtracted."""
    step_limit: int
    why: str = ""
    """Why the plan has these numbers."""
    stage: Stage = Stage.OPEN
    started: int = 0
    given_up: int = 0
    running: set[str] = field(default_factory=set)
    retry: deque[Order] = field(default_factory=deque)
    finished: list[Trajectory] = field(default_factory=list)
    unusable: str = ""
    """Why it cannot be trained on, as soon as that is known."""
    released: ReleasedGroup | None = None
    oldest: int = 0
    """The weight version of a released group's oldest token."""
    losses: int = 0
    """How often the trainer was lost while it trained on it."""

    @property
    def has_next(self) -> bool:
        return bool(self.retry) or self.started < self.planned + self.given_up

    @property
    def members(self) -> tuple[Trajectory, ...]:
        return self.released.trajectories if self.released else tuple(self.finished)

    @property
    def size(self) -> int:
        """How many trajectories it counts for in the budget."""
        return len(self.released.trajectories) if self.released else self.planned

    @property
    def wants_success(self) -> bool:
        """All of its roll-outs have finished without success: one from the pool may replace one of them.

        Not if giving up roll-outs has left it with a single one: the success would have nothing to be compared with.
        """
        return len(self.finished) > 1 and not self.unusable and not any(one.success for one in self.finished)

    def validate(self) -> None:
        """Check that the group is consistent. Raises AssertionError."""
        ended = len(self.finished) + self.given_up
        assert self.started == ended + len(self.running) + len(self.retry), self
        assert self.started <= self.planned + self.given_up, self
        assert not (self.unusable and self.has_next), self
        assert (self.stage is Stage.OPEN) == bool(self.running or self.has_next), self
        names = [one.id for one in self.finished] + [one.trajectory_id for one in self.retry] + list(self.running)
        assert len(set(names)) == len(names), f"a roll-out of {self.id} is there twice: {names}"
        assert self.stage not in (Stage.WAITING, Stage.TRAINING) or self.released, self
        assert self.stage is not Stage.WAITING or not self.unusable, self
