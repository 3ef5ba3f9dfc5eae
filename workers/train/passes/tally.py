"""An update's size and metrics: what each micro-batch contributes, and the totals over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dart.algo.steps import Totals
from dart.workers.train import collectives
from dart.workers.train.batch import Batches, MicroBatch, steps, tokens
from dart.workers.train.errors import SampleError

MEANS = (
    "loss", "entropy", "clip_fraction", "ratio", "importance_weight", "importance_truncated", "kl_old", "kl_reference",
    "staleness", "logprob_difference",
)  # fmt: skip
"""Metrics that are shares of a mean: added over micro-batches and ranks. The loss is over the batch, the others over
the tokens that train, of which high-entropy selection leaves fewer. `staleness` is the mean of each token's own age, in
versions, and a re-scored token's age is counted from its pooling; `core.curation.judging.staleness` is that of a
trajectory's oldest token."""
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
        trained_tokens: int,
    ) -> None:
        """Add a micro-batch. metrics: shares of means; difference: log π_old − log π_behaviour, float [T]; version: the
        trainer's; trained_tokens: the minibatch's tokens that train, over all ranks."""
        difference = difference.abs()
        # Re-scored tokens agree with themselves, which proves nothing.
        same = ((inputs.versions == version) & ~inputs.rescored).float()
        metrics["staleness"] = (version - inputs.versions).sum() / trained_tokens
        metrics["logprob_difference"] = difference.sum() / trained_tokens
        metrics["same_version_tokens"] = same.sum()
        metrics["same_version_difference"] = (same * difference).sum()
        names = list(metrics)
        values = torch.stack([metrics[name].float() for name in names] + [(same * difference).max()]).tolist()
        for name, value in zip(names, values, strict=False):
            self.sums[name] += value
        (name,) = LARGEST
        self.largest[name] = max(self.largest[name], values[-1])
        self.sums["real_tokens"] += inputs.load.tokens
        self.sums["padded_tokens"] += inputs.padded_tokens
        self.sums["rows"] += inputs.input_ids.shape[0]
        self.sums["microbatches"] += 1


def sized(dealt: Batches, samples: int, response_tokens: int, device: torch.device) -> tuple[Batches, list[Totals]]:
    """The minibatches for which any rank has rows (few rows do not fill all), with their totals over ranks, which must
    add up to what the coordinator counted: else raises SampleError."""
    counts = [float(count) for rows in dealt for count in (steps(rows), tokens(rows))]
    added = [int(count) for count in collectives.all_sum(counts, device)]
    got = sum(added[::2]), sum(added[1::2])
    if not samples or got != (samples, response_tokens):
        raise SampleError(
            f"the ranks got {got[0]} samples with {got[1]} tokens, but the batch has {samples} with {response_tokens}"
        )
    totals = [Totals(count, size, size) for count, size in zip(added[::2], added[1::2], strict=True)]
    some = [number for number, total in enumerate(totals) if total.steps]
    return [dealt[number] for number in some], [totals[number] for number in some]


def selected(totals: list[Totals], minibatches: Batches, device: torch.device) -> list[Totals]:
    """The totals with the tokens that selection kept. If it kept none, nothing is divided by them."""
    left = collectives.all_sum([float(tokens(rows)) for rows in minibatches], device)
    return [replace(total, trained_tokens=max(1, int(count))) for total, count in zip(totals, left, strict=True)]


def summed(tallies: Sequence[Tally], device: torch.device) -> dict[str, float]:
    """The metrics of all minibatches and ranks. All ranks call it at the same time."""
    names = MEANS + COUNTS
    sums = collectives.all_sum([sum(tally.sums[name] for tally in tallies) for name in names], device)
    metrics = dict(zip(names, sums, strict=True))
    largest = collectives.all_max([max(tally.largest[name] for tally in tallies) for name in LARGEST], device)
    metrics.update(zip(LARGEST, largest, strict=True))
    for name in MEANS:
        metrics[name] /= len(tallies)
    metrics["computed_tokens"] = metrics.pop("real_tokens")
    metrics["padding_share"] = 1 - metrics["computed_tokens"] / max(1.0, metrics.pop("padded_tokens"))
    metrics["same_version_difference"] /= max(1.0, metrics["same_version_tokens"])
    return metrics
