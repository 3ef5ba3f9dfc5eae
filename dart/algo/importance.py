"""Token level of adaptive data curation: distribution alignment (DART, arXiv 2509.23866)."""

from __future__ import annotations

import torch

from dart.algo import checks

ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much: what an engine in bfloat16 rounds a certain token to."""


def truncated_importance_weight(old: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """w = min(π_old(a_t) / π_behaviour(a_t), C), per token.

    old: float [T], log π_old, recomputed by the trainer before the first optimiser step on the batch. behaviour:
    float [T], log-probabilities that the roll-out engine returned when it sampled, after temperature. cap: C > 0.
    Returns float32 [T] in [0, C], without gradient. Log-probabilities that are missing, misaligned, not finite or
    above 0 raise ValueError: a weight is never filled in.
    """
    checks.flat(old=old, behaviour=behaviour)
    if not cap > 0:
        raise ValueError(f"cap is {cap}: it must be above 0")
    for name, values in (("old", old), ("behaviour", behaviour)):
        wrong = ~torch.isfinite(values) | (values > ROUNDING)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise ValueError(
                f"{name} log-probability of token {first} is {float(values[first])}: it must be finite and ≤ 0"
            )
    with torch.no_grad():
        return (old.float() - behaviour.float()).exp().clamp(max=cap)
