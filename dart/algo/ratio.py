"""How far the policy has moved since the batch's first optimiser step: ρ, per token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dart.algo import checks
from dart.algo.steps import Steps

LARGEST_LOG_RATIO = 20.0
"""e^20 is 5 · 10^8: a ratio beyond it or its inverse only says that the policies have nothing in common there."""


def bounded(log_ratio: torch.Tensor, bound: float = LARGEST_LOG_RATIO) -> torch.Tensor:
    """The log-ratio, cut to ±bound, beyond which it has no gradient.

    A deviation from the papers, which have no such bound: e^89 is infinite in float32, and infinity times an advantage
    of 0 is NaN, which would make the whole gradient NaN. verl cuts at the same value.
    """
    return log_ratio.clamp(-bound, bound)


# In each: new is log π with gradient, old is log π_old, which takes none; both float [T], and so is the result.


def token_ratio(new: torch.Tensor, old: torch.Tensor, bound: float = LARGEST_LOG_RATIO) -> torch.Tensor:
    """ρ_t = π(a_t) / π_old(a_t) (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300), its logarithm `bounded`."""
    checks.flat(new=new, old=old)
    return bounded(new - old.detach(), bound).exp()


def sequence_token_ratio(
    new: torch.Tensor, old: torch.Tensor, steps: Steps, bound: float = LARGEST_LOG_RATIO
) -> torch.Tensor:
    """s_t = sg[s] · π(a_t) / sg[π(a_t)], sg stopping the gradient (GSPO-token, arXiv 2507.18071).

    Its value is GSPO's s = (π(y) / π_old(y))^(1/|y|) = exp(1/|y| Σ_t log(π(a_t) / π_old(a_t))), y being the step's
    response; its gradient is s · ∂ log π(a_t), token t's own. Summed over a step whose tokens weigh the same, the
    gradient is that of s at each token; where weights differ by token (w does), each stays with its token. The mean
    log-ratio is `bounded`: a step beyond the bound has no gradient.
    """
    checks.flat(new=new, old=old)
    mean = steps.spread(steps.means((new - old).detach()))
    return bounded(mean + (new - new.detach()), bound).exp()


RATIOS: dict[str, Callable[[torch.Tensor, torch.Tensor, Steps, float], torch.Tensor]] = {
    "token": lambda new, old, _, bound: token_ratio(new, old, bound),
    "sequence": sequence_token_ratio,
}
"""By the names of `trainer.loss.ratio`."""
