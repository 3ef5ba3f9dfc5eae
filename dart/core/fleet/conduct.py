"""How each worker behaves: a worker that keeps breaking rules is quarantined, and comes back after good probes.

`Conduct` counts the rules that each worker broke. It keeps them by role and name, which outlive the process: workers of
two roles may have the same name. A broken rule is a strike; strikes are forgiven one by one as time passes. A worker
with `STRIKES` of them is quarantined: it gets no work, and each quarantine lasts twice as long as the one before. Then
it is on probation: one piece of work at a time, until `PROBES` of them have ended well; a strike before that starts
the next quarantine. A replica or a trainer, which gets its work in another way, proves itself by the answers that it
gives anyway (`answered_well`).

Decisions are plain values and time (seconds, any origin) is an argument. Callers act on the decisions: `EnvPool` gives
no episodes to a quarantined worker's environments, and the fleet refuses a worker that sends unreadable messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

STRIKES = 3
FORGIVEN_SECONDS = 60.0
"""Strikes are forgiven at the rate of one in this time."""
FIRST_SECONDS, MOST_SECONDS = 10.0, 640.0
"""A worker's first quarantine, and the longest."""
PROBES = 4
Name: TypeAlias = tuple[int, str]
"""(role, name) of a worker."""
MOST_NAMES = 4_096
"""The most workers to remember, newest offenders first: a peer can make up any number of names."""


class Standing(StrEnum):
    GOOD = "good"
    QUARANTINED = "quarantined"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A worker gets no work for this many seconds. `strikes`: how often it has broken a rule in total."""

    seconds: float
    strikes: int
    last: str


@dataclass(slots=True)
class _Record:
    strikes: float = 0.0
    """Strikes that are not forgiven yet."""
    at: float = 0.0
    total: int = 0
    last: str = ""
    quarantines: int = 0
    """Quarantines since it was last in good standing."""
    until: float = 0.0
    probes_left: int = 0
    probing: bool = False
    """On probation, with its one permitted piece of work under way."""


class Conduct:
    """The record of every worker that ever broke a rule."""

    def __init__(self) -> None:
        self._records: OrderedDict[Name, _Record] = OrderedDict()

    def broke(self, worker: Name, what: str, now: float) -> Quarantine | None:
        """The worker broke a rule. Returns a quarantine if that was one strike too many."""
        record = self._record(worker)
        record.strikes = max(0.0, record.strikes - (now - record.at) / FORGIVEN_SECONDS) + 1
        record.at, record.last = now, what
        record.total += 1
        if now < record.until:
            return None  # the strike comes from work that it was given before the quarantine
        if record.strikes <= STRIKES - 1 and not record.probes_left:
            return None
        seconds = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(record.quarantines, 16))
        record.quarantines += 1
        record.until, record.probes_left, record.probing, record.strikes = now + seconds, PROBES, False, 0.0
        return Quarantine(seconds, record.total, what)

    def ended(self, worker: Name, *, well: bool) -> bool:
        """A piece of its work has ended. Returns True when that brings it back into good standing."""
        record = self._records.get(worker)
        if record is None or not record.probing:
            return False
        record.probing = False
        if not well:
            return False
        record.probes_left -= 1
        if record.probes_left:
            return False
        record.quarantines = 0
        return True

    @property
    def spotless(self) -> bool:
        """No worker has ever broken a rule."""
        return not self._records

    def answered_well(self, worker: Name, now: float) -> None:
        """A worker that gets its work without `may_work` has answered well: on probation, that was a probe."""
        record = self._records.get(worker)
        if record is not None and record.probes_left and now >= record.until:
            record.probing = True
            self.ended(worker, well=True)

    def may_work(self, worker: Name, now: float) -> bool:
        """Whether it may have a piece of work now; on probation, that is its probe."""
        record = self._records.get(worker)
        if record is None:
            return True
        if now < record.until or record.probing:
            return False
        record.probing = record.probes_left > 0
        return True

    def seconds_left(self, worker: Name, now: float) -> float:
        """Seconds left of its quarantine; 0 when it is not in one."""
        record = self._records.get(worker)
        return max(0.0, record.until - now) if record else 0.0

    def quarantined(self, now: float) -> Iterator[tuple[Name, float, str]]:
        """(who, seconds left, what they did) of all that are in quarantine now, newest offenders last."""
        for worker, record in self._records.items():
            if now < record.until:
                yield worker, record.until - now, self._story(record)

    def standing(self, worker: Name, now: float) -> Standing:
        record = self._records.get(worker)
        if record is None:
            return Standing.GOOD
        if now < record.until:
            return Standing.QUARANTINED
        return Standing.PROBATION if record.probes_left else Standing.GOOD

    def told(self, worker: Name, now: float) -> str:
        """For people: "quarantined for 12 s more: broke a rule 4 times, the last: …"; empty for a worker that never
        broke a rule."""
        record = self._records.get(worker)
        if record is None:
            return ""
        story = self._story(record)
        match self.standing(worker, now):
            case Standing.QUARANTINED:
                return f"quarantined for {record.until - now:.0f} s more: {story}"
            case Standing.PROBATION:
                return f"on probation: {story}"
            case _:
                return story

    @staticmethod
    def _story(record: _Record) -> str:
        times = "once" if record.total == 1 else f"{record.total} times"
        return f"broke a rule {times}, the last: {record.last}"

    def _record(self, worker: Name) -> _Record:
        record = self._records.setdefault(worker, _Record())
        self._records.move_to_end(worker)
        if len(self._records) > MOST_NAMES:
            self._records.popitem(last=False)
        return record
