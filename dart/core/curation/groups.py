"""Groups: the N roll-outs of one task whose rewards are compared with each other.

`GroupBook` owns every group that is not closed yet, and decides which roll-out comes next: the unit of scheduling is
one trajectory (roll-out-wise sampling), so the book always has a next order, whatever other groups are still waiting
for. The data manager calls it; time and randomness come in as arguments.

Invariant: started = finished + running for each group, and a group closes when `planned` roll-outs have finished.
An attempt that infrastructure ended is given out again with the next attempt number, and costs the others nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dart.core.curation.planning import Plan
from dart.core.curation.sampling import TaskSampler
from dart.core.types import Task, Trajectory

MOST_ATTEMPTS, MOST_ATTEMPTS_ON_ONE = 5, 12
"""Of one roll-out, before it is given up."""


@dataclass(frozen=True, slots=True)
class Order:
    """One roll-out to run: `attempt` counts from 1 and grows when infrastructure ended the last one.

    `failed_on`: the env workers of the attempts that it ended.
    """

    trajectory_id: str
    group_id: str
    task: Task
    step_limit: int
    attempt: int = 1
    failed_on: frozenset[str] = frozenset()

    @property
    def hopeless(self) -> bool:
        """Its attempts have failed so often, and not on one bad machine alone, that the next would fail as well."""
        return self.attempt >= (MOST_ATTEMPTS_ON_ONE if len(self.failed_on) == 1 else MOST_ATTEMPTS)

    def failed(self, worker: str) -> Order:
        """Infrastructure ended this attempt on that env worker."""
        return replace(self, failed_on=self.failed_on | {worker})

    def again(self) -> Order:
        """The same roll-out, after infrastructure ended this attempt."""
        return replace(self, attempt=self.attempt + 1)


@dataclass(slots=True)
class Group:
    id: str
    task: Task
    planned: int
    step_limit: int
    why: str = ""
    """Where the plan's numbers come from."""
    started: int = 0
    given_up: int = 0
    """Roll-outs that could not be made; `planned` has them no more."""
    retry: deque[Order] = field(default_factory=deque)
    finished: list[Trajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.planned

    @property
    def has_next(self) -> bool:
        return bool(self.retry) or self.started < self.planned + self.given_up


class GroupBook:
    """The open groups and the next order. `plan(task)` is asked when a group opens."""

    def __init__(self, sampler: TaskSampler, plan: Callable[[Task], Plan], first_number: int = 1) -> None:
        self.sampler = sampler
        self._plan = plan
        self._number = first_number
        self._open: dict[str, Group] = {}
        self.open_trajectories = 0
        """Roll-outs that open groups still hold or owe."""
        self._with_next: deque[Group] = deque()

    @property
    def open_groups(self) -> int:
        return len(self._open)

    def next_would_open(self) -> bool:
        return not self._with_next

    def next(self) -> tuple[Order, Group | None]:
        """The next order, and the group if this opened one."""
        opened = None
        if not self._with_next:
            opened = self._open_group()
        group = self._with_next[0]
        if group.retry:
            order = group.retry.popleft()
        else:
            group.started += 1
            order = Order(f"{group.id}-{group.started}", group.id, group.task, group.step_limit)
        if not group.has_next:
            self._with_next.popleft()
        return order, opened

    def finished(self, trajectory: Trajectory) -> Group | None:
        """Count a finished trajectory; returns its group, taken out of the book, when that closes it."""
        group = self._open[trajectory.group_id]
        group.finished.append(trajectory)
        return self._closed(group)

    def give_up(self, order: Order) -> Group | None:
        """The roll-out cannot be made, and its group does without; returns the group when that closes it."""
        group = self._open[order.group_id]
        group.planned -= 1
        group.given_up += 1
        self.open_trajectories -= 1
        return self._closed(group)

    def _closed(self, group: Group) -> Group | None:
        if not group.complete:
            return None
        del self._open[group.id]
        self.open_trajectories -= group.planned
        return group

    def failed(self, order: Order) -> Order:
        """Infrastructure ended this attempt: the same roll-out is next in line, with a new attempt number."""
        group = self._open[order.group_id]
        again = order.again()
        if not group.has_next:
            self._with_next.appendleft(group)
        group.retry.append(again)
        return again

    def restore(self, group_id: str, task: Task, planned: int, finished: Sequence[Trajectory]) -> Group | None:
        """Take up a group that an earlier process left open: what has finished counts, the rest is given out again.

        Returns the group, not taken into the book, when nothing is left to run.
        """
        step_limit = self._plan(task).step_limit
        group = Group(group_id, task, planned, step_limit, started=planned, finished=list(finished))
        done = {trajectory.id for trajectory in finished}
        names = (f"{group_id}-{number}" for number in range(1, planned + 1))
        group.retry.extend(Order(name, group_id, task, step_limit, 2) for name in names if name not in done)
        if group.complete:
            return group
        self._enter(group)
        return None

    def _open_group(self) -> Group:
        task = self.sampler.next()
        plan = self._plan(task)
        group = Group(f"g{self._number:06d}", task, plan.rollouts, plan.step_limit, plan.why)
        self._number += 1
        self._enter(group)
        return group

    def _enter(self, group: Group) -> None:
        self._open[group.id] = group
        self.open_trajectories += group.planned
        self._with_next.append(group)
