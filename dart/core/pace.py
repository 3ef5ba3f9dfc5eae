"""How fast environments go: answers, and how long the recent steps took. Pure; times are seconds."""

from __future__ import annotations

from collections import deque


class Pace:
    """A step goes from one answer of an episode to the next, so the policy's turn is in it."""

    def __init__(self, window: int = 64) -> None:
        self.answers = 0
        """Resets and actions that were answered so far."""
        self._recent: deque[float] = deque(maxlen=window)

    def answered(self, seconds: float) -> None:
        self.answers += 1
        self._recent.append(seconds)

    @property
    def slowest(self) -> float:
        """Seconds; 0 before any."""
        return max(self._recent, default=0.0)

    @property
    def mean(self) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else 0.0
