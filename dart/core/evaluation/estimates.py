"""Rates and their uncertainty: Wilson's interval, pass@k, the bootstrap, McNemar's exact test.

Pure functions of counts and numbers, without numpy: an evaluation holds hundreds of values, not millions. Every
interval is a 95 % interval.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

RESAMPLES = 5000


def wilson(successes: float, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a success rate (E. B. Wilson 1927, eq. in JASA 22, 209-212).

    It assumes independent episodes. Samples of one instance are not: use `bootstrap` over instances for those.
    """
    if episodes == 0:
        return 0.0, 1.0
    p = successes / episodes
    scale = 1 + z * z / episodes
    centre = (p + z * z / (2 * episodes)) / scale
    half = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes * episodes)) / scale
    # At 0 and 1 the interval ends exactly there; rounding would leave the rate outside it.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == episodes else centre + half)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """pass@k = 1 - C(n - c, k) / C(n, k): the chance that k of an instance's n samples, of which c succeeded, include a
    success.

    The unbiased estimator of arXiv 2107.03374, eq. 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= successes <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {successes} successes in {samples} samples is not defined")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean (B. Efron 1979): 2.5 % and 97.5 % of `RESAMPLES` resampled means.

    values: one per unit that was drawn independently, here an instance. The same seed draws the same units, so curves
    of one evaluation are resampled together. Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("nothing to resample: give one value per instance")
    rng = random.Random(seed)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = round(0.025 * RESAMPLES)
    return means[tail], means[-1 - tail]


def mcnemar(better: int, worse: int) -> float:
    """McNemar's exact two-sided p-value, where pairs that differ go either way with probability 1/2.

    p = min(1, 2 Σ_{i ≤ min(b, c)} C(b + c, i) / 2^(b + c)), with b and c the pairs that went each way; ties are ignored
    (Q. McNemar 1947; the exact form is the sign test).
    """
    pairs = better + worse
    tail = sum(math.comb(pairs, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << pairs))
