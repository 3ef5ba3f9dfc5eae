"""How long something will take, from how fast it has come so far."""

from __future__ import annotations

from collections import deque

from dart.core.status import Status

LEAST_SECONDS = 2.0
"""Until then it is not known how fast it goes."""
WINDOW_SECONDS = 600.0
"""How far back the pace is taken from: a run's pace changes."""
APART_SECONDS = 1.0


class Pace:
    """Seconds left of a run's phase, judged by the statuses that were seen one after another."""

    def __init__(self) -> None:
        self._phase = ""
        self._seen: deque[tuple[float, float]] = deque()
        """(when, share done), oldest first."""

    def left(self, status: Status, now: float) -> float | None:
        """`now`: seconds, of any clock that only goes forward. None while it is not known."""
        share = status.share_done
        if status.phase != self._phase or (self._seen and share < self._seen[-1][1]):
            self._phase = status.phase
            self._seen.clear()
        if not self._seen or now - self._seen[-1][0] >= APART_SECONDS:
            self._seen.append((now, share))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()
        began, first = self._seen[0]
        if now - began < LEAST_SECONDS or share <= first or share >= 1.0:
            return None
        return (1.0 - share) * (now - began) / (share - first)
