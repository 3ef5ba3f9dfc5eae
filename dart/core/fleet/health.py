"""Whether a replica can be relied on, judged by how its requests end.

Each failure raises a replica's `price`; each success, and time, lower it a little. A replica
whose price reaches `QUARANTINE_PRICE` (three failures in a row, or more than one failure in five for a while) is
quarantined: after a rest, which is twice as long each time, one request at a time may probe it. A probe that is served
brings the replica back, one that fails sends it back into quarantine.

Only `dart.core.fleet.replicas.Replicas` changes a `Health`. Times are seconds of any origin, passed in as arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

FAILURE_PRICE = 4
"""How many requests busier one failure makes a replica look."""
QUARANTINE_PRICE = 3 * FAILURE_PRICE
FORGIVE_SECONDS = 10.0
"""One failure is forgiven after this long without another."""
FIRST_REST_SECONDS, MOST_REST_SECONDS = 1.0, 60.0
FIRST_BREAK_SECONDS, MOST_BREAK_SECONDS = 0.5, 60.0
"""How long a replica rests after a transfer of weights to it that broke; twice as long each time."""
MOST_FIRST_BREAKS, FIRST_BREAKS_SECONDS, SILENT_SECONDS = 4, 120.0, 1800.0
"""So many transfers must break, for at least so long, before any was taken, until none ever will be: longer where
neither end says that it could not transfer, because one that hangs may come back."""
REMEMBERED = 256
"""The health of this many lost replicas is remembered, in case they come back."""
RETURN_SECONDS = 300.0
"""How long a lost replica is expected back: one that ended over a transfer may need minutes to load its model again."""


class Condition(StrEnum):
    HEALTHY = "healthy"
    QUARANTINED = "quarantined"
    """It gets no requests while there are healthy replicas."""
    PROBING = "probing"
    """Its rest is over, and it gets one request at a time until one of them is served or fails."""


@dataclass(slots=True)
class Health:
    condition: Condition = Condition.HEALTHY
    price: int = 0
    """Measured in requests; see `FAILURE_PRICE`."""
    quarantines: int = 0
    """Quarantines in a row: each doubles the rest."""
    until: float = math.inf
    """When `time_passed` has something to do: the rest ends, or a failure is forgiven."""
    failures: int = 0
    """Failures since it first joined."""
    last_failure: str = ""
    """In the replica's own words."""
    breaks: int = 0
    """Transfers of weights to it that broke, one after the other."""
    broken: int = -1
    """The newest version whose transfer to it broke."""

    def served(self, probe: bool, now: float) -> bool:
        """A request was served. Returns True if that ended the quarantine.

        A request that was sent before the quarantine began proves nothing; a `probe` does.
        """
        if self.condition is Condition.HEALTHY:
            self.price = max(0, self.price - 1)
            return False
        if probe:
            # The price of one failure: a replica that fails every second request is soon quarantined again, for longer.
            self.condition, self.price, self.until = Condition.HEALTHY, FAILURE_PRICE, now + FORGIVE_SECONDS
        return probe

    def failed(self, why: str, now: float) -> None:
        self.failures += 1
        self.last_failure = why
        if self.condition is Condition.HEALTHY:
            self.price += FAILURE_PRICE
            self.until = now + FORGIVE_SECONDS
            if self.price >= QUARANTINE_PRICE:
                self._quarantine(now)
        elif self.condition is Condition.PROBING:
            self._quarantine(now)

    def broke(self, version: int) -> float:
        """The transfer of a version to it broke. Returns how long it rests before the next one, in seconds."""
        self.breaks, self.broken = self.breaks + 1, version
        return min(MOST_BREAK_SECONDS, FIRST_BREAK_SECONDS * 2.0 ** min(self.breaks - 1, 10))

    def _quarantine(self, now: float) -> None:
        self.condition = Condition.QUARANTINED
        self.quarantines += 1
        self.until = now + min(MOST_REST_SECONDS, FIRST_REST_SECONDS * 2.0 ** min(self.quarantines - 1, 10))

    def time_passed(self, now: float) -> None:
        """`until` has come: the rest is over, or one failure is forgiven."""
        if now < self.until:
            return
        self.until = math.inf
        if self.condition is Condition.QUARANTINED:
            self.condition = Condition.PROBING
        elif self.condition is Condition.HEALTHY:
            self.price = max(0, self.price - FAILURE_PRICE)
            if self.price:
                self.until = now + FORGIVE_SECONDS
            else:
                self.quarantines = 0


class FirstTransfers:
    """Transfers of weights that broke before any replica of the run had ever taken one.

    Afterwards it is an outage, which is waited out. Until then something is set up wrongly, and the run cannot learn.
    """

    def __init__(self) -> None:
        self.broken = 0
        self._since: float | None = None
        self._reported = 0
        self._reported_since: float | None = None

    def broke(self, now: float, reported: bool) -> bool:
        """`reported`: the trainer or the replica said so itself. Returns whether none will ever be taken."""
        self.broken += 1
        self._since = now if self._since is None else self._since
        if reported:
            self._reported += 1
            self._reported_since = now if self._reported_since is None else self._reported_since
            if self._reported >= MOST_FIRST_BREAKS and now - self._reported_since >= FIRST_BREAKS_SECONDS:
                return True
        return self.broken >= MOST_FIRST_BREAKS and now - self._since >= SILENT_SECONDS


class Lost:
    """The health of replicas that ended without a goodbye, by name: they may come back."""

    def __init__(self) -> None:
        self._healths: dict[str, Health] = {}
        self._until: dict[str, float] = {}
        """Until when those that may be starting again are expected back."""

    def __contains__(self, name: str) -> bool:
        return name in self._healths

    @property
    def expected(self) -> list[Health]:
        """Of those that were lost in the last RETURN_SECONDS."""
        return [self._healths[name] for name in self._until]

    def left(self, name: str, health: Health, now: float) -> None:
        self._healths[name], self._until[name] = health, now + RETURN_SECONDS
        if len(self._healths) > REMEMBERED:
            oldest = next(iter(self._healths))
            del self._healths[oldest]
            self._until.pop(oldest, None)

    def back(self, name: str, now: float) -> Health:
        """The health with which a replica joins: what it left with, or a new one."""
        self._until.pop(name, None)
        health = self._healths.pop(name, None) or Health()
        health.time_passed(now)
        return health

    @property
    def next_alarm(self) -> float:
        """When to call `time_passed`."""
        return min(self._until.values(), default=math.inf)

    def time_passed(self, now: float) -> None:
        """Those whose time is over are not expected any more. Their health stays remembered."""
        self._until = {name: until for name, until in self._until.items() if until > now}
