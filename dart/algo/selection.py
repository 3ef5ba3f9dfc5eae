"""Step level of adaptive data curation: high-entropy selection (DART, arXiv 2509.23866).

Only steps at which the policy was undecided are trained on: 1[H_step ≥ Q_q of its group], H_step the mean token entropy
of its response. The objective has the indicator inside its expectation, so steps that are left out still count in the
denominator.
"""

from __future__ import annotations

import torch

from dart.algo import checks


def entropy_thresholds(entropies: torch.Tensor, groups: torch.Tensor, quantile: float) -> torch.Tensor:
    """Q_q of each group's H. entropies H: float [S]; groups: int64 [S], from 0 without gaps. Returns [G].

    Of a group's n values in order h_0 ≤ … ≤ h_{n−1}, Q_q is the value at position q (n − 1), between two of them by
    linear interpolation.
    """
    checks.flat(entropies=entropies)
    count = int(groups.max()) + 1 if groups.numel() else 0
    checks.indices(groups, "groups", entropies.shape[0], count)
    if not 0 <= quantile < 1:
        raise ValueError(f"quantile is {quantile}: it must be in [0, 1)")
    if not bool(torch.isfinite(entropies).all()):
        raise ValueError("entropies are not all finite: give one finite number for each step")
    each = [torch.quantile(entropies[groups == group], quantile) for group in range(count)]
    return torch.stack(each) if each else entropies.new_zeros(0)


def high_entropy_steps(entropies: torch.Tensor, groups: torch.Tensor, quantile: float) -> torch.Tensor:
    """1[H_step ≥ Q_q of its group], bool [S]; arguments as for `entropy_thresholds`.

    A step at the threshold stays, so a group of equal steps stays whole. The largest value is never below a quantile,
    so each group keeps at least one step, and a group of one step keeps it. q = 0 keeps everything.
    """
    return entropies >= entropy_thresholds(entropies, groups, quantile)[groups]
