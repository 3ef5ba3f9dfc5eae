"""The loss of step-wise GRPO (DART, arXiv 2509.23866), assembled from its terms.

J = mean over D of (w · objective − β · KL(π ‖ π_ref) + c · H). Everything here is a share of that mean: the totals are
the whole batch's, so losses, gradients and metrics of micro-batches and of ranks add up to those of the unsplit batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dart.algo import aggregation, checks, importance
from dart.algo.kl import ESTIMATORS, k3
from dart.algo.objectives import Objective, Tokens, dual_clipped, grpo
from dart.algo.ratio import RATIOS
from dart.algo.steps import Steps, Totals


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which terms the loss has. Names and values are those of `trainer.loss` in the configuration."""

    objective: Objective
    ratio: str
    clip_low: float
    clip_high: float
    aggregation: str
    constant_length: int | None
    kl_estimator: str
    kl_bound: float
    kl_coefficient: float
    log_ratio_bound: float
    importance: str
    importance_level: str
    importance_cap: float
    importance_floor: float
    entropy_coefficient: float
    dual_clip: float | None = None
    """c of `objectives.dual_clipped`, which bounds grpo's objective; none or 0: no bound."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One micro-batch's share. `loss`: scalar with gradient. `metrics`: shares of means over the trained tokens."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def policy_loss(
    recipe: Recipe,
    *,
    new: torch.Tensor,
    old: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    steps: Steps,
    totals: Totals,
    reference: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> Terms:
    """−J. All float [T]; gradient flows through `new`, and through `entropy` where it has a coefficient.

    new: log π; old: log π_old; behaviour: log-probabilities from sampling time; advantages: A of each token's step;
    reference: log π_ref, needed when β > 0; entropy: H_t over the whole vocabulary, needed when c > 0.
    """
    checks.flat(length_of=steps.index, new=new, old=old, behaviour=behaviour, advantages=advantages)
    ratio = RATIOS[recipe.ratio](new, old, steps, recipe.log_ratio_bound)
    tokens = Tokens(new, ratio, old.detach(), behaviour, advantages, steps)
    value = recipe.objective(tokens, recipe.clip_low, recipe.clip_high)
    checks.flat(length_of=steps.index, objective=value)
    dual_clip = recipe.dual_clip if recipe.objective is grpo else None
    if dual_clip:
        value = dual_clipped(value, advantages, dual_clip)
    with torch.no_grad():
        # Where PPO's clipped surrogate would have no gradient, whatever the objective: for grpo, the share of tokens
        # that are clipped; for others, only how far the policy has moved.
        clipped = torch.where(
            advantages > 0, ratio > 1 + recipe.clip_high, (ratio < 1 - recipe.clip_low) & (advantages < 0)
        )
        if dual_clip:
            clipped |= (ratio > dual_clip) & (advantages < 0)
        per_token = {"clip_fraction": clipped, "ratio": ratio, "kl_old": k3(old, new)}

    weight, cut = _importance_weight(recipe, old, behaviour, steps)
    value = weight * value
    per_token |= {"importance_weight": weight, "importance_truncated": cut}
    if recipe.kl_coefficient > 0:
        if reference is None:
            raise ValueError(f"kl_coefficient is {recipe.kl_coefficient} but there are no reference log-probabilities")
        bounds = (recipe.kl_bound, recipe.log_ratio_bound) if recipe.kl_estimator == "k3" else ()
        kl = ESTIMATORS[recipe.kl_estimator](new, reference, *bounds)
        value = value - recipe.kl_coefficient * kl
        per_token["kl_reference"] = kl.detach()
    if recipe.entropy_coefficient > 0:
        if entropy is None:
            raise ValueError(f"entropy_coefficient is {recipe.entropy_coefficient} but there are no entropies")
        value = value + recipe.entropy_coefficient * entropy

    metrics = {name: values.detach().to(new.dtype).sum() / totals.trained_tokens for name, values in per_token.items()}
    return Terms(-_aggregate(recipe, value, steps, totals), metrics)


def _importance_weight(
    recipe: Recipe, old: torch.Tensor, behaviour: torch.Tensor, steps: Steps
) -> tuple[torch.Tensor, torch.Tensor]:
    """w, and where it differs from the ratio. The log-probabilities are checked even if no weight is computed."""
    if recipe.importance_level == "sequence":
        ratio = importance.sequence_behaviour_ratio(old, behaviour, steps, recipe.log_ratio_bound)
    else:
        ratio = importance.behaviour_ratio(old, behaviour, recipe.log_ratio_bound)
    match recipe.importance:
        case "truncated":
            weight = importance.truncated(ratio, recipe.importance_cap)
        case "masked":
            weight = importance.masked(ratio, recipe.importance_floor, recipe.importance_cap)
        case "none":
            return torch.ones_like(ratio), torch.zeros_like(ratio)
        case _:
            raise ValueError(f"importance is {recipe.importance}: it must be truncated, masked or none")
    return weight, weight != ratio


def _aggregate(recipe: Recipe, values: torch.Tensor, steps: Steps, totals: Totals) -> torch.Tensor:
    match recipe.aggregation:
        case "step_mean":
            return aggregation.step_mean(values, steps, totals)
        case "token_mean":
            return aggregation.token_mean(values, steps, totals)
        case "constant":
            return aggregation.constant_mean(values, steps, totals, recipe.constant_length or 0)
        case _:
            raise ValueError(f"aggregation is {recipe.aggregation}: it must be step_mean, token_mean or constant")
