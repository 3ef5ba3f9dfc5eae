"""Which steps of a batch train: high-entropy selection over groups whose steps are spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dart.algo.selection import entropy_thresholds, high_entropy_steps
from dart.core.types import StepEntropy
from dart.workers.train import collectives
from dart.workers.train.batch import Row, without


@dataclass(frozen=True, slots=True)
class Score:
    """How the policy before an update scores a step. logprobs: log π_old, float32 [T]; entropy: H, in nats;
    token_entropies: of each token, float16 [T], in host memory."""

    logprobs: torch.Tensor
    entropy: float
    token_entropies: torch.Tensor


def told(
    before: Sequence[Sequence[Row]], after: Sequence[Sequence[Row]], scores: Mapping[int, Score]
) -> list[StepEntropy]:
    """What selection saw of this rank's steps: `before` it and `after` it."""
    stayed = {id(step) for rows in after for row in rows for step in row.samples}
    return [
        StepEntropy(
            step.trajectory_id, step.index, max(0.0, scores[id(step)].entropy), id(step) in stayed,
            scores[id(step)].token_entropies.numpy().astype("<f2").tobytes(),
        )
        for rows in before for row in rows for step in row.samples
    ]  # fmt: skip


def select(
    minibatches: Sequence[Sequence[Row]], scores: Mapping[int, Score], quantile: float
) -> tuple[list[list[Row]], dict[str, float]]:
    """This rank's rows with only the steps that train, and metrics of the selection over the whole batch.

    A step trains if its entropy reaches the quantile of its group's steps in this batch. scores: by id of the step.
    All ranks call this at the same time; they see the same entropies and so select the same steps.
    """
    steps = [sample for rows in minibatches for row in rows for sample in row.samples]
    shares = collectives.all_gather([(step.group_id, scores[id(step)].entropy) for step in steps])
    everyone = [one for share in shares for one in share]
    groups: dict[str, int] = {}
    index = torch.tensor([groups.setdefault(group, len(groups)) for group, _ in everyone], dtype=torch.int64)
    entropies = torch.tensor([entropy for _, entropy in everyone], dtype=torch.float64)
    kept = high_entropy_steps(entropies, index, quantile)
    start = sum(len(share) for share in shares[: collectives.rank()])
    stays = kept[start : start + len(steps)].tolist()
    leave = {id(step) for step, stay in zip(steps, stays, strict=True) if not stay}
    left = [without(rows, leave) for rows in minibatches]
    thresholds = entropy_thresholds(entropies, index, quantile)
    return left, {"selected_share": float(kept.double().mean()), "entropy_threshold": float(thresholds.mean())}
