"""The two kinds of work that an update does for each micro-batch: scoring its steps, and adding to the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from dart.algo.steps import Totals
from dart.workers.train.batch import MicroBatch, Row, samples_of
from dart.workers.train.passes.faults import MicroLoss, check_finite
from dart.workers.train.passes.tally import Tally
from dart.workers.train.selection import Score


class Learner(Protocol):
    """What the work needs of the trainer."""

    version: int
    device: torch.device

    def prepare(self, part: list[Row]) -> MicroBatch:
        """The part's inputs, in host memory. Raises TrainError, UnknownScreenshot."""

    def evaluate(self, inputs: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the policy, float32 [T]."""

    def evaluate_reference(self, inputs: MicroBatch) -> torch.Tensor | None:
        """Log-probs of the reference model, float32 [T]; None without one."""

    def loss(self, part: list[Row], inputs: MicroBatch, totals: Totals, scores: Mapping[int, Score]) -> MicroLoss:
        """Raises NotFinite."""

    def forget_gradient(self) -> None:
        """Set it to nothing."""


class Scoring:
    """log π_old and entropy of every step, by `id` of its sample, in `scores`."""

    name, backward = "score", False

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.scores: dict[int, Score] = {}

    def begin(self) -> None:
        self.scores = {}

    def prepare(self, part: list[Row]) -> MicroBatch:
        return self._learner.prepare(part)

    @torch.no_grad()
    def compute(self, part: list[Row], inputs: MicroBatch) -> Callable[[], None]:
        inputs = inputs.to(self._learner.device)
        logprobs, entropy = self._learner.evaluate(inputs)
        if not part:
            return lambda: None
        check_finite(part, inputs.steps, logprobs + entropy, "its log-probs are not finite")
        entropies = inputs.steps.means(entropy).tolist()
        pieces = logprobs.split(inputs.steps.lengths.tolist())
        tokens = entropy.to("cpu", torch.float16).split(inputs.steps.lengths.tolist())
        scored = zip(samples_of(part), pieces, entropies, tokens, strict=True)
        scores = {id(sample): Score(piece, mean, each) for sample, piece, mean, each in scored}
        return lambda: self.scores.update(scores)


class Learning:
    """Each micro-batch's share of the gradient, and its metrics in `tally`."""

    name, backward = "loss", True

    def __init__(self, learner: Learner, totals: Totals, scores: Mapping[int, Score]) -> None:
        self._learner, self._totals, self._scores = learner, totals, scores
        self.tally = Tally()

    def begin(self) -> None:
        self._learner.forget_gradient()
        self.tally = Tally()

    def prepare(self, part: list[Row]) -> MicroBatch:
        return self._learner.prepare(part)

    def compute(self, part: list[Row], inputs: MicroBatch) -> Callable[[], None]:
        if not part:
            self._learner.evaluate_reference(inputs)
            logprobs, _ = self._learner.evaluate(inputs)
            nothing = logprobs.sum() * 0.0
            return nothing.backward  # type: ignore[no-any-return]
        inputs = inputs.to(self._learner.device)
        loss = self._learner.loss(part, inputs, self._totals, self._scores)
        return lambda: self._finish(loss)

    def _finish(self, loss: MicroLoss) -> None:
        loss.terms.loss.backward()
        tokens = self._totals.trained_tokens
        mean_entropy = loss.entropy.detach().sum() / tokens
        metrics = loss.terms.metrics | {"loss": loss.terms.loss.detach(), "entropy": mean_entropy}
        self.tally.count(loss.inputs, metrics, loss.difference, self._learner.version, tokens)
