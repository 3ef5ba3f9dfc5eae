"""How fast environments are: answers so far, and how long recent steps took. Pure; times are seconds."""

from __future__ import annotations

from collections import deque

RECENT = 64
"""The steps that count as recent."""


class Pace:
    """A step lasts from one answer of an episode to the next, so it includes the policy's turn."""

    def __init__(self) -> None:
        self.answers = 0
        """Resets and actions answered so far."""
        self._recent: deque[float] = deque(maxlen=RECENT)

    def answered(self, seconds: float) -> None:
        self.answers += 1
        self._recent.append(seconds)

    @property
    def slowest(self) -> float:
        """Seconds; 0 before the first step."""
        return max(self._recent, default=0.0)

    @property
    def mean(self) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else 0.0
