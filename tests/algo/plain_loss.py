"""The loss of docs/losses.md once more, on padded rows and with nothing of dart's: what `dart.algo` is compared with.

Everything is [steps, longest response] with a mask, as most trainers have it, where `dart.algo` has flat tokens. Every
formula is written out from the papers, with the project's bounds of log-ratios and of k3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_BOUND, K3_BOUND = 20.0, 10.0


@dataclass(frozen=True)
class Rows:
    """Float [steps, longest], and `kept`: bool [steps], false for steps that selection leaves out."""

    mask: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    kept: torch.Tensor


@dataclass(frozen=True)
class Choices:
    kind: str
    ratio: str
    importance: str
    importance_level: str
    kl_estimator: str
    kl_coefficient: float
    entropy_coefficient: float
    aggregation: str
    clip_low: float
    clip_high: float
    cap: float
    floor: float
    constant_length: int


def plain_loss(rows: Rows, choices: Choices) -> torch.Tensor:
    lengths = rows.mask.sum(1, keepdim=True)
    value = _weight(rows, choices) * _objective(rows, choices, lengths)
    value = value - choices.kl_coefficient * _kl(rows, choices) + choices.entropy_coefficient * rows.entropy
    value = torch.where(rows.mask.bool() & rows.kept[:, None], value, 0.0)
    count = rows.mask.shape[0]
    if choices.aggregation == "step_mean":
        return -(value / lengths).sum() / count
    if choices.aggregation == "token_mean":
        return -value.sum() / rows.mask.sum()
    return -value.sum() / (choices.constant_length * count)


def _objective(rows: Rows, choices: Choices, lengths: torch.Tensor) -> torch.Tensor:
    apart = rows.new - rows.old
    if choices.ratio == "sequence":
        # GSPO-token: the value is the step's geometric mean, the gradient each token's own.
        mean = (apart.detach() * rows.mask).sum(1, keepdim=True) / lengths
        inside = mean.abs() <= LOG_RATIO_BOUND
        ratio = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() * (1 + inside * (rows.new - rows.new.detach()))
    else:
        ratio = torch.where(apart > LOG_RATIO_BOUND, LOG_RATIO_BOUND, apart)
        ratio = torch.where(apart < -LOG_RATIO_BOUND, -LOG_RATIO_BOUND, ratio).exp()
    if choices.kind == "likelihood":
        return rows.advantages * rows.new
    low, high = 1 - choices.clip_low, 1 + choices.clip_high
    if choices.kind == "cispo":
        return ratio.detach().clamp(low, high) * rows.advantages * rows.new
    # A token is clipped, and has no gradient, where clipping makes the objective smaller.
    clipped = ((rows.advantages > 0) & (ratio > high)) | ((rows.advantages < 0) & (ratio < low))
    return torch.where(clipped, ratio.detach().clamp(low, high), ratio) * rows.advantages


def _weight(rows: Rows, choices: Choices) -> torch.Tensor:
    apart = (rows.old - rows.behaviour) * rows.mask
    if choices.importance_level == "sequence":
        apart = apart.sum(1, keepdim=True).expand_as(apart)
    ratio = apart.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if choices.importance == "none":
        return torch.ones_like(ratio)
    if choices.importance == "truncated":
        return ratio.minimum(torch.tensor(choices.cap))
    return ratio * (ratio >= choices.floor) * (ratio <= choices.cap)


def _kl(rows: Rows, choices: Choices) -> torch.Tensor:
    apart = rows.new - rows.reference
    if choices.kl_estimator == "k1":
        return apart
    if choices.kl_estimator == "k2":
        return apart * apart / 2
    backwards = (-apart).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    value = backwards.exp() - backwards - 1
    return torch.where(value > K3_BOUND, K3_BOUND, value)
