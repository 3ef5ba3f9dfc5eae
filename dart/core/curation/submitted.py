"""Which tasks a person or another program may put at the head of the queue.

Only tasks that this run could have drawn itself: of its suite, of one of its names, and never a held-out seed, which
would be trained on and then be evaluated with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dart.core.types import Task

MOST_PENDING = 10_000
"""Submitted tasks that wait to be opened."""
MOST_SEED = 2**63 - 1
"""What the database holds as a whole number."""


class NotWanted(Exception):
    """A task that is not taken. The message names the field, its value and what to write instead."""


@dataclass(frozen=True, slots=True)
class Submissions:
    """`names`: the tasks that this run trains on. `held_out`: [first, last) of the seeds that it is evaluated with.
    `single`: the tasks with one instance alone, whose seed is 0."""

    suite: str
    names: Collection[str]
    held_out: tuple[int, int]
    single: Collection[str] = ()

    def check(self, tasks: Sequence[Task], pending: int) -> None:
        """All of them may be submitted, beside the `pending` ones. Raises NotWanted."""
        if pending + len(tasks) > MOST_PENDING:
            raise NotWanted(
                f"tasks: {len(tasks):,} beside {pending:,} that still wait are more than {MOST_PENDING:,}: "
                "submit the rest when some have been sampled"
            )
        for number, task in enumerate(tasks):
            if why := self.why_not(task):
                raise NotWanted(f"tasks[{number}].{why}")

    def why_not(self, task: Task) -> str:
        """Why this run does not take the task; empty if it does."""
        first, last = self.held_out
        if task.suite != self.suite:
            return f"suite {task.suite!r} is not this run's: write {self.suite}"
        if task.name not in self.names:
            return f"name {task.name!r} is not trained on in this run: choose one that environment.tasks trains on"
        if task.name in self.single and task.seed:
            return f"seed {task.seed}: {task.name} has one instance alone: choose seed 0"
        if not 0 <= task.seed <= MOST_SEED:
            return f"seed {task.seed} is out of range: choose one from 0 to {MOST_SEED}"
        if first <= task.seed < last:
            return (
                f"seed {task.seed} is held out for evaluation (environment.tasks.eval_seeds [{first}, {last})): "
                "choose a seed outside of them"
            )
        return ""
