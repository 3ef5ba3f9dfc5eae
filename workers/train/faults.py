"""One micro-batch's loss, and what of an update is left out because its numbers are not finite, and why.

One sample that comes to NaN would make NaN of the whole gradient. So it is left out before the backward pass, as if it
had nothing to say: it still counts in the totals, as the samples do that high-entropy selection leaves out. The reasons
go to the coordinator with the reply (`Trained.remarks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dart.algo.loss import Recipe, Terms, policy_loss
from dart.algo.steps import Steps, Totals
from dart.core.types import Sample
from dart.workers.train.batch import MicroBatch, Row, samples_of, without

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_REMARKS = 20


class NotFinite(Exception):
    """These samples come to infinity or to no number."""

    def __init__(self, samples: Sequence[Sample], why: str) -> None:
        super().__init__(why)
        self.samples = samples


class Faults:
    """Of one update on one rank."""

    def __init__(self) -> None:
        self.left_out: dict[int, Sample] = {}
        """By id, which holds as long as they are here."""
        self.remarks: list[str] = []

    def remark(self, text: str) -> None:
        log.warning("%s", text)
        if len(self.remarks) < MOST_REMARKS:
            self.remarks.append(text)

    def finite(self, rows: Sequence[Row], work: Callable[[list[Row]], T]) -> T | None:
        """The work on the rows, without the samples that it says are not finite; None when it leaves none."""
        left = without(rows, self.left_out)
        while left:
            try:
                return work(left)
            except NotFinite as error:
                for sample in error.samples:
                    self.left_out[id(sample)] = sample
                    self.remark(f"{sample.name} of group {sample.group_id} was left out of the update: {error}")
                left = without(left, self.left_out)
        return None


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """entropy; difference: log π_old − log π_behaviour, of which a re-scored token has none: float [T]."""

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

    Raises NotFinite with the samples whose own loss is not finite, where theirs together is not.
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
    """values: float [T] of the part's tokens. Raises NotFinite with the samples where one is not finite."""
    if not bool(torch.isfinite(values).all()):
        _raise_bad(part, steps.sums(values.detach()), why)


def _raise_bad(part: Sequence[Row], by_step: torch.Tensor, why: str) -> None:
    """by_step: float [S]. Raises NotFinite where any is not finite."""
    finite = torch.isfinite(by_step).tolist()
    if bad := [sample for sample, good in zip(samples_of(part), finite, strict=True) if not good]:
        raise NotFinite(bad, why)


def _each_step(steps: Steps) -> Iterator[tuple[torch.Tensor, Steps]]:
    """Which tokens are a step's (bool [T]), and that step alone."""
    for number in range(steps.count):
        tokens = steps.index == number
        yield tokens, Steps(torch.zeros_like(steps.index[tokens]), steps.lengths[number : number + 1])
