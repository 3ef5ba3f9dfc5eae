"""Reduces values per token to one number. Totals are the whole batch's, so shares of micro-batches and ranks add up.

In each: values float [T] of whole steps. Returns a scalar.
"""

from __future__ import annotations

import torch

from dart.algo import checks
from dart.algo.steps import Steps, Totals


def step_mean(values: torch.Tensor, steps: Steps, totals: Totals) -> torch.Tensor:
    """1/|D| Σ_steps 1/T_step Σ_t values_t: every step counts once, however long (GRPO, arXiv 2402.03300)."""
    _check(values, steps, totals)
    return steps.means(values).sum() / totals.steps


def token_mean(values: torch.Tensor, steps: Steps, totals: Totals) -> torch.Tensor:
    """1/Σ_steps T_step Σ_steps Σ_t values_t: every token counts once (DAPO, arXiv 2503.14476)."""
    _check(values, steps, totals)
    return values.sum() / totals.tokens


def constant_mean(values: torch.Tensor, steps: Steps, totals: Totals, length: int) -> torch.Tensor:
    """1/|D| Σ_steps 1/L Σ_t values_t with a constant L ≥ 1 (Dr.GRPO, arXiv 2503.20783).

    A token weighs the same in a long step as in a short one, and the same in every batch.
    """
    _check(values, steps, totals)
    if length < 1:
        raise ValueError(f"length is {length}: it must be at least 1")
    return values.sum() / (length * totals.steps)


def _check(values: torch.Tensor, steps: Steps, totals: Totals) -> None:
    checks.flat(length_of=steps.index, values=values)
    if totals.steps < steps.count or totals.tokens < values.shape[0]:
        raise ValueError(
            f"totals are {totals.steps} steps and {totals.tokens} tokens, fewer than the {steps.count} and "
            f"{values.shape[0]} given: they must be those of the whole batch"
        )
