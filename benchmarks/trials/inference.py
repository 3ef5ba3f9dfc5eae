"""What a few runs can say: t-intervals over runs, paired comparisons, Holm's correction, smallest detectable effects.

A run is one observation, whatever the number of episodes that its success is taken over: episodes of one policy do not
tell how other runs of the same setting would have ended. Intervals are 95 % intervals of Student's t. Paired by seed:
two paired runs share only the order of their tasks, and only until the first restart. After a `--resume` the order is
another, and depends on how many groups there were; engines never draw alike; and the held-out instances are the same
for all seeds. So pairing gains nearly nothing and costs half of the degrees of freedom; Welch's test stands beside it.
Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import integrate, optimize, special, stats

CONFIDENCE = 0.95
ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `n` runs. `low` and `high`: its t-interval; they and `sd` are None with a single run."""

    mean: float
    low: float | None
    high: float | None
    sd: float | None
    n: int

    @property
    def half_width(self) -> float | None:
        return None if self.high is None else self.high - self.mean


@dataclass(frozen=True, slots=True)
class Comparison:
    """One setting minus another, over the seeds that both have. `p`: of the two-sided paired t-test. `p_unpaired`: of
    Welch's, over all runs of both."""

    difference: Estimate
    p: float | None
    p_unpaired: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean with its one-sample t-interval. Raises ValueError without any value."""
    if not values:
        raise ValueError("no run: there is nothing to take a mean of")
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Estimate(mean, None, None, None, 1)
    sd = statistics.stdev(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * sd / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, sd, n)


def compare(one: Mapping[int, float], other: Mapping[int, float]) -> Comparison | None:
    """`one` minus `other`, paired by seed; None if no seed has both."""
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        return None
    difference = estimate([one[seed] - other[seed] for seed in seeds])
    return Comparison(difference, _p_value(difference), _welch(list(one.values()), list(other.values())))


def _p_value(difference: Estimate) -> float | None:
    if difference.sd is None:
        return None
    if difference.sd == 0.0:  # t is infinite, or 0/0
        return 1.0 if difference.mean == 0.0 else 0.0
    t = difference.mean / (difference.sd / math.sqrt(difference.n))
    return float(2 * stats.t.sf(abs(t), difference.n - 1))


def _welch(one: Sequence[float], other: Sequence[float]) -> float | None:
    if min(len(one), len(other)) < 2:
        return None
    (mean, sd), (other_mean, other_sd) = ((statistics.fmean(them), statistics.stdev(them)) for them in (one, other))
    if sd == other_sd == 0.0:  # t is infinite, or 0/0
        return 1.0 if mean == other_mean else 0.0
    test = stats.ttest_ind_from_stats(mean, sd, len(one), other_mean, other_sd, len(other), equal_var=False)
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Scand. J. Statist. 6, 1979).

    Rejecting those of at most alpha keeps the chance of any false rejection in the family at most alpha.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def smallest_detectable(sd: float, n: int, family: int = 1, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest true mean difference that a two-sided paired t-test over `n` pairs finds with this `power`.

    `sd`: of the differences. The test is at alpha / family, which is Holm's bound for the smallest p-value of a family,
    so the others of a family can do with less. Raises ValueError for fewer than two pairs.
    """
    if n < 2:
        raise ValueError(f"{n} pairs have no standard deviation: two at least")
    if sd == 0.0:
        return 0.0
    return _detectable_shift(n, alpha / family, power) * sd / math.sqrt(n)


@cache
def _detectable_shift(n: int, alpha: float, power: float) -> float:
    """The true difference, in standard errors, at which |t| exceeds its critical value with this power.

    Integrated over the observed standard deviation, because scipy's noncentral t is NaN far out.
    """
    df = n - 1
    critical = float(stats.t.isf(alpha / 2, df))
    chi = np.linspace(0.0, math.sqrt(df) + 10.0, 20_001)
    density, bound = stats.chi.pdf(chi, df), critical * chi / math.sqrt(df)

    def excess(shift: float) -> float:
        beyond = special.ndtr(shift - bound) + special.ndtr(-shift - bound)
        return float(integrate.simpson(density * beyond, x=chi)) - power

    above = critical
    while excess(above) < 0.0:
        above *= 2.0
    return float(optimize.brentq(excess, 0.0, above))
