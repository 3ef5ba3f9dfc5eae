"""Rates and their uncertainty: Wilson's interval, also over clusters, pass@k, differences of pairs, McNemar's test.

Pure functions of counts and numbers, without numpy: an evaluation holds hundreds of values, not millions. Every
interval is a 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""How many standard errors an interval of 95 % reaches to each side."""


def wilson(successes: float, episodes: float) -> tuple[float, float]:
    """The Wilson score interval of a success rate (E. B. Wilson 1927, eq. in JASA 22, 209-212).

    It assumes independent episodes. Samples of one instance are not: use `clustered` for those.
    """
    if episodes == 0:
        return 0.0, 1.0
    p = successes / episodes
    scale = 1 + Z * Z / episodes
    centre = (p + Z * Z / (2 * episodes)) / scale
    half = Z * math.sqrt(p * (1 - p) / episodes + Z * Z / (4 * episodes * episodes)) / scale
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


def clustered(rates: Sequence[float], trials: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean rate over all trials, where trials of one instance are more alike than others.

    rates, trials: of each instance. It is Wilson's, for as many independent trials as would leave the mean as uncertain
    as the differences between the instances show it to be: mean · (1 - mean) / variance of the mean (the effective
    sample size of L. Kish, Survey Sampling, 1965), and no more than there are. With one trial for each instance that is
    their number. Where every trial came out alike nothing tells how alike those of one instance are: each instance
    counts once. Trials of a single instance are independent.
    """
    total = sum(trials)
    if not total:
        return wilson(0, 0)
    mean = sum(rate * of for rate, of in zip(rates, trials, strict=True)) / total
    variance = sum((of * (rate - mean)) ** 2 for rate, of in zip(rates, trials, strict=True)) / total**2
    if len(rates) == 1:
        effective = total
    elif mean in (0, 1):
        effective = len(rates)
    else:
        effective = min(total, mean * (1 - mean) / variance) if variance else total
    return wilson(mean * effective, effective)


def paired(differences: Sequence[float], samples: int = 1) -> tuple[float, float]:
    """The interval of the mean difference of two rates over pairs, of which each rate is over so many samples.

    Wald's, with half a pair of one more sample each way and one more pair without a difference, cut at -1 and 1: for
    one sample that is "Wald+2" of A. Agresti and Y. Min (Statistics in Medicine 24, 2005, 729-740). So it has a width
    where all pairs agree. Raises ValueError if there are no pairs.
    """
    if not differences:
        raise ValueError("there are no pairs: give one difference for each")
    pairs, mean = len(differences) + 2, sum(differences) / len(differences)
    centre = sum(differences) / pairs
    squares = sum(difference**2 for difference in differences) + 1 / samples**2
    half = Z * math.sqrt((squares / pairs - centre**2) / pairs)
    return min(max(-1.0, centre - half), mean), max(min(1.0, centre + half), mean)


def mcnemar(better: int, worse: int) -> float:
    """McNemar's exact two-sided p-value, where pairs that differ go either way with probability 1/2.

    p = min(1, 2 Σ_{i ≤ min(b, c)} C(b + c, i) / 2^(b + c)), with b and c the pairs that went each way; ties are ignored
    (Q. McNemar 1947; the exact form is the sign test).
    """
    pairs = better + worse
    tail = sum(math.comb(pairs, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << pairs))
