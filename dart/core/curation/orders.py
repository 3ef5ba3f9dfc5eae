"""An order is one roll-out for an environment to run, and a failed attempt means one of three things: the same roll-out
again, a group without it, or the end of the run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dart.core.types import Task

MOST_ATTEMPTS, MOST_ATTEMPTS_ON_ONE = 5, 12
"""Attempts of one roll-out before it is given up; the second where one worker ended all of them."""

FAILURES_PER_ENVIRONMENT, LEAST_FAILURES, FAILING_SECONDS = 4, 8, 120.0
"""The run ends when attempts have failed for so long without a finished one, and so many of them: a node that is lost
fails all of its own at once, and a cloud may be away for a minute."""


@dataclass(frozen=True, slots=True)
class Order:
    """One roll-out to run: `attempt` counts from 1 and grows when infrastructure ended the last one.

    `failed_on`: the workers that ended those attempts.
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
        """That worker ended this attempt."""
        return replace(self, failed_on=self.failed_on | {worker})

    def again(self) -> Order:
        """The same roll-out, after infrastructure ended this attempt."""
        return replace(self, attempt=self.attempt + 1)


class Attempt(Enum):
    """What follows from a failed attempt."""

    AGAIN = "again"
    """The same roll-out is given out again."""
    GIVEN_UP = "given up"
    """The group does without this roll-out."""
    NOTHING_WORKS = "nothing works"
    """Everything has failed for a long time: no order would do better."""


class Failures:
    """Attempts that failed one after the other, with none that finished in between."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._since = 0.0
        self._most_environments = 0

    def environments(self, number: int) -> None:
        """So many environments are there now; what is lost later still counts as the run's size."""
        self._most_environments = max(self._most_environments, number)

    def finished(self) -> None:
        self.in_a_row = 0

    def failed(self, order: Order, now: float) -> Attempt:
        """Infrastructure ended this attempt at `now`, in seconds of any clock that does not go back."""
        if not self.in_a_row:
            self._since = now
        self.in_a_row += 1
        enough = max(LEAST_FAILURES, FAILURES_PER_ENVIRONMENT * self._most_environments)
        if self.in_a_row >= enough and now - self._since >= FAILING_SECONDS:
            return Attempt.NOTHING_WORKS
        if order.hopeless and self.in_a_row < self._most_environments + LEAST_FAILURES:
            # Others succeed meanwhile, so this one is to blame: a task whose page does not load, say.
            return Attempt.GIVEN_UP
        return Attempt.AGAIN
