"""Wall time to a fixed success, coupled and decoupled: `python -m benchmarks.learning.wallclock`.

Runs protocols/wallclock.yaml: training on the ladder with the coupled baseline's schedule (batch-wise sampling,
synchronous training, all replicas updated at once) and with the decoupled one, each without and with adaptive data
curation. Chromium, vLLM, trainer and weight sync are real; one thing is artificial: environments sleep after each reset
and action, 2 to 4 and 0.5 to 2 seconds, because a page answers in milliseconds and a desktop does not.

The result is the time of training until success in training reaches a level that the protocol fixed, with the number of
updates that it took; a run ends once it has reached all levels, and those that never do are censored after 30 minutes
of training (or what the protocol says), and shown so. Twelve runs, one at a time: at most six and a half hours on two
cores. It can be stopped at any moment, but a run that was interrupted shows a little more time than one that was not,
and the report names it. --protocol wallclock_batches: with curation in all arms and optimiser steps of one size, where
the coupled batch fills all environments, and where it fills half of them. --report makes the table and the picture of
what is there. Writes results/learning/PROTOCOL.json and PROTOCOL.png.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import NamedTuple

from pydantic import Field, model_validator

from benchmarks.trials import pages
from benchmarks.trials.command import Experiment, main
from benchmarks.trials.findings import Runs
from benchmarks.trials.inference import estimate
from benchmarks.trials.protocol import FOLDER, Protocol, Section
from benchmarks.trials.records import Episode, Point, Progress, Record, episodes_of
from dart.core.json_text import JSON


class Target(Section):
    """Success in training on these levels: the mean over their tasks of that of `smoothing` roll-outs of each.

    `sustained`: the next `smoothing` roll-outs of each are to have it as well. Success that is there once may be luck,
    and goes away again: a schedule that is looked at more often would be lucky sooner.
    """

    levels: tuple[str, ...] = Field(min_length=1)
    success: float = Field(gt=0, lt=1)
    smoothing: int = Field(gt=0)
    sustained: bool = False

    @property
    def name(self) -> str:
        return f"{' and '.join(self.levels)} at {self.success:.0%}"


class WallclockProtocol(Protocol):
    targets: tuple[Target, ...] = Field(min_length=1)
    pairs: tuple[tuple[str, str], ...] = Field(min_length=1)
    """(faster, slower), as expected."""

    @model_validator(mode="after")
    def _arms_of_pairs(self) -> WallclockProtocol:
        if unknown := {arm for pair in self.pairs for arm in pair} - self.arms.keys():
            raise ValueError(f"pairs: {', '.join(sorted(unknown))} is no arm: they are {', '.join(self.arms)}")
        if unknown := {level for target in self.targets for level in target.levels} - self.levels.keys():
            raise ValueError(f"targets: {', '.join(sorted(unknown))} is no level: they are {', '.join(self.levels)}")
        return self


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long the slower arm took: the geometric mean over the seeds that both have.

    `at_least`: some run of the slower arm never got there, so the ratio is a lower bound, and has no interval: the t
    interval takes every time as observed. `ratio` is None if a run of the faster arm never did.
    """

    target: str
    faster: str
    slower: str
    seeds: int
    ratio: float | None
    low: float | None = None
    high: float | None = None
    at_least: bool = False


class Arrival(NamedTuple):
    """When a run reached a target: seconds of training, and updates."""

    seconds: float
    updates: float


def arrival(run: Progress, target: Target, protocol: Protocol) -> Arrival | None:
    """The first moment at which success on the target's tasks is at its level, and if `sustained` also in the roll-outs
    after it; None if there is none.

    Success is a moving average, and belongs to the middle of what it is taken over: its end would be later the slower a
    schedule samples. It begins with a full window of each task. Successes are shorter than failures, so that of the
    roll-outs that begin together they finish first, and fewer would show more success than there is.
    """
    for window, holds in _passing(run, target, protocol):
        if holds:
            return Arrival(fmean(one.seconds for one in window), fmean(one.update for one in window))
    return None


def _passing(run: Progress, target: Target, protocol: Protocol) -> Iterator[tuple[list[Episode], bool | None]]:
    """The full windows at the level, and whether it is sustained after each; None where too little came after it."""
    tasks = _count(run, target, protocol)
    episodes = episodes_of(run, target.levels, protocol)
    for place, window in enumerate(_windows(run, target, protocol), 1):
        if len(window) == tasks * target.smoothing and fmean(one.success for one in window) >= target.success:
            yield window, not target.sustained or _sustained(episodes[place:], tasks, target)


