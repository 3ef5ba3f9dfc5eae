"""What the configuration says about an update: its loss, its optimiser and its learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dart.algo import objectives
from dart.algo.loss import Recipe
from dart.config import Loss
from dart.config import Trainer as Settings
from dart.errors import UserError

DUAL_CLIP = 3.0  # its paper's c, and verl's default


def loss_recipe(loss: Loss, minibatches: int = 1) -> Recipe:
    """The loss that the configuration describes. Raises UserError if it names a function that does not exist.

    From the second minibatch on the policy is no longer the one that the ratio is taken against, so `dual_clip` is on
    by default.
    """
    try:
        objective = objectives.find(loss.kind)
    except ValueError as error:
        raise UserError(f"trainer.loss.kind: {error}") from error
    terms = loss.model_dump(exclude={"kind", "entropy_quantile"})
    if loss.dual_clip is None and minibatches > 1:
        terms["dual_clip"] = DUAL_CLIP
    return Recipe(objective=objective, **terms)


def make_optimizer(parameters: Sequence[torch.nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    """AdamW over the parameters; those of sharded weights have sharded state."""
    return torch.optim.AdamW(
        [
            # Norms and biases have no weight decay.
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        eps=settings.adam_epsilon,
        fused=True,
    )


def learning_rate(settings: Settings, update: int, total_updates: int | None) -> float:
    """For the update with this index (from 0): up in equal steps over the warm-up, to its full value at the first
    update after that; from there linear to the last update, or constant without a last."""
    warmup = settings.warmup_updates
    if update < warmup:
        return settings.learning_rate * (update + 1) / (warmup + 1)
    if total_updates is None:
        return settings.learning_rate
    progress = min(1.0, (update - warmup) / max(1, total_updates - 1 - warmup))
    return settings.learning_rate * (1 - (1 - settings.final_learning_rate_fraction) * progress)
