"""Estimators of KL(π ‖ π_ref) from the sampled token alone (Schulman, http://joschu.net/blog/kl-approx.html).

A loss differentiates the estimator, and the mean of that gradient over a ~ π need not be the gradient of the mean:

| estimator | mean of its value      | mean of its gradient     |
|-----------|------------------------|--------------------------|
| k1        | KL(π ‖ π_ref)          | 0                        |
| k2        | near KL(π ‖ π_ref)     | that of KL(π ‖ π_ref)    |
| k3        | KL(π ‖ π_ref)          | that of KL(π_ref ‖ π)    |

In each: new is log π with gradient, reference is log π_ref, which takes none; both float [T], and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dart.algo import checks
from dart.algo.ratio import LARGEST_LOG_RATIO, bounded

LARGEST_K3 = 10.0
"""Reached where π_ref gives a token 13.6 times the probability that π gives it, or π 60,000 times that of π_ref."""


def k1(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log(π / π_ref); may be negative. Its gradient ∂ log π has mean 0: as a loss it only adds noise."""
    checks.flat(new=new, reference=reference)
    return new - reference.detach()


def k2(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """½ log²(π / π_ref); never negative. Its gradient log(π / π_ref) ∂ log π is that of KL(π ‖ π_ref)."""
    checks.flat(new=new, reference=reference)
    return (new - reference.detach()).square() / 2


def k3(
    new: torch.Tensor,
    reference: torch.Tensor,
    largest: float = LARGEST_K3,
    log_ratio_bound: float = LARGEST_LOG_RATIO,
) -> torch.Tensor:
    """r − log r − 1 with r = π_ref / π; never negative. Its gradient (1 − r) ∂ log π is that of KL(π_ref ‖ π).

    A deviation from the definition, as in verl: log r is `bounded`, and the value is at most `largest`, beyond which
    it has no gradient. At a log-ratio of 25 the gradient would be 7 · 10^10: one such token would be the whole update.
    """
    checks.flat(new=new, reference=reference)
    log_ratio = bounded(reference.detach() - new, log_ratio_bound)
    return (log_ratio.exp() - log_ratio - 1).clamp(max=largest)


ESTIMATORS: dict[str, Callable[..., torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the names of `trainer.loss.kl_estimator`; k3 has bounds as well."""
