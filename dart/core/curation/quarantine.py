"""Tasks that keep failing while other tasks work: they get no new group for a while.

A task may be broken alone: a page that no longer loads, a file that is gone, a verdict that cannot be reached. Each of
its groups would then cost every roll-out's attempts, and in a small fleet such groups may in the end hold all
environments. `FAILURES` attempts in a row that environments of several env workers ended quarantine it, for on one
worker attempts may fail whatever the task is; where there is only one, twice as many; or `CERTAIN` of which the world
says that the task itself is wrong. A task that comes back is quarantined again by one more, for twice as long. An
attempt that finishes clears its task. While nothing else finishes, an outage is to blame, and no task is. Pure; times
are seconds of any clock that does not go back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FAILURES, CERTAIN = 10, 2
FIRST_SECONDS, MOST_SECONDS = 300.0, 4800.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    """In a row."""
    workers: set[str] = field(default_factory=set)
    """On which env workers, at least."""
    certain: int = 0
    others: int = 0
    """How many attempts at any task had finished at the first of them."""
    quarantines: int = 0
    """In a row."""
    until: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Resting:
    """A task in quarantine. `why`: its last failure."""

    name: str
    seconds_left: float
    why: str


class TaskQuarantine:
    """The attempts of every task that failed since one finished."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._finished = 0

    def finished(self, name: str) -> None:
        """An attempt at the task has finished."""
        self._finished += 1
        self._records.pop(name, None)

    def failed(self, name: str, why: str, now: float, *, worker: str, several: bool, certain: bool = False) -> float:
        """An attempt failed in an environment of this env worker; `several`: whether the run has more than one.

        Returns for how many seconds the task is quarantined because of it; 0 if it is not.
        """
        record = self._records.setdefault(name, _Record(others=self._finished))
        record.failures, record.certain, record.why = record.failures + 1, record.certain + certain, why
        if len(record.workers) < 2:
            record.workers.add(worker)
        in_a_row = len(record.workers) > 1 if several else record.failures >= 2 * FAILURES
        enough = record.quarantines or record.certain >= CERTAIN or (record.failures >= FAILURES and in_a_row)
        if not enough or self._finished == record.others or now < record.until:
            return 0.0
        seconds = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(record.quarantines, 16))
        record.quarantines, record.others, record.until = record.quarantines + 1, self._finished, now + seconds
        return seconds

    def rests(self, name: str, now: float) -> bool:
        """Whether the task is in quarantine."""
        record = self._records.get(name)
        return record is not None and now < record.until

    def doubted(self, name: str) -> bool:
        """Whether the task has been in quarantine, and no attempt at it has finished since."""
        record = self._records.get(name)
        return record is not None and record.quarantines > 0

    def resting(self, now: float) -> list[Resting]:
        """The tasks in quarantine, by name."""
        return [
            Resting(name, record.until - now, record.why)
            for name, record in sorted(self._records.items())
            if now < record.until
        ]
