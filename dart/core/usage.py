"""Where the time of many slots went: an integral of "busy" over time, kept as events come in."""

from __future__ import annotations


class BusyClock:
    """Slot-seconds offered and used. Time (seconds, any origin, never backwards) is an argument.

    utilisation = busy slot-seconds / offered slot-seconds since `restart`; 0 before any slot was offered.
    """

    def __init__(self, now: float) -> None:
        self._slots = 0
        self._busy = 0
        self.restart(now)

    def restart(self, now: float) -> None:
        self._at = now
        self._offered_seconds = 0.0
        self._busy_seconds = 0.0

    def offer(self, now: float, slots: int) -> None:
        """`slots` more are there (negative: fewer)."""
        self._advance(now)
        self._slots += slots

    def use(self, now: float, slots: int) -> None:
        """`slots` more are busy (negative: fewer)."""
        self._advance(now)
        self._busy += slots

    def utilisation(self, now: float) -> float:
        self._advance(now)
        return self._busy_seconds / self._offered_seconds if self._offered_seconds > 0 else 0.0

    def _advance(self, now: float) -> None:
        elapsed = now - self._at
        self._at = now
        self._offered_seconds += elapsed * self._slots
        self._busy_seconds += elapsed * self._busy
