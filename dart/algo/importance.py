"""Token level of adaptive data curation: distribution alignment (DART, arXiv 2509.23866).

The roll-out engine sampled from π_behaviour: an older version, other kernels. The ratio of the trainer's π_old to it,
truncated where it would be noise, weights each token's surrogate. In each function, old is log π_old, recomputed by the
trainer before the first optimiser step on the batch, and behaviour the log-probabilities that the engine returned when
it sampled, after temperature; both float [T]. Results are float [T], without gradient.
"""

from __future__ import annotations

import torch

from dart.algo import checks
from dart.algo.ratio import LARGEST_LOG_RATIO, bounded
from dart.algo.steps import Steps

ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much: a bfloat16 engine may round that of a certain token so."""


def behaviour_ratio(old: torch.Tensor, behaviour: torch.Tensor, bound: float = LARGEST_LOG_RATIO) -> torch.Tensor:
    """π_old(a_t) / π_behaviour(a_t), per token, its logarithm `bounded`.

    Raises ValueError for log-probabilities that are missing, misaligned, not finite or above 0: none is filled in.
    """
    _check(old, behaviour)
    with torch.no_grad():
        return bounded(old - behaviour, bound).exp()


def sequence_behaviour_ratio(
    old: torch.Tensor, behaviour: torch.Tensor, steps: Steps, bound: float = LARGEST_LOG_RATIO
) -> torch.Tensor:
    """Π_{t in step} π_old(a_t) / π_behaviour(a_t), the ratio of the whole response, at each of its tokens.

    Its logarithm is `bounded`.

    Raises ValueError as `behaviour_ratio` does.
    """
    _check(old, behaviour)
    with torch.no_grad():
        return steps.spread(bounded(steps.sums(old - behaviour), bound).exp())


def truncated(ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """w = min(ratio, C); C > 0."""
    checks.flat(ratio=ratio)
    if not cap > 0:
        raise ValueError(f"cap is {cap}: it must be above 0")
    return ratio.clamp(max=cap)


def masked(ratio: torch.Tensor, floor: float, cap: float) -> torch.Tensor:
    """w = ratio where floor ≤ ratio ≤ C, else 0 (IcePop, ringtech.notion.site/icepop); 0 ≤ floor < C."""
    checks.flat(ratio=ratio)
    if not 0 <= floor < cap:
        raise ValueError(f"floor {floor} must be in [0, cap), and cap is {cap}")
    return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0)


def _check(old: torch.Tensor, behaviour: torch.Tensor) -> None:
    checks.flat(old=old, behaviour=behaviour)
    for name, values in (("old", old), ("behaviour", behaviour)):
        wrong = ~torch.isfinite(values) | (values > ROUNDING)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name} log-probability of token {first} is {float(values[first])}: it must be finite and ≤ 0"
            )
