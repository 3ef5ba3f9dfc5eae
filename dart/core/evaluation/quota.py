"""What `dart collect` tries next, to get a number of successes of each task within a number of attempts.

`Quota` gives out attempts until every task has its successes or has spent its attempts. Seeds come in order, each
`samples` times, so the same options try the same concrete tasks. It begins only as many attempts of a task as should
suffice at the task's success rate so far: a teacher that always succeeds is asked exactly as often as needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dart.core.types import Task


@dataclass(slots=True)
class Tally:
    """One task's attempts. `kept`: successes, up to the wanted number; successes beyond that are not kept.

    `given_up`: attempts that infrastructure ended again and again.
    """

    begun: int = 0
    finished: int = 0
    successes: int = 0
    kept: int = 0
    storing: int = 0
    """Successes to keep that are being stored."""
    given_up: int = 0
    why: str = ""
    """Why the last one was given up."""

    @property
    def running(self) -> int:
        return self.begun - self.finished - self.given_up

    @property
    def rate(self) -> float:
        """The success rate so far, counted as if one attempt had succeeded before the first."""
        return (self.successes + 1) / (self.finished + 1)


class Quota:
    def __init__(
        self,
        suite: str,
        names: Sequence[str],
        seeds: tuple[int, int],
        wanted: int,
        most_attempts: int,
        samples: int,
        single: Collection[str] = (),
    ) -> None:
        """`seeds`: [first, last); `wanted` successes and at most `most_attempts` attempts of each name. `single`: the
        tasks with one instance alone, which has seed 0 and every attempt."""
        self._suite, self._first, self._wanted, self._samples = suite, seeds[0], wanted, samples
        self._single = frozenset(single)
        most = min(most_attempts, (seeds[1] - seeds[0]) * samples)
        self._most = {name: most_attempts if name in self._single else most for name in names}
        self.tallies = {name: Tally() for name in names}

    @property
    def done(self) -> bool:
        """Nothing is left to begin, now or later; attempts under way may still finish."""
        return all(
            self.enough(name) or (tally.begun >= self._most[name] and not tally.running)
            for name, tally in self.tallies.items()
        )

    def next(self) -> tuple[Task, int] | None:
        """A concrete task and the number of the sample, from 1; None while enough is under way."""
        ready = [name for name in self.tallies if self._may_begin(name)]
        if not ready:
            return None
        name = min(ready, key=lambda name: self.tallies[name].begun)
        tally = self.tallies[name]
        seed, sample = divmod(tally.begun, self._samples)
        tally.begun += 1
        if name in self._single:
            return Task(self._suite, name, 0), tally.begun
        return Task(self._suite, name, self._first + seed), sample + 1

    @contextmanager
    def finishing(self, name: str, success: bool) -> Iterator[bool]:
        """Count an attempt when the block ends, and not when it raises: then the attempt still runs. Gives True when it
        is a success to keep, which the block stores."""
        tally = self.tallies[name]
        keep = success and tally.kept + tally.storing < self._wanted
        tally.storing += keep
        try:
            yield keep
        finally:
            tally.storing -= keep
        tally.finished += 1
        tally.successes += success
        tally.kept += keep

    def enough(self, name: str) -> bool:
        """Whether all successes that are wanted of the name are kept."""
        return self.tallies[name].kept >= self._wanted

    def given_up(self, name: str, why: str = "", *, task: bool = False) -> None:
        """Count an attempt that could not be brought to an end, and why. `task`: begin no more of this name."""
        tally = self.tallies[name]
        tally.given_up += 1
        tally.why = why
        if task:
            self._most[name] = 0

    def _may_begin(self, name: str) -> bool:
        tally = self.tallies[name]
        missing = self._wanted - tally.kept
        return tally.begun < self._most[name] and tally.running < math.ceil(missing / tally.rate)