def _sustained(after: Sequence[Episode], tasks: int, target: Target) -> bool | None:
    """Whether the first `smoothing` roll-outs of each task are at the level, too; None if there are fewer."""
    first: dict[int, list[int]] = {}
    for one in after:
        if len(of := first.setdefault(one.task, [])) < target.smoothing:
            of.append(one.success)
    outcomes = [success for of in first.values() for success in of]
    return None if len(outcomes) < tasks * target.smoothing else fmean(outcomes) >= target.success


def _count(run: Progress, target: Target, protocol: Protocol) -> int:
    """Of the target's tasks."""
    return sum(len(protocol.tasks_of(level, tuple(run["tasks"]))) for level in target.levels)


def _windows(run: Progress, target: Target, protocol: Protocol) -> Iterator[list[Episode]]:
    """The newest `smoothing` roll-outs of each of the target's tasks, or all that there are, whenever one finished."""
    recent: dict[int, deque[Episode]] = {}
    for episode in episodes_of(run, target.levels, protocol):
        recent.setdefault(episode.task, deque(maxlen=target.smoothing)).append(episode)
        yield [one for last in recent.values() for one in last]


def has_arrived(run: Progress, protocol: WallclockProtocol) -> bool:
    """Whether the run has reached every target: what it would do after that is not measured."""
    return all(arrival(run, target, protocol) is not None for target in protocol.targets)


def time_to(run: Record, target: Target, protocol: Protocol) -> float | None:
    """Seconds of training until the target; None if it is never reached."""
    found = arrival(run, target, protocol)
    return None if found is None else found.seconds


def not_before(run: Record, target: Target, protocol: Protocol) -> float:
    """Seconds of training before which a run that did not reach the target had not reached it.

    The middle of its last window, because an arrival is the middle of one; what that lacks would have finished after
    the run's end. Where success has to be sustained, of the first at the level after which too little came to tell.
    """
    for window, holds in _passing(run, target, protocol):
        if holds is None:
            return fmean(one.seconds for one in window)
    last = next(iter(deque(_windows(run, target, protocol), maxlen=1)), [])
    lacking = _count(run, target, protocol) * target.smoothing - len(last)
    return fmean([*(one.seconds for one in last), *[run["train_seconds"]] * lacking])


def ratio(runs: Runs, pair: tuple[str, str], target: Target, protocol: Protocol) -> Ratio | None:
    """None if no seed has both."""
    faster, slower = (runs.get(arm, {}) for arm in pair)
    seeds = sorted(faster.keys() & slower.keys())
    if not seeds:
        return None
    quick = [time_to(faster[seed], target, protocol) for seed in seeds]
    slow = [time_to(slower[seed], target, protocol) for seed in seeds]
    ends = [not_before(slower[seed], target, protocol) for seed in seeds]
    reached = [one for one in quick if one is not None]
    if len(reached) < len(seeds):
        return Ratio(target.name, *pair, len(seeds), None)
    waited = [end if time is None else time for time, end in zip(slow, ends, strict=True)]
    found = estimate([math.log(late / early) for early, late in zip(reached, waited, strict=True)])
    if None in slow:
        return Ratio(target.name, *pair, len(seeds), math.exp(found.mean), at_least=True)
    low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
    return Ratio(target.name, *pair, len(seeds), math.exp(found.mean), low, high)


def times(runs: Runs, protocol: WallclockProtocol) -> dict[str, JSON]:
    """Each run's seconds and updates to each target, None where it is censored, and the ratios of the pairs."""
    ratios = [ratio(runs, pair, target, protocol) for target in protocol.targets for pair in protocol.pairs]
    found = {
        target.name: {
            arm: {str(seed): arrival(run, target, protocol) for seed, run in of.items()} for arm, of in runs.items()
        }
        for target in protocol.targets
    }
    return {
        "seconds": _each(found, lambda one: one.seconds),
        "updates": _each(found, lambda one: one.updates),
        "ratios": [asdict(one) for one in ratios if one is not None],
    }


def _each(
    found: Mapping[str, Mapping[str, Mapping[str, Arrival | None]]], of: Callable[[Arrival], float]
) -> dict[str, JSON]:
    return {
        target: {arm: {seed: one and of(one) for seed, one in by_seed.items()} for arm, by_seed in arms.items()}
        for target, arms in found.items()
    }


def by_minutes(point: Point) -> float:
    return point.seconds / 60


EXPERIMENT = Experiment(
    FOLDER / "wallclock.yaml",
    WallclockProtocol,
    __doc__,
    by_minutes,
    "minutes of training",
    measure=times,
    tables=(pages.times, pages.arms),
    over=has_arrived,
)

if __name__ == "__main__":
    main(EXPERIMENT)
