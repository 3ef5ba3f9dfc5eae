"""One rank of the trainer: a batch of samples in, the next weight version out.

Ranks hold the same weights and each takes its own share of every batch. Gradients are summed over micro-batches and
then over ranks, and every mean is over the whole batch, so how a batch is cut and spread does not change the update.
Ranks may have different numbers of micro-batches, or no samples at all; all of them call `update` at the same time.

Weights are float32 masters; with `model.dtype` bfloat16 the forward pass runs under autocast and snapshots are
bfloat16. Methods are called from one thread (`cancel` from any).
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from dart.algo import objectives
from dart.algo.loss import Recipe
from dart.algo.steps import Totals
from dart.config import Loss, TrainWorkerConfig
from dart.core.types import Sample
from dart.errors import UserError
from dart.screenshots.lookup import BadScreenshot
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as pb
from dart.wire.convert import image_from_proto, sample_from_proto
from dart.workers.train import batch as batches
from dart.workers.train import checkpoint, collectives
from dart.workers.train.errors import CancelledUpdateError, NonFiniteError, SampleError, TrainError
from dart.workers.train.faults import Faults, MicroLoss, check_finite, micro_loss
from dart.workers.train.model import forward, load_banned_tokens, load_image_processor, load_model, pairs_per_token
from dart.workers.train.screenshots import ProcessedScreenshots
from dart.workers.train.selection import Score, select
from dart.workers.train.tally import Tally, summed

SKIPS_ALLOWED = 1
"""How many optimiser steps in a row may be skipped for a non-finite gradient before its cause is looked for."""


class Trainer:
    """Owns the model, the optimiser and the weight version."""

    def __init__(self, config: TrainWorkerConfig) -> None:
        """Load everything. Raises UserError for an unknown loss, or a folder that holds no checkpoint."""
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
            # Checkpointing works only in training mode; these models have no dropout unless their config says so.
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.reference: PreTrainedModel | None = None
        if settings.loss.kl_coefficient > 0:
            # Float32 under the same autocast, so that the KL to it is exactly 0 at the start.
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
            pairs_per_token=pairs_per_token(self.model),
        )
        self._banned = torch.tensor(self.layout.banned, dtype=torch.int64, device=self.device)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                # Norms and biases have no weight decay.
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
        self.remarks: list[str] = []
        """What was left out of the last update or skipped, and why."""
        self._skipped_in_a_row = 0
        self._cancelled = threading.Event()

    @property
    def rank(self) -> int:
        return int(self.state.process_index)

    def cancel(self) -> None:
        """End a running update before its next micro-batch; it raises CancelledUpdateError."""
        self._cancelled.set()

    def learning_rate(self, update: int) -> float:
        """For the update with this index (from 0): up in equal steps over the warm-up, to its full value at the first
        update after that; from there linear to the last update, or constant without a last."""
        settings, total = self.config.trainer, self.config.total_updates
        warmup = settings.warmup_updates
        if update < warmup:
            return settings.learning_rate * (update + 1) / (warmup + 1)
        if total is None:
            return settings.learning_rate
        progress = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
        return settings.learning_rate * (1 - (1 - settings.final_learning_rate_fraction) * progress)

    # ---- one update ----

    def update(
        self, samples: Sequence[pb.Sample], total_samples: int, total_tokens: int, images: Iterable[ipb.Image] = ()
    ) -> dict[str, float]:
        """Train on this rank's share of a batch of `total_samples` with `total_tokens` response tokens; gives metrics.

        `images`: screenshots with their bytes, which samples may name by digest alone. `remarks` then says what was
        left out of the update or skipped. Raises SampleError (some samples are wrong; it names them), NonFiniteError
        (the weights are not finite), CancelledUpdateError or TrainError; if any rank has to give up, all do. The
        weights are then unchanged, unless the error says `weights_changed`.
        """
        started = time.perf_counter()
        settings = self.config.trainer
        minibatches = collectives.together(lambda: self._read(samples, images), "read its samples", self.device)
        totals = self._totals(minibatches, total_samples, total_tokens)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.updates)

        faults = Faults()
        scores: dict[int, Score] = {}
        metrics: dict[str, float] = {}
        if settings.loss.entropy_quantile > 0:
            scores = self._score(minibatches, faults)
            minibatches = [batches.without(rows, faults.left_out) for rows in minibatches]
            minibatches, metrics = select(minibatches, scores, settings.loss.entropy_quantile)
            totals = self._trained(totals, minibatches)
        elif settings.minibatches > 1:
            # The first minibatch's own forward pass, detached, is its π_old: exact, and it saves one pass.
            scores = self._score(minibatches[1:], faults)

        tallies = []
        norms = []
        for number, (rows, total) in enumerate(zip(minibatches, totals, strict=True)):
            try:
                tally, norm = self._optimiser_step(rows, total, scores, faults, first=number == 0)
            except TrainError as error:
                error.weights_changed = number > 0
                raise
            tallies.append(tally)
            norms += [] if norm is None else [norm]
        self.updates += 1
        self.version += 1
        self.remarks = faults.remarks
        metrics |= self._metrics(tallies)
        (metrics["samples_left_out"],) = collectives.add([len(faults.left_out)], self.device)
        metrics["steps_taken"] = len(norms)
        metrics["steps_skipped"] = len(tallies) - len(norms)
        metrics["gradient_norm"] = sum(norms) / max(1, len(norms))
        metrics["learning_rate"] = self.learning_rate(self.updates - 1)
        metrics["update_seconds"] = time.perf_counter() - started
        return metrics

    def _read(self, messages: Sequence[pb.Sample], images: Iterable[ipb.Image]) -> list[list[batches.Row]]:
        """The checked samples, in rows and minibatches."""
        carried = itertools.chain(images, (image for message in messages for image in message.images if image.data))
        held = {image.sha256: image_from_proto(image) for image in carried}
        samples = [sample_from_proto(message, held) for message in messages]
        for sample in samples:
            batches.check(sample, self.layout)
        self.screenshots.check_there({i.sha256: i for sample in samples for i in sample.images}.values())
        return self._deal(batches.make_rows(samples, self.config.trainer.microbatch_tokens, self.layout))

    def _deal(self, rows: list[batches.Row]) -> list[list[batches.Row]]:
        """Assign rows to minibatches, at random but the same every time."""
        count = self.config.trainer.minibatches
        if count > 1:
            random.Random(f"{self.config.seed}/{self.updates}/{self.rank}").shuffle(rows)
        return [rows[number::count] for number in range(count)]

    def _totals(self, minibatches: list[list[batches.Row]], total_samples: int, total_tokens: int) -> list[Totals]:
        """The totals of each minibatch over all ranks; they must add up to what the coordinator counted."""
        counts = [float(count) for rows in minibatches for count in (_steps(rows), _tokens(rows))]
        summed = [int(count) for count in collectives.add(counts, self.device)]
        totals = [Totals(steps, tokens, tokens) for steps, tokens in zip(summed[::2], summed[1::2], strict=True)]
        samples, tokens = sum(summed[::2]), sum(summed[1::2])
        if (samples, tokens) != (total_samples, total_tokens):
            raise SampleError(
                f"the ranks got {samples} samples with {tokens} tokens, but the batch should have "
                f"{total_samples} with {total_tokens}"
            )
        if any(total.steps == 0 for total in totals):
            raise SampleError(f"{samples} samples are too few for {len(totals)} minibatches")
        return totals

    def _trained(self, totals: list[Totals], minibatches: list[list[batches.Row]]) -> list[Totals]:
        """The totals with the tokens that selection kept. If it kept none, nothing is divided by them."""
        left = collectives.add([float(_tokens(rows)) for rows in minibatches], self.device)
        return [replace(total, trained_tokens=max(1, int(t))) for total, t in zip(totals, left, strict=True)]

    def _score(self, minibatches: list[list[batches.Row]], faults: Faults) -> dict[int, Score]:
        """log π_old and entropy of every step before the first optimiser step, by `id` of the sample."""
        rows = [row for rows in minibatches for row in rows]

        def work() -> dict[int, Score]:
            scores: dict[int, Score] = {}
            for part in batches.cut(rows, self.config.trainer.microbatch_tokens):
                scores |= faults.finite(part, self._scores) or {}
            return scores

        scores = collectives.together(work, "score its share", self.device)
        self._check_some_left(rows, faults, first=True)
        return scores

    @torch.no_grad()
    def _scores(self, part: list[batches.Row]) -> dict[int, Score]:
        inputs, logprobs, entropy = self._policy(part)
        entropies = inputs.steps.means(entropy).tolist()
        pieces = logprobs.split(inputs.steps.lengths.tolist())
        return {id(s): Score(piece, h) for s, piece, h in zip(batches.samples_of(part), pieces, entropies, strict=True)}

    def _optimiser_step(
        self, rows: list[batches.Row], totals: Totals, scores: dict[int, Score], faults: Faults, first: bool
    ) -> tuple[Tally, float | None]:
        """Accumulate over micro-batches, add over ranks, clip, step. Returns this minibatch's metrics and its norm.

        The norm is None where the step was skipped. `first`: no minibatch of the update has changed the weights yet.
        """
        tally = Tally()

        def work() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            for part in batches.cut(rows, self.config.trainer.microbatch_tokens):
                self._accumulate(part, totals, scores, tally, faults)

        collectives.together(work, "finish its share", self.device)
        if not self._check_some_left(rows, faults, first):
            return tally, None
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters]
        collectives.add_tensors(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):
            self._skip(float(norm), rows, totals, scores, faults, first)
            return tally, None
        self._skipped_in_a_row = 0
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.trainer.gradient_clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tally, float(norm)

    def _check_some_left(self, rows: list[batches.Row], faults: Faults, first: bool) -> bool:
        """Whether any sample of the minibatch is left, over all ranks. If none is, the cause is looked for.

        Raises NonFiniteError if the weights are the cause, and SampleError if the samples are and none of the update
        has been applied.
        """
        here = batches.samples_of(rows)
        left_out = [sample for sample in here if id(sample) in faults.left_out]
        bad, steps = collectives.add([float(len(left_out)), float(len(here))], self.device)
        if not bad or bad < steps:
            return True
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.parameters):
            raise NonFiniteError("the weights are not finite: resume from a checkpoint")
        if first:
            blamed = sorted({name for names in collectives.gather(_trajectories(left_out)) for name in names})
            raise SampleError(
                f"the weights are finite, but no sample of the batch gives finite numbers: {blamed}", blamed
            )
        faults.remark("no sample of a minibatch gave finite numbers: the optimiser's step was skipped")
        return False

    def _skip(
        self,
        norm: float,
        rows: list[batches.Row],
        totals: Totals,
        scores: dict[int, Score],
        faults: Faults,
        first: bool,
    ) -> None:
        """Leave the weights as they are. If that repeats, raises SampleError naming the samples that cause it, or
        NonFiniteError if no sample does, or all do."""
        self.optimizer.zero_grad(set_to_none=True)
        self._skipped_in_a_row += 1
        faults.remark(f"the gradient's norm is {norm}: the optimiser's step was skipped")
        if self._skipped_in_a_row < SKIPS_ALLOWED + 1 or not first:
            return
        culprits = collectives.together(lambda: self._culprits(rows, totals, scores), "look for the cause", self.device)
        blamed = sorted({name for names in collectives.gather(_trajectories(culprits)) for name in names})
        bad, steps = collectives.add([float(len(culprits)), float(_steps(rows))], self.device)
        if not bad or bad == steps:
            raise NonFiniteError(
                f"the gradient's norm was {norm} after {SKIPS_ALLOWED} skipped steps, and no sample alone is the cause"
            )
        groups = sorted({sample.group_id for sample in culprits})
        raise SampleError(
            f"the gradient's norm was {norm} after {SKIPS_ALLOWED} skipped steps: the cause is trajectories "
            f"{', '.join(blamed)}" + (f" of groups {', '.join(groups)}" if groups else ""),
            blamed,
        )

    def _culprits(self, rows: list[batches.Row], totals: Totals, scores: dict[int, Score]) -> list[Sample]:
        """The samples whose own gradient is not finite; this takes one backward pass each."""
        found = []
        for branch in (branch for row in rows for branch in row.branches):
            self.optimizer.zero_grad(set_to_none=True)
            self._accumulate([batches.Row.of([branch.keyed])], totals, scores, Tally(), Faults())
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            if gradients and not bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients))):
                found.append(branch.sample)
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _accumulate(
        self, part: list[batches.Row], totals: Totals, scores: dict[int, Score], tally: Tally, faults: Faults
    ) -> None:
        """Add one micro-batch's share of the gradient, without the samples whose loss is not finite."""
        loss = faults.finite(part, lambda left: self._loss(left, totals, scores))
        if loss is None:
            return
        loss.terms.loss.backward()
        mean_entropy = loss.entropy.detach().sum() / totals.trained_tokens
        metrics = loss.terms.metrics | {"loss": loss.terms.loss.detach(), "entropy": mean_entropy}
        tally.count(loss.inputs, metrics, loss.difference, self.version, totals.trained_tokens)

    def _loss(self, part: list[batches.Row], totals: Totals, scores: dict[int, Score]) -> MicroLoss:
        """Raises NotFinite with the samples whose loss is not finite."""
        inputs, new, entropy = self._policy(part)
        samples = batches.samples_of(part)
        old = torch.cat([scores[id(one)].logprobs for one in samples]) if id(samples[0]) in scores else new.detach()
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self._forward(self.reference, inputs)
            check_finite(part, inputs.steps, reference, "the reference model's log-probs are not finite")
        return micro_loss(self.recipe, part, inputs, totals, new, old, entropy, reference)

    def _policy(self, part: list[batches.Row]) -> tuple[batches.MicroBatch, torch.Tensor, torch.Tensor]:
        """Inputs of one micro-batch, and the current policy's log-probs and entropies of their tokens.

        Raises NotFinite.
        """
        if self._cancelled.is_set():
            raise CancelledUpdateError("the worker is closing")
        inputs = self._collate(part)
        logprobs, entropy = self._forward(self.model, inputs)
        check_finite(part, inputs.steps, logprobs + entropy, "its log-probs are not finite")
        return inputs, logprobs, entropy

    def _metrics(self, tallies: list[Tally]) -> dict[str, float]:
        metrics = summed(tallies, self.device)
        if self.reference is None:
            del metrics["kl_reference"]
        if self.recipe.importance == "none":
            del metrics["importance_weight"], metrics["importance_truncated"]
        return metrics

    def _collate(self, rows: list[batches.Row]) -> batches.MicroBatch:
        try:
            screenshots = self.screenshots.get(image for row in rows for image in row.images)
        except BadScreenshot as error:
            blamed = [s for s in batches.samples_of(rows) if any(image.sha256 == error.digest for image in s.images)]
            raise SampleError(f"{blamed[0].name}: {error}", _trajectories(blamed)) from error
        return batches.collate(rows, screenshots, self.layout).to(self.device)

    def _forward(self, model: PreTrainedModel, inputs: batches.MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            entropy_gradient = self.recipe.entropy_coefficient > 0
            return forward(model, inputs, self.config.temperature, self._banned, entropy_gradient=entropy_gradient)

    # ---- weights for others ----

    @torch.no_grad()
    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of the weights by their checkpoint names, in the model's dtype; training does not change it."""
        return {
            name: parameter.detach().to("cpu", self.dtype, copy=True)
            for name, parameter in self.model.named_parameters()
        }

    def save_checkpoint(self, path: Path) -> None:
        """Write a folder that `from_pretrained` loads and `resume_from` continues from; it is complete or absent."""
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
    """The loss that the configuration describes. Raises UserError if it names a function that does not exist."""
    try:
        objective = objectives.find(loss.kind)
    except ValueError as error:
        raise UserError(f"trainer.loss.kind: {error}") from error
    return Recipe(objective=objective, **loss.model_dump(exclude={"kind", "entropy_quantile"}))


def _trajectories(samples: Iterable[Sample]) -> list[str]:
    return sorted({sample.trajectory_id for sample in samples})


def _steps(rows: list[batches.Row]) -> int:
    return sum(len(row.branches) for row in rows)


def _tokens(rows: list[batches.Row]) -> int:
    return sum(len(sample.generation.token_ids) for row in rows for sample in row.samples)
