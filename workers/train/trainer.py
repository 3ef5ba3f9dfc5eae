"""One rank of the trainer: a batch of samples in, the next weight version out.

Ranks hold the same weights and each takes its own share of every batch. Gradients are summed over micro-batches and
then over ranks, and every mean is over the whole batch, so how a batch is cut and spread does not change the update.
Ranks may have different numbers of micro-batches, or no samples at all; all of them call `update` at the same time.

Weights are float32 masters; with `model.dtype` bfloat16 the forward pass runs under autocast and snapshots are
bfloat16. Methods are called from one thread (`cancel` from any).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from dart.algo import objectives
from dart.algo.loss import Recipe, policy_loss
from dart.algo.steps import Totals
from dart.config import Loss, TrainWorkerConfig
from dart.errors import UserError
from dart.screenshots.lookup import BadScreenshot, UnknownScreenshot
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import session_pb2 as pb
from dart.wire.convert import image_from_proto
from dart.workers.train import batch as batches
from dart.workers.train import checkpoint, collectives
from dart.workers.train.errors import (
    CancelledUpdateError,
    NonFiniteError,
    SampleError,
    TrainError,
    UnknownScreenshotError,
)
from dart.workers.train.model import forward, load_banned_tokens, load_image_processor, load_model
from dart.workers.train.screenshots import ProcessedScreenshots
from dart.workers.train.selection import Score, select

MEANS = (
    "loss", "entropy", "clip_fraction", "ratio", "importance_weight", "importance_truncated", "kl_old", "kl_reference",
    "staleness", "logprob_difference",
)  # fmt: skip
"""Metrics that are shares of a mean: added over micro-batches and ranks. The loss is over the batch, all else over the
tokens that train, which high-entropy selection makes fewer."""
COUNTS = ("real_tokens", "padded_tokens", "rows", "microbatches", "same_version_tokens", "same_version_difference")
LARGEST = ("same_version_difference_max",)


@dataclass
class _Tally:
    """Sums and maxima of one rank over one minibatch."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEANS + COUNTS, 0.0))
    largest: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LARGEST, 0.0))


