"""An update's metrics: what each micro-batch contributes, and their totals over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dart.workers.train import collectives
from dart.workers.train.batch import MicroBatch

MEANS = (
    "loss", "entropy", "clip_fraction", "ratio", "importance_weight", "importance_truncated", "kl_old", "kl_reference",
    "staleness", "logprob_difference",
)  # fmt: skip
"""Metrics that are shares of a mean: added over micro-batches and ranks. The loss is over the batch, the others over
the tokens that train, of which high-entropy selection leaves fewer."""
COUNTS = ("real_tokens", "padded_tokens", "rows", "microbatches", "same_version_tokens", "same_version_difference")
LARGEST = ("same_version_difference_max",)


@dataclass
class Tally:
    """Sums and maxima of one rank over one minibatch."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEANS + COUNTS, 0.0))
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LARGEST, 0.0))

    def count(
        self,
        inputs: MicroBatch,
        metrics: dict[str, torch.Tensor],
        difference: torch.Tensor,
        version: int,
        all_tokens: int,
    ) -> None:
        """Add a micro-batch. metrics: shares of means; difference: log π_old − log π_behaviour, float [T]; version: the
        trainer's; all_tokens: the number of tokens in the batch that train."""
        difference = difference.abs()
        # Re-scored tokens agree with themselves, which proves nothing.
        same = ((inputs.versions == version) & ~inputs.rescored).float()
        metrics["staleness"] = (version - inputs.versions).sum() / all_tokens
        metrics["logprob_difference"] = difference.sum() / all_tokens
        metrics["same_version_tokens"] = same.sum()
        metrics["same_version_difference"] = (same * difference).sum()
        names = list(metrics)
        values = torch.stack([metrics[name].float() for name in names] + [(same * difference).max()]).tolist()
        for name, value in zip(names, values, strict=False):
            self.sums[name] += value
        (name,) = LARGEST
        self.largest[name] = max(self.largest[name], values[-1])
        self.sums["real_tokens"] += inputs.real_tokens
        self.sums["padded_tokens"] += inputs.padded_tokens
        self.sums["rows"] += inputs.input_ids.shape[0]
        self.sums["microbatches"] += 1


def summed(tallies: Sequence[Tally], device: torch.device) -> dict[str, float]:
    """The metrics of all minibatches and ranks. All ranks call it at the same time."""
    names = MEANS + COUNTS
    sums = collectives.add([sum(tally.sums[name] for tally in tallies) for name in names], device)
    metrics = dict(zip(names, sums, strict=True))
    largest = collectives.largest([max(tally.largest[name] for tally in tallies) for name in LARGEST], device)
    metrics.update(zip(LARGEST, largest, strict=True))
    for name in MEANS:
        metrics[name] /= len(tallies)
    metrics["computed_tokens"] = metrics.pop("real_tokens")
    metrics["padding_share"] = 1 - metrics["computed_tokens"] / max(1.0, metrics.pop("padded_tokens"))
    metrics["same_version_difference"] /= max(1.0, metrics["same_version_tokens"])
    return metrics
