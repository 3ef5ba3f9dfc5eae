"""One micro-batch's loss, and which samples an update leaves out: their numbers are not finite, or they do not fit.

A single NaN sample would make the whole gradient NaN. So it is left out before the backward pass and contributes
nothing; it still counts in the totals, like the samples that high-entropy selection leaves out. The reasons go to the
coordinator with the reply (`Trained.remarks`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dart.algo.loss import Recipe, Terms, policy_loss
from dart.algo.steps import Steps, Totals
from dart.core.types import Sample
from dart.workers.train.batch import MicroBatch, Row, samples_of

log = logging.getLogger(__name__)

MOST_REMARKS = 20
SHORTER = "set trainer.gradient_checkpointing: true, or lower agent.history_turns or agent.history_screenshots"
"""What helps where a lower limit of tokens does not: one row, or one sample, is too long."""


class NotFinite(Exception):
    """These samples give infinity or NaN."""

    def __init__(self, samples: Sequence[Sample], why: str) -> None:
        super().__init__(why)
        self.samples = samples


class Faults:
    """The samples left out of one update on one rank, and the remarks about them."""

    def __init__(self) -> None:
        self.left_out: dict[int, Sample] = {}
        """By `id`, which stays valid because the samples are kept here."""
        self.remarks: list[str] = []
        self.no_memory = False
        """Whether a sample was left out because it alone does not fit the device's memory."""
        self.smallest_too_large: int | None = None
        """The fewest padded tokens of a micro-batch of several rows that did not fit; None: all did."""

    def within(self, token_limit: int) -> int:
        """The limit, or half of the smallest micro-batch that did not fit, if that is lower."""
        return (
            token_limit if self.smallest_too_large is None else max(1, min(token_limit, self.smallest_too_large // 2))
        )

    def remark(self, text: str) -> None:
        log.warning("%s", text)
        if len(self.remarks) < MOST_REMARKS:
            self.remarks.append(text)

    def leave_out(self, samples: Sequence[Sample], why: str, *, memory: bool = False) -> None:
        self.no_memory = self.no_memory or memory
        for sample in samples:
            self.left_out[id(sample)] = sample
            self.remark(f"{sample.name} of group {sample.group_id} was left out of the update: {why}")

    def too_large(self, padded_tokens: int | None, what: str) -> None:
        """A micro-batch of `what` did not fit. padded_tokens: None for one row that a lower limit would not make
        shorter."""
        remedy = SHORTER
        if padded_tokens is not None:
            self.smallest_too_large = min(padded_tokens, self.smallest_too_large or padded_tokens)
            remedy = "lower trainer.microbatch_tokens"
        self.remark(f"a micro-batch of {what} did not fit the device's memory and was halved: {remedy}")


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """entropy; difference: log π_old − log π_behaviour, 0 for a re-scored token: float [T]."""

    inputs: MicroBatch
    terms: Terms
    entropy: torch.Tensor
    difference: torch.Tensor


def micro_loss(
    recipe: Recipe,
    part: Sequence[Row],
    inputs: MicroBatch,
    totals: Totals,
    new: torch.Tensor,
    old: torch.Tensor,
    entropy: torch.Tensor,
    reference: torch.Tensor | None,
) -> MicroLoss:
    """The loss of the part's samples. new: log π, with gradient; old: log π_old; reference: log π_ref; float [T].

    If the loss is not finite, raises NotFinite with the samples whose own loss is not finite.
    """
    behaviour = torch.where(inputs.rescored, old, inputs.behaviour)

    def terms(chosen: torch.Tensor | slice, steps: Steps) -> Terms:
        return policy_loss(
            recipe,
            new=new[chosen],
            old=old[chosen],
            behaviour=behaviour[chosen],
            advantages=inputs.advantages[chosen],
            steps=steps,
            totals=totals,
            reference=None if reference is None else reference[chosen],
            entropy=entropy[chosen],
        )

    whole = terms(slice(None), inputs.steps)
    if not bool(torch.isfinite(whole.loss)):
        with torch.no_grad():
            alone = [terms(tokens, step).loss for tokens, step in _each_step(inputs.steps)]
        _raise_bad(part, torch.stack(alone), "its loss is not finite")
    return MicroLoss(inputs, whole, entropy, old - behaviour)


def check_finite(part: Sequence[Row], steps: Steps, values: torch.Tensor, why: str) -> None:
    """values: float [T], one per token of the part. Raises NotFinite with the samples that have a non-finite value."""
    if not bool(torch.isfinite(values).all()):
        _raise_bad(part, steps.sums(values.detach()), why)


def _raise_bad(part: Sequence[Row], by_step: torch.Tensor, why: str) -> None:
    """by_step: float [S]. Raises NotFinite if any is not finite."""
    finite = torch.isfinite(by_step).tolist()
    if bad := [sample for sample, good in zip(samples_of(part), finite, strict=True) if not good]:
        raise NotFinite(bad, why)


def _each_step(steps: Steps) -> Iterator[tuple[torch.Tensor, Steps]]:
    """For each step, which tokens are its own (bool [T]), and `Steps` of that step alone."""
    for number in range(steps.count):
        tokens = steps.index == number
        yield tokens, Steps(torch.zeros_like(steps.index[tokens]), steps.lengths[number : number + 1])
