"""The loss of step-wise GRPO (DART, arXiv 2509.23866), term by term, then whole.

Steps are what is averaged: J = 1/|D| Σ_{steps in D} 1/T_step Σ_{tokens} (w · surrogate − β · KL). Everything here is a
share of that mean: the totals are the whole batch's, so losses, gradients and metrics of micro-batches and of ranks
add up to those of the unsplit batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dart.algo import checks


@dataclass(frozen=True, slots=True)
class Totals:
    """What the whole batch holds, over all micro-batches and ranks."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Terms:
    """One micro-batch's share. `loss`: float32 scalar with gradient. `metrics`: shares of means over tokens."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def probability_ratio(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """ρ = π(a_t) / π_old(a_t). new, old: log-probabilities, float32 [T]; old takes no gradient. Returns [T]."""
    checks.flat(new=new, old=old)
    return (new - old.detach()).exp()


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A), per token; ε_high > ε_low is clip-higher.

    ratio ρ, advantages A: float32 [T]. Returns [T], to be maximised.
    """
    checks.flat(ratio=ratio, advantages=advantages)
    if not (0 < clip_low < 1 and clip_high > 0):
        raise ValueError(f"clip_low {clip_low} must be in (0, 1) and clip_high {clip_high} above 0")
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def k3_kl(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(π ‖ π_ref) per token by the k3 estimator: r − log r − 1 with r = π_ref / π; never negative.

    new, reference: log-probabilities, float32 [T]; reference takes no gradient. Returns [T].
    """
    checks.flat(new=new, reference=reference)
    log_ratio = reference.detach() - new
    return log_ratio.exp() - log_ratio - 1


def step_mean(
    values: torch.Tensor, step_index: torch.Tensor, step_lengths: torch.Tensor, total_steps: int
) -> torch.Tensor:
    """1/|D| Σ_steps 1/T_step Σ_{t in step} values_t: mean over tokens within a step, then over steps.

    values: float [T]. step_index: int64 [T], the step of each token. step_lengths: int64 [S], tokens of each step, all
    of which must be here. total_steps |D|: steps of the whole batch. Returns a scalar.
    """
    checks.flat(values=values)
    checks.indices(step_index, "step_index", values.shape[0], step_lengths.shape[0])
    if not torch.equal(torch.bincount(step_index, minlength=step_lengths.shape[0]), step_lengths):
        raise ValueError("step_lengths do not count the tokens of each step in step_index")
    if total_steps < step_lengths.shape[0]:
        raise ValueError(f"total_steps is {total_steps} but {step_lengths.shape[0]} steps are here")
    return (values / step_lengths[step_index]).sum() / total_steps


def policy_loss(
    *,
    new: torch.Tensor,
    old: torch.Tensor,
    weight: torch.Tensor,
    advantages: torch.Tensor,
    step_index: torch.Tensor,
    step_lengths: torch.Tensor,
    totals: Totals,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    kl_coefficient: float = 0.0,
    reference: torch.Tensor | None = None,
) -> Terms:
    """−J = −mean over steps of (w · min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A) − β · KL(π ‖ π_ref)).

    new: log π with gradient; old: log π_old; weight: w of `truncated_importance_weight`; advantages: A of each token's
    step; reference: log π_ref, needed when kl_coefficient β > 0. All float32 [T]. importance_cap is C, for the metric.
    """
    checks.flat(new=new, old=old, weight=weight, advantages=advantages)
    ratio = probability_ratio(new, old)
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    objective = weight.detach() * surrogate
    kl = None
    if kl_coefficient > 0:
        if reference is None:
            raise ValueError(f"kl_coefficient is {kl_coefficient} but there are no reference log-probabilities")
        kl = k3_kl(new, reference)
        objective = objective - kl_coefficient * kl
    loss = -step_mean(objective, step_index, step_lengths, totals.steps)

    with torch.no_grad():
        # A token is clipped when the clipped branch is the smaller one, which is when it gets no gradient.
        clipped = torch.where(advantages > 0, ratio > 1 + clip_high, (ratio < 1 - clip_low) & (advantages < 0))
        per_token = {
            "clip_fraction": clipped.float(),
            "ratio": ratio,
            "importance_weight": weight,
            "importance_truncated": (weight >= importance_cap).float(),
            "kl_old": k3_kl(old, new),
        }
        if kl is not None:
            per_token["kl_reference"] = kl
        metrics = {name: values.sum() / totals.tokens for name, values in per_token.items()}
    return Terms(loss, metrics)
