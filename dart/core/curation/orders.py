"""Orders: an order is one roll-out for an environment to run. After a failed attempt the roll-out is given out again,
or its group does without it, or, in a run where nothing has ever worked, the run ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dart.core.types import Task

MOST_ATTEMPTS, MOST_ATTEMPTS_ON_ONE = 5, 12
"""Attempts of one roll-out before it is given up; the second limit holds when one worker ended all of them."""

FAILURES_PER_ENVIRONMENT, LEAST_FAILURES, FAILING_SECONDS = 4, 8, 120.0
"""The run ends when, from its beginning, attempts have failed for this long, and this many of them, and none finished.
Both are needed: a lost node fails all its attempts at once, and a cloud may be unreachable for a minute."""

OUTAGE_SECONDS = 600.0
"""A task that has never worked is given up when all attempts have failed for this long."""


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
    excused: int = 0
    """Attempts that are not held against the roll-out: all up to the last that an outage ended."""

    @property
    def hopeless(self) -> bool:
        """Whether to give up: after MOST_ATTEMPTS on several workers, or MOST_ATTEMPTS_ON_ONE on one."""
        return self.attempt - self.excused >= (MOST_ATTEMPTS_ON_ONE if len(self.failed_on) == 1 else MOST_ATTEMPTS)

    def failed(self, worker: str) -> Order:
        """Record the worker that ended this attempt."""
        return replace(self, failed_on=self.failed_on | {worker})

    def again(self, *, outage: bool = False) -> Order:
        """The order for the same roll-out, after infrastructure ended this attempt. `outage`: as it ended all others;
        the roll-out is not to blame for that."""
        if outage:
            return replace(self, attempt=self.attempt + 1, excused=self.attempt, failed_on=frozenset())
        return replace(self, attempt=self.attempt + 1)


class Attempt(Enum):
    """What to do after a failed attempt."""

    AGAIN = "again"
    """The same roll-out is given out again."""
    GIVEN_UP = "given up"
    """The group continues without this roll-out."""
    NOTHING_WORKS = "nothing works"
    """Nothing has worked since the run began, so the next order would fail, too: something is set up wrongly."""


class Failures:
    """Attempts of a run that failed in a row, with none finished in between, whatever they were for.

    In a run that has worked, here or before it was resumed, all of them failing is an outage. It is waited out, because
    it ends sooner than somebody comes to resume the run; `core.watchdog` reports it, and ends the run if it is
    configured to.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._worked: set[str] = set()
        """Names of the tasks of which an attempt has finished, here or before the run was resumed."""
        self._since = 0.0
        self._most_environments = 0

    @property
    def outage(self) -> bool:
        """So many attempts have failed in a row that no roll-out is to blame, nor a lost machine."""
        return self.in_a_row >= self._most_environments + LEAST_FAILURES

    def environments(self, number: int) -> None:
        """Note how many environments there are now; the run's size is the most there have been."""
        self._most_environments = max(self._most_environments, number)

    @property
    def ever_worked(self) -> bool:
        """An attempt at some task has finished."""
        return bool(self._worked)

    def finished(self, task: str) -> None:
        """An attempt at the task of this name has finished."""
        self.in_a_row = 0
        self._worked.add(task)

    def failed(self, order: Order, now: float, certain: bool = False) -> Attempt:
        """Infrastructure ended this attempt at `now`, in seconds of any clock that does not go back. `certain`: the
        task itself is wrong, so another attempt would fail as well."""
        if not self.in_a_row:
            self._since = now
        self.in_a_row += 1
        enough = max(LEAST_FAILURES, FAILURES_PER_ENVIRONMENT * self._most_environments)
        if not self._worked and self.in_a_row >= enough and now - self._since >= FAILING_SECONDS:
            return Attempt.NOTHING_WORKS
        if certain or (order.hopeless and not self.outage):
            # Others succeed meanwhile, so this roll-out is to blame: a task with a page that does not load, say.
            return Attempt.GIVEN_UP
        return Attempt.AGAIN

    def again(self, order: Order, now: float) -> Order | Attempt:
        """As `failed`, for a source whose roll-outs are few: the order to give out again, or why there is none.

        An outage is waited out for tasks that have worked. One that never has may itself be broken, and in the end
        such tasks may be all that is left: nothing would tell them from an outage. They wait for `OUTAGE_SECONDS`.
        """
        attempt, worked = self.failed(order, now), order.task.name in self._worked
        waits = worked or (self.ever_worked and now - self._since < OUTAGE_SECONDS)
        if attempt is Attempt.AGAIN and order.hopeless and not (self.outage and waits):
            return Attempt.GIVEN_UP
        return order.again(outage=self.outage and waits) if attempt is Attempt.AGAIN else attempt
