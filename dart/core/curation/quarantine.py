"""Tasks whose set-up keeps failing while other tasks work: they get no new group for a while.

A task may be broken alone: a page that no longer loads, a file that is gone. Each of its groups would then cost every
roll-out's attempts. `SET_UPS` failed set-ups in a row quarantine it, or `CERTAIN` of which the world says that the task
itself is wrong; a task that comes back is quarantined again by one more, for twice as long. An attempt that finishes
clears its task. While nothing else finishes, an outage is to blame, and no task is. Pure; times are seconds of any
clock that does not go back.
"""

from __future__ import annotations

from dataclasses import dataclass

SET_UPS, CERTAIN = 10, 2
FIRST_SECONDS, MOST_SECONDS = 300.0, 4800.0


@dataclass(slots=True)
class _Record:
    failures: int = 0
    """Failed set-ups in a row."""
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
    """The set-ups of every task that failed since one of its attempts finished."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._finished = 0

    def finished(self, name: str) -> None:
        """An attempt at the task has finished."""
        self._finished += 1
        self._records.pop(name, None)

    def failed(self, name: str, why: str, now: float, *, certain: bool = False) -> float:
        """A set-up failed. Returns for how many seconds the task is quarantined because of it; 0 if it is not."""
        record = self._records.setdefault(name, _Record(others=self._finished))
        record.failures, record.certain, record.why = record.failures + 1, record.certain + certain, why
        enough = bool(record.quarantines) or record.failures >= SET_UPS or record.certain >= CERTAIN
        if not enough or self._finished == record.others or now < record.until:
            return 0.0
        seconds = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(record.quarantines, 16))
        record.quarantines, record.others, record.until = record.quarantines + 1, self._finished, now + seconds
        return seconds

    def rests(self, name: str, now: float) -> bool:
        """Whether the task is in quarantine."""
        record = self._records.get(name)
        return record is not None and now < record.until

    def resting(self, now: float) -> list[Resting]:
        """The tasks in quarantine, by name."""
        return [
            Resting(name, record.until - now, record.why)
            for name, record in sorted(self._records.items())
            if now < record.until
        ]
