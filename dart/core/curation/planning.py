"""How many roll-outs a task gets, how long they may be, and how much there is to learn from it.

The task and trajectory levels of adaptive data curation (DART, arXiv 2509.23866): dynamic roll-out number and dynamic
trajectory length. `Planner` owns the history of every task name; the data manager reports each finished roll-out to it
(never an attempt that infrastructure ended, nor a pooled copy) and asks it for a plan when a group opens. A success
that was collected beforehand says how long a task takes, not how often this policy succeeds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from dart.core.types import Trajectory


@dataclass(frozen=True, slots=True)
class NumberRule:
    """N is `maximum` up to a success rate of `threshold`, and falls to `minimum` at success rate 1."""

    maximum: int
    minimum: int
    threshold: float
    window: int
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class LengthRule:
    """At most `margin` steps more than the longest remembered success, never below `floor` nor above `cap`."""

    cap: int
    floor: int
    margin: int
    window: int | None
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    rollouts: int
    step_limit: int
    why: str
    changes: tuple[str, ...] = ()
    """What changed since the task's last plan, and why: "N 8→5: success 0.75 over the last 16"."""


def rollout_number(wins: int, results: int, rule: NumberRule) -> int:
    """N = ⌊N_min + (N_max − N_min) · (1/sr − 1) / (1/threshold − 1)⌋ for sr > threshold, else N_max.

    `wins` of the last `results` roll-outs succeeded. With the paper's N_max 8, N_min 2 and threshold 0.6 this is the
    released code's formula, ⌊9/sr − 7⌋: 0.6→8, 0.7→5, 0.8→4, 0.9→3, 1.0→2. With fewer than N_max results, N stays
    N_max.
    """
    threshold = Fraction(rule.threshold).limit_denominator(10_000)
    if not rule.enabled or results < rule.maximum or wins <= threshold * results or threshold >= 1:
        return rule.maximum
    failures_per_win = Fraction(results, wins) - 1
    span = (rule.maximum - rule.minimum) * failures_per_win / (1 / threshold - 1) if threshold else Fraction(0)
    return max(rule.minimum, math.floor(rule.minimum + span))


def step_limit(longest: int | None, rule: LengthRule) -> int:
    """A task's step limit, given the steps of its longest remembered success; None means no success yet: the cap."""
    if not rule.enabled or longest is None:
        return rule.cap
    return min(rule.cap, max(rule.floor, longest + rule.margin))


def spread(rewards: Sequence[float]) -> float:
    """4·Var(R) in [0, 1], for rewards in [0, 1]: how much roll-outs differ, which is what an advantage needs.

    For rewards of 0 and 1, of which a share p succeeds, it is 4·p·(1 − p): twice the chance that two roll-outs differ.
    """
    bounded = [max(0.0, min(reward, 1.0)) for reward in rewards]  # as they should be
    mean = fmean(bounded)
    return 4 * fmean([(reward - mean) ** 2 for reward in bounded])


class Result(NamedTuple):
    """How a roll-out ended."""

    success: bool
    reward: float


@dataclass(slots=True)
class History:
    """What is remembered about one task name, newest last."""

    results: deque[Result]
    lengths: deque[int]
    """Steps of the last successes, up to the length rule's window; without a window, only the longest."""
    last: Plan | None = field(default=None, compare=False)

    @property
    def longest(self) -> int | None:
        return max(self.lengths, default=None)


class Planner:
    def __init__(self, number: NumberRule, length: LengthRule, caps: Mapping[str, int] = MappingProxyType({})) -> None:
        """`caps`: the step limits of single tasks, by name, below the rule's own cap."""
        self.number, self.length = number, length
        self._lengths = {name: replace(length, cap=min(cap, length.cap)) for name, cap in caps.items()}
        self.histories: dict[str, History] = {}

    def record(self, trajectory: Trajectory) -> None:
        """Count a finished roll-out of this run."""
        history = self._history(trajectory.task.name)
        history.results.append(Result(trajectory.success, trajectory.reward))
        if trajectory.success:
            steps = len(trajectory.steps)
            history.lengths.append(steps if self.length.window is not None else max(steps, history.longest or 0))

    def plan(self, name: str) -> Plan:
        """N and the step limit of the task's next group."""
        history = self._history(name)
        wins, results = sum(result.success for result in history.results), len(history.results)
        rollouts = rollout_number(wins, results, self.number)
        limit = step_limit(history.longest, self._lengths.get(name, self.length))
        rate = f"success {wins / results:.2f} over the last {results}" if results else "no roll-out yet"
        longest = "no success yet" if history.longest is None else f"the longest success took {history.longest} steps"
        changes = []
        if history.last is not None and history.last.rollouts != rollouts:
            changes.append(f"N {history.last.rollouts}→{rollouts}: {rate}")
        if history.last is not None and history.last.step_limit != limit:
            changes.append(f"step limit {history.last.step_limit}→{limit}: {longest}")
        history.last = Plan(rollouts, limit, f"N {rollouts}: {rate}; step limit {limit}: {longest}", tuple(changes))
        return history.last

    def informative(self, name: str) -> float:
        """`spread` of the task's rewards over the window; 1 if too little is known."""
        history = self._history(name)
        if len(history.results) < self.number.maximum:
            return 1.0
        return spread([result.reward for result in history.results])

    def restore(
        self,
        name: str,
        results: Sequence[Result],
        lengths: Sequence[int],
        longest: int | None,
    ) -> None:
        """Restore the history from the database: results of an earlier process's roll-outs, and the steps of their
        successes and of collected ones. The rules may have changed since."""
        history = self._history(name)
        history.results.extend(results)
        if self.length.window is not None:
            history.lengths.extend(lengths)
        elif longest is not None:
            history.lengths.append(longest)

    def _history(self, name: str) -> History:
        if name not in self.histories:
            self.histories[name] = History(deque(maxlen=self.number.window), deque(maxlen=self.length.window or 1))
        return self.histories[name]
