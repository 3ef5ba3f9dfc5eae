"""What every contender of `benchmarks.transport` shares: sizes, data that costs next to nothing, and the clock.

Needs only the standard library, so that it runs in the project's environment and in the peers'.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

STEPS = 30
"""Steps per trajectory."""
SCREENSHOT_BYTES = 300_000
SMALL_BYTES = 64
ENVIRONMENTS = 32
"""Environments that step at the same time."""
AHEAD = 8
"""Whole trajectories in flight at once."""
LEAST = 3
"""The fewest ends that make a measurement."""
MARK = "transport:"
"""The prefix of standard output lines meant for `benchmarks.transport`."""


class Screenshots:
    """Random bytes, eight of which are new each time, for the price of copying them."""

    def __init__(self, size: int = SCREENSHOT_BYTES) -> None:
        self._rest = os.urandom(size - 8)
        self._number = 0

    def next(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(8, "little") + self._rest


def trajectories() -> list[list[bytes]]:
    """The `AHEAD` trajectories that are in flight at once, all different; they are made before the clock starts."""
    screenshots = Screenshots()
    return [[screenshots.next() for _ in range(STEPS)] for _ in range(AHEAD)]


def touch(data: Any) -> int:
    """Read a byte of every page of memory, to make sure that the data has really arrived."""
    return sum(memoryview(data)[::4096])


class Tally:
    """Counts what ends within the measurement. It begins with the first end after the warm-up, which is not counted,
    and ends with the last one before the deadline, so that what is counted fills it exactly. If too little has ended
    by then, it continues, up to twice as long."""

    def __init__(self, warm: float, seconds: float) -> None:
        self._warm_until = time.perf_counter() + warm
        self._deadline = self._warm_until + seconds
        self._last_deadline = self._deadline + seconds
        self._began: float | None = None
        self._ended = 0.0
        self._closed = False
        self._counted = 0
        self._waits: list[float] = []
        self.steps = 0
        self.trajectories = 0

    @property
    def over(self) -> bool:
        now = time.perf_counter()
        if not self._closed and now >= (self._deadline if self._counted >= LEAST else self._last_deadline):
            self._closed = True
            tell(state="measured")
        return self._closed

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._deadline - time.perf_counter())

    def ended(self, began: float | None = None, steps: int = 0, trajectories: int = 0) -> None:
        """Count what has ended now; `began` (from `time.perf_counter`): when the timed part began."""
        now = time.perf_counter()
        if self.over or now < self._warm_until:
            return
        if self._began is None:
            self._began = self._ended = now
            tell(state="measuring")
            return
        self._ended = now
        self._counted += 1
        self.steps += steps
        self.trajectories += trajectories
        if began is not None:
            self._waits.append(now - began)

    def report(self, **more: Any) -> None:
        """Tell `benchmarks.transport`."""
        waits = sorted(self._waits)
        tell(
            state="result",
            seconds=self._ended - self._began if self._began is not None else 0.0,
            steps=self.steps,
            trajectories=self.trajectories,
            p50_ms=_milliseconds(waits, 0.5),
            p99_ms=_milliseconds(waits, 0.99),
            **more,
        )


def _milliseconds(waits: Sequence[float], share: float) -> float | None:
    return round(1000 * waits[min(len(waits) - 1, int(share * len(waits)))], 3) if waits else None


def tell(**fields: Any) -> None:
    """Print one line for `benchmarks.transport`."""
    print(MARK + json.dumps(fields), flush=True)


class Paths:
    """Where each environment is in its trajectory. They begin out of step, or all would end together."""

    def __init__(self, environments: int = ENVIRONMENTS) -> None:
        self._done = [number * STEPS // environments for number in range(environments)]
        self._held: list[list[Any]] = [[] for _ in range(environments)]

    def step(self, environment: int, screenshot: Any) -> int:
        """Keep the screenshot until its trajectory ends; returns how many trajectories ended with it (0 or 1)."""
        self._held[environment].append(screenshot)
        self._done[environment] += 1
        if self._done[environment] < STEPS:
            return 0
        self._done[environment] = 0
        self._held[environment].clear()
        return 1


Part = Callable[[str, float, float], None]
"""(variant, seconds of warm-up, seconds) → nothing: it prints its results."""


def run(parts: dict[str, Part]) -> None:
    """The command line of a contender's module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--variant", default="")
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    parts[given.part](given.variant, given.warm, given.seconds)
