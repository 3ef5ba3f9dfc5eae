"""Chooses the next task.

Stride scheduling (Waldspurger and Weihl, 1995): each task has a position on a line, the one furthest behind is next,
and it then advances by 1/weight. So every task recurs in proportion to its weight: with weights in [w, 1], no other
task comes more than 1/w + 1 times between two visits to one task. Equal weights give rounds in shuffled order. A
decision takes time logarithmic in the number of tasks. A task that `rests` is passed over, as if it had been visited,
unless all of them rest.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence

from dart.core.types import Task


class TaskSampler:
    """`weight(name)` in (0, 1] is read each time the task has been picked. Each visit draws a seed, with
    replacement; 0 for a task of `single`."""

    def __init__(
        self,
        suite: str,
        names: Sequence[str],
        seeds: tuple[int, int],
        rng: random.Random,
        weight: Callable[[str], float] = lambda name: 1.0,
        single: Collection[str] = (),
        rests: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`single`: the tasks with one instance alone, whose seed is 0."""
        self._single, self._rests = frozenset(single), rests
        self._suite, self._seeds, self._rng, self._weight = suite, seeds, rng, weight
        # The random number orders tasks at the same position.
        self._line = [(0.0, rng.random(), name) for name in names]
        heapq.heapify(self._line)
        self._submitted: deque[Task] = deque()

    @property
    def submitted(self) -> int:
        return len(self._submitted)

    def submit(self, task: Task) -> None:
        """Put a task ahead of all others, behind those submitted earlier."""
        self._submitted.append(task)

    def next(self) -> Task:
        if self._submitted:
            return self._submitted.popleft()
        visited = list[tuple[float, float, str]]()  # each once, so that a task that rests is taken only if all do
        while self._line:
            place, _, name = heapq.heappop(self._line)
            visited.append((place + 1 / self._weight(name), self._rng.random(), name))
            if not self._rests(name):
                break
        else:
            name = visited[0][2]
        for one in visited:
            heapq.heappush(self._line, one)
        seed = self._rng.randrange(*self._seeds)
        return Task(self._suite, name, 0 if name in self._single else seed)