class Trainer:
    """Owns the model, the optimiser and the weight version."""

    def __init__(self, config: TrainWorkerConfig) -> None:
        """Load everything. Raises UserError for a loss that is not there, or a folder that holds no checkpoint."""
        self.config = config
        settings = config.trainer
        self.recipe = loss_recipe(settings.loss)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.state = PartialState(cpu=not torch.cuda.is_available())
        self.device: torch.device = self.state.device
        self.folder = config.resume_from or config.model.folder
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.model = load_model(self.folder, self.device)
        if settings.gradient_checkpointing:
            # Checkpointing is only done in training mode; these models have no dropout unless their config says so.
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.reference: Any = None
        if settings.loss.kl_coefficient > 0:
            # In float32 under the same autocast, so that the KL to it is exactly 0 at the start.
            self.reference = load_model(config.model.folder, self.device).requires_grad_(False)
        self.screenshots = ProcessedScreenshots(
            load_image_processor(self.folder), shared=SharedScreenshots.seen(config.shared_blobs)
        )
        text = self.model.config.get_text_config()
        self.layout = batches.Layout(
            vocab_size=text.vocab_size,
            image_token_id=self.model.config.image_token_id,
            merge_size=self.model.config.vision_config.spatial_merge_size,
            banned=load_banned_tokens(self.folder),
        )
        self._banned = torch.tensor(self.layout.banned, dtype=torch.int64, device=self.device)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                # Norms and biases are not decayed.
                {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
                {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_epsilon,
            fused=True,
        )
        self.updates = 0
        self.version = 0
        if config.resume_from is not None:
            self.updates, self.version = checkpoint.resume(config.resume_from, self.model, self.optimizer)
        self._cancelled = threading.Event()

    @property
    def rank(self) -> int:
        return int(self.state.process_index)

    def cancel(self) -> None:
        """End a running update before its next micro-batch; it raises CancelledUpdateError."""
        self._cancelled.set()

    def learning_rate(self, update: int) -> float:
        """Of the update with this index from 0: linear from the first to the last, constant without a last."""
        settings, total = self.config.trainer, self.config.total_updates
        if total is None:
            return settings.learning_rate
        progress = min(1.0, update / max(1, total - 1))
        return settings.learning_rate * (1 - (1 - settings.final_learning_rate_fraction) * progress)

    # ---- one update ----

    def update(self, samples: Sequence[pb.Sample], total_samples: int, total_tokens: int) -> dict[str, float]:
        """Train on this rank's share of a batch of `total_samples` with `total_tokens` response tokens.

        Raises SampleError (a sample is wrong), NonFiniteError or CancelledUpdateError; when any rank has to give up,
        all do. The weights are then as they were, unless the error says `weights_changed`.
        """
        started = time.perf_counter()
        settings = self.config.trainer
        problem: TrainError | None = None
        minibatches: list[list[batches.Row]] = [[] for _ in range(settings.minibatches)]
        try:
            held = {i.sha256: image_from_proto(i) for sample in samples for i in sample.images if i.data}
            steps = [batches.read_sample(sample, self.layout, held) for sample in samples]
            self.screenshots.check_there({image.sha256: image for step in steps for image in step.images}.values())
            minibatches = self._deal(batches.make_rows(steps, settings.microbatch_tokens))
        except TrainError as error:
            problem = error
        except UnknownScreenshot as error:
            problem = UnknownScreenshotError(str(error))
        self._raise_together(problem, "read its samples")
        totals = self._totals(minibatches, total_samples, total_tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.updates)

        scores: dict[int, Score] = {}
        metrics: dict[str, float] = {}
        if settings.loss.entropy_quantile > 0:
            scores = self._score(minibatches)
            minibatches, metrics = select(minibatches, scores, settings.loss.entropy_quantile)
            totals = self._trained(totals, minibatches)
        elif settings.minibatches > 1:
            # The first minibatch's own forward pass, detached, is its π_old: exact, and one pass less.
            scores = self._score(minibatches[1:])

        tallies = []
        norms = []
        for number, (rows, total) in enumerate(zip(minibatches, totals, strict=True)):
            try:
                tally, norm = self._optimiser_step(rows, total, scores)
            except TrainError as error:
                error.weights_changed = number > 0
                raise
            tallies.append(tally)
            norms.append(norm)
        self.updates += 1
        self.version += 1
        metrics |= self._metrics(tallies)
        metrics["gradient_norm"] = sum(norms) / len(norms)
        metrics["learning_rate"] = self.learning_rate(self.updates - 1)
        metrics["update_seconds"] = time.perf_counter() - started
        return metrics

    def _deal(self, rows: list[batches.Row]) -> list[list[batches.Row]]:
        """Rows to minibatches, at random but the same every time."""
        count = self.config.trainer.minibatches
        if count > 1:
            random.Random(f"{self.config.seed}/{self.updates}/{self.rank}").shuffle(rows)
        return [rows[number::count] for number in range(count)]

    def _raise_together(self, problem: TrainError | None, what: str) -> None:
        """Raise on every rank when any has a problem, so that none waits for another that gave up."""
        unknown_here = isinstance(problem, UnknownScreenshotError)
        failed, unknown = collectives.add([float(problem is not None), float(unknown_here)], self.device)
        if problem is not None and (not unknown or unknown_here):
            raise problem
        if unknown:
            # The same on every rank: the coordinator goes by whichever answer comes first.
            raise UnknownScreenshotError(f"another rank could not {what}: it lacks a screenshot")
        if failed:
            raise TrainError(f"another rank could not {what}")

    def _totals(self, minibatches: list[list[batches.Row]], total_samples: int, total_tokens: int) -> list[Totals]:
        """The totals of each minibatch over all ranks; what the coordinator counted must be there."""
        counts = [float(count) for rows in minibatches for count in (_steps(rows), _tokens(rows))]
        summed = [int(count) for count in collectives.add(counts, self.device)]
        totals = [Totals(steps, tokens, tokens) for steps, tokens in zip(summed[::2], summed[1::2], strict=True)]
        samples, tokens = sum(summed[::2]), sum(summed[1::2])
        if (samples, tokens) != (total_samples, total_tokens):
            raise SampleError(
                f"the ranks got {samples} samples with {tokens} tokens, the batch was said to have "
                f"{total_samples} with {total_tokens}"
            )
        if any(total.steps == 0 for total in totals):
            raise SampleError(f"{samples} samples are too few for {len(totals)} minibatches")
        return totals

    def _trained(self, totals: list[Totals], minibatches: list[list[batches.Row]]) -> list[Totals]:
        """The totals with the tokens that selection left over. Where it left none, nothing is divided by them."""
        left = collectives.add([float(_tokens(rows)) for rows in minibatches], self.device)
        return [replace(total, trained_tokens=max(1, int(t))) for total, t in zip(totals, left, strict=True)]

    def _score(self, minibatches: list[list[batches.Row]]) -> dict[int, Score]:
        """log π_old and entropy of every step, from before the first optimiser step, by id of the step."""
        scores: dict[int, Score] = {}
        problem: TrainError | None = None
        try:
            rows = [row for rows in minibatches for row in rows]
            for part in batches.cut(rows, self.config.trainer.microbatch_tokens):
                with torch.no_grad():
                    inputs, logprobs, entropy = self._policy(part)
                entropies = inputs.steps.means(entropy).tolist()
                pieces = logprobs.split(inputs.steps.lengths.tolist())
                steps = (step for row in part for step in row.steps)
                scores |= {id(s): Score(piece, h) for s, piece, h in zip(steps, pieces, entropies, strict=True)}
        except TrainError as error:
            problem = error
        self._raise_together(problem, "score its share")
        return scores

    def _optimiser_step(
        self, rows: list[batches.Row], totals: Totals, scores: dict[int, Score]
    ) -> tuple[_Tally, float]:
        """Accumulate over micro-batches, add over ranks, clip, step. Returns this minibatch's metrics and norm."""
        tally = _Tally()
        problem: TrainError | None = None
        self.optimizer.zero_grad(set_to_none=True)
        try:
            for part in batches.cut(rows, self.config.trainer.microbatch_tokens):
                self._accumulate(part, totals, scores, tally)
        except TrainError as error:
            problem = error
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._raise_together(problem, "finish its share")
        gradients = [parameter.grad for parameter in self.parameters]
        collectives.add_tensors(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"the gradient's norm is {float(norm)}: the weights were left as they were")
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.trainer.gradient_clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tally, float(norm)

    def _accumulate(self, part: list[batches.Row], totals: Totals, scores: dict[int, Score], tally: _Tally) -> None:
        inputs, new, entropy = self._policy(part)
        steps = [step for row in part for step in row.steps]
        old = torch.cat([scores[id(step)].logprobs for step in steps]) if id(steps[0]) in scores else new.detach()
        behaviour = torch.where(inputs.rescored, old, inputs.behaviour)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self._forward(self.reference, inputs)
        terms = policy_loss(
            self.recipe,
            new=new,
            old=old,
            behaviour=behaviour,
            advantages=inputs.advantages,
            steps=inputs.steps,
            totals=totals,
            reference=reference,
            entropy=entropy,
        )
        terms.loss.backward()
        mean_entropy = entropy.detach().sum() / totals.trained_tokens
        metrics = terms.metrics | {"loss": terms.loss.detach(), "entropy": mean_entropy}
        self._count(tally, inputs, metrics, old - behaviour, totals.trained_tokens)

    def _policy(self, part: list[batches.Row]) -> tuple[batches.MicroBatch, torch.Tensor, torch.Tensor]:
        """Inputs of one micro-batch, and log-probs and entropies of their tokens by the policy as it is."""
        if self._cancelled.is_set():
            raise CancelledUpdateError("the worker is closing")
        inputs = self._collate(part)
        logprobs, entropy = self._forward(self.model, inputs)
        if not bool(torch.isfinite(logprobs).all()):
            raise NonFiniteError(f"log-probs of {part[0].steps[0].name} or one beside it are not finite")
        return inputs, logprobs, entropy

    def _count(
        self,
        tally: _Tally,
        inputs: batches.MicroBatch,
        metrics: dict[str, torch.Tensor],
        difference: torch.Tensor,
        all_tokens: int,
    ) -> None:
        difference = difference.abs()
        # What was re-scored agrees with itself, which proves nothing.
        same = ((inputs.versions == self.version) & ~inputs.rescored).float()
        metrics["staleness"] = (self.version - inputs.versions).sum() / all_tokens
        metrics["logprob_difference"] = difference.sum() / all_tokens
        metrics["same_version_tokens"] = same.sum()
        metrics["same_version_difference"] = (same * difference).sum()
        names = list(metrics)
        values = torch.stack([metrics[name].float() for name in names] + [(same * difference).max()]).tolist()
        for name, value in zip(names, values, strict=False):
            tally.sums[name] += value
        (name,) = LARGEST
        tally.largest[name] = max(tally.largest[name], values[-1])
        tally.sums["real_tokens"] += inputs.real_tokens
        tally.sums["padded_tokens"] += inputs.padded_tokens
        tally.sums["rows"] += inputs.input_ids.shape[0]
        tally.sums["microbatches"] += 1

    def _metrics(self, tallies: list[_Tally]) -> dict[str, float]:
        names = MEANS + COUNTS
        summed = collectives.add([sum(t.sums[name] for t in tallies) for name in names], self.device)
        metrics = dict(zip(names, summed, strict=True))
        largest = collectives.largest([max(t.largest[name] for t in tallies) for name in LARGEST], self.device)
        metrics.update(zip(LARGEST, largest, strict=True))
        for name in MEANS:
            metrics[name] /= len(tallies)
        if self.reference is None:
            del metrics["kl_reference"]
        if self.recipe.importance == "none":
            del metrics["importance_weight"], metrics["importance_truncated"]
        metrics["padding_share"] = 1 - metrics.pop("real_tokens") / metrics.pop("padded_tokens")
        metrics["same_version_difference"] /= max(1.0, metrics["same_version_tokens"])
        return metrics

    def _collate(self, rows: list[batches.Row]) -> batches.MicroBatch:
        try:
            screenshots = self.screenshots.get(image for row in rows for image in row.images)
        except UnknownScreenshot as error:
            raise UnknownScreenshotError(str(error)) from error
        except BadScreenshot as error:
            having = [row.steps for row in rows if any(image.sha256 == error.digest for image in row.images)]
            blamed = [step for steps in having for step in steps]
            raise SampleError(f"{blamed[0].name}: {error}", [step.trajectory for step in blamed]) from error
        return batches.collate(rows, screenshots, self.layout).to(self.device)

    def _forward(self, model: Any, inputs: batches.MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            entropy_gradient = self.recipe.entropy_coefficient > 0
            return forward(model, inputs, self.config.temperature, self._banned, entropy_gradient=entropy_gradient)

    # ---- what others get of it ----

    @torch.no_grad()
    def snapshot(self) -> dict[str, torch.Tensor]:
        """The weights by their checkpoint names, in the model's dtype, copied: training leaves them alone."""
        return {
            name: parameter.detach().to("cpu", self.dtype, copy=True)
            for name, parameter in self.model.named_parameters()
        }

    def save_checkpoint(self, path: Path) -> None:
        """Write a folder that `from_pretrained` loads and `resume_from` goes on from. It is whole or not there."""
        checkpoint.save(
            path,
            source=self.config.model.folder,  # the checkpoint that a run resumed from is deleted in time
            model=self.model,
            weights=self.snapshot(),
            dtype=self.dtype,
            optimizer=self.optimizer,
            updates=self.updates,
            version=self.version,
        )


def loss_recipe(loss: Loss) -> Recipe:
    """The loss that the configuration describes. Raises UserError where it names a function that is not there."""
    try:
        objective = objectives.find(loss.kind)
    except ValueError as error:
        raise UserError(f"trainer.loss.kind: {error}") from error
    return Recipe(objective=objective, **loss.model_dump(exclude={"kind", "entropy_quantile"}))


def _steps(rows: list[batches.Row]) -> int:
    return sum(len(row.steps) for row in rows)


def _tokens(rows: list[batches.Row]) -> int:
    return sum(len(step.response) for row in rows for step in row.steps)
