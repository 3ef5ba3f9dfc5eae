"""One rank of the trainer: a batch of samples in, the next weight version out.

Ranks hold the same weights and each takes its own share of every batch. Gradients are summed over micro-batches and
then over ranks, and every mean is over the whole batch, so how a batch is cut and spread does not change the update.
Ranks may have different numbers of micro-batches, or no samples at all; all of them call `update` at the same time.

Weights are float32 masters; with `model.dtype` bfloat16 the forward pass runs under autocast and snapshots are
bfloat16. The weights below an adapter never change, and are held in `model.dtype`. With `trainer.sharding: full` each
rank holds a part of the weights, gradients and optimiser state, and ranks make their passes in step
(`dart.workers.train.sharding`); snapshots and checkpoints are then made by all ranks at once.
Methods are called from one thread (`cancel` from any).
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dart.algo.steps import Totals
from dart.config import TrainWorkerConfig
from dart.core.types import Sample, StepEntropy
from dart.screenshots.lookup import BadScreenshot
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as pb
from dart.wire.convert import image_from_proto, sample_from_proto
from dart.workers.train import batch as batches
from dart.workers.train import checkpoint, collectives, vision
from dart.workers.train.adapters import lora as adapters
from dart.workers.train.adapters.weights import copied, copied_adapter
from dart.workers.train.errors import CancelledUpdateError, NonFiniteError, SampleError, TrainError
from dart.workers.train.kernels import fused
from dart.workers.train.model import layout_of, load_banned_tokens, load_image_processor
from dart.workers.train.passes import parts
from dart.workers.train.passes.faults import Faults, MicroLoss, check_finite, micro_loss
from dart.workers.train.passes.operations import Operations
from dart.workers.train.passes.phases import GRADIENT, READ, REDUCE, SCORE, STEP, Phases
from dart.workers.train.passes.rounds import rehearse, work_through
from dart.workers.train.passes.settings import learning_rate, loss_recipe, make_optimizer
from dart.workers.train.passes.tally import Tally, selected, sized, summed
from dart.workers.train.passes.whole import Forward
from dart.workers.train.passes.works import Learning, Scoring
from dart.workers.train.policy import Blank, Policy
from dart.workers.train.screenshots import ProcessedScreenshots
from dart.workers.train.selection import Score, select, told

SKIPS_ALLOWED = 1
"""How many optimiser steps in a row may be skipped for a non-finite gradient before its cause is looked for."""


class Trainer:
    """Owns the model, the optimiser and the weight version."""

    def __init__(self, config: TrainWorkerConfig) -> None:
        """Load everything. Raises UserError for an unknown loss, or a folder that holds no checkpoint."""
        self.config = config
        settings = config.trainer
        self.recipe = loss_recipe(settings.loss, settings.minibatches)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.state = collectives.init()
        self.device = collectives.take(self.state.device)
        # An adapter belongs to the weights that the run began with; those of its checkpoints have it merged into them.
        self.folder = (None if settings.lora else config.resume_from) or config.model.folder
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.encoded = None if settings.vision_trains else vision.EncodedScreenshots(settings.encoded_cache_bytes)
        self._operations = Operations()
        self.sharded = (settings.sharding or ("full" if self.state.num_processes > 1 else "none")) == "full"
        if self.sharded:
            from dart.workers.train.sharding import load  # here, because what it needs of torch is newer than the rest
        else:
            from dart.workers.train.passes.whole import load
        ready = load(config, self.folder, self.device, self._make_policy)
        self.policy, self.reference, self._runner = ready.policy, ready.reference, ready.runner
        self.model = self.policy.model
        self._writers = collectives.group_of_all() if self.sharded else None
        if settings.gradient_checkpointing:
            # Checkpointing works only in training mode; these models have no dropout unless their config says so.
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.layout = layout_of(self.model, self.folder)
        shared = SharedScreenshots.seen(config.shared_blobs)
        self.screenshots = ProcessedScreenshots(
            load_image_processor(self.folder), settings.image_cache_bytes, shared, settings.image_threads
        )
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(self.parameters, settings)
        self.updates = 0
        self.version = 0
        self._digest = adapters.digest_of_base(self.model, self.dtype) if settings.lora else ""
        if config.resume_from is not None:
            adapters.check_resumed(config.resume_from, settings.lora, self._digest)
            self.updates, self.version = checkpoint.resume(config.resume_from, self.model, self.optimizer)
        self.token_limit = settings.microbatch_tokens
        """The most tokens of a micro-batch; lowered to half of the smallest one that ran out of memory."""
        self.remarks: list[str] = []
        """What was left out of the last update or skipped, and why."""
        self.step_entropies: list[StepEntropy] = []
        """Entropies of the last update's steps on this rank; empty where every step trains."""
        self._skipped_in_a_row = 0
        self._phases = Phases(self.device)
        self._cancelled = threading.Event()
        for work in (Learning(self, Totals(1, 1, 1), {}), Scoring(self)):
            rehearse(work, self._runner)

    @property
    def rank(self) -> int:
        return int(self.state.process_index)

    def cancel(self) -> None:
        """End a running update before its next micro-batch; it raises CancelledUpdateError."""
        self._cancelled.set()

    def learning_rate(self, update: int) -> float:
        """For the update with this index, from 0."""
        return learning_rate(self.config.trainer, update, self.config.total_updates)

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
        phases = self._phases = Phases(self.device)
        self._operations.begin()
        with phases.timed(READ):
            minibatches = collectives.together(lambda: self._read(samples, images), "read its samples", self.device)
        minibatches, totals = sized(minibatches, total_samples, total_tokens, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.updates)
        faults = Faults()
        self.step_entropies = []
        scores: dict[int, Score] = {}
        metrics: dict[str, float] = {}
        if settings.loss.entropy_quantile > 0:
            scores = self._score(minibatches, faults, refuse=True)
            minibatches = [batches.without(rows, faults.left_out) for rows in minibatches]
            offered = minibatches
            minibatches, metrics = select(minibatches, scores, settings.loss.entropy_quantile)
            self.step_entropies = told(offered, minibatches, scores)
            totals = selected(totals, minibatches, self.device)
        elif len(minibatches) > 1:
            # The first minibatch's own forward pass, detached, is its π_old: exact, and it saves one pass.
            scores = self._score(minibatches[1:], faults, refuse=False)

        tallies, norms = list[Tally](), list[float]()
        for rows, total in zip(minibatches, totals, strict=True):
            try:
                tally, norm = self._optimiser_step(rows, total, scores, faults, first=not norms)
            except TrainError as error:
                error.weights_changed = bool(norms)
                raise
            tallies.append(tally)
            norms += [] if norm is None else [norm]
        self.updates += 1
        self.version += 1
        self.remarks = faults.remarks
        self.token_limit = faults.within(self.token_limit)
        metrics |= self._metrics(tallies)
        (metrics["samples_left_out"],) = collectives.all_sum([len(faults.left_out)], self.device)
        metrics["steps_taken"] = len(norms)
        metrics["steps_skipped"] = len(tallies) - len(norms)
        metrics["gradient_norm"] = sum(norms) / max(1, len(norms))
        metrics["learning_rate"] = self.learning_rate(self.updates - 1)
        metrics |= phases.metrics() | self._operations.metrics(self.model, settings.passes, self.device)
        metrics["update_seconds"] = time.perf_counter() - started
        return metrics

    def _read(self, messages: Sequence[pb.Sample], images: Iterable[ipb.Image]) -> batches.Batches:
        """The checked samples, in rows and minibatches."""
        carried = itertools.chain(images, (image for message in messages for image in message.images if image.data))
        held = {image.sha256: image_from_proto(image) for image in carried}
        samples = [sample_from_proto(message, held) for message in messages]
        for sample in samples:
            batches.check(sample, self.layout)
        self.screenshots.check_there({i.sha256: i for sample in samples for i in sample.images}.values())
        return self._deal(batches.make_rows(samples, self.token_limit, self.layout))

    def _deal(self, rows: list[batches.Row]) -> batches.Batches:
        """Assign rows to minibatches, at random but the same every time; ranks begin with different ones."""
        count = self.config.trainer.minibatches
        if count > 1:
            random.Random(f"{self.config.seed}/{self.updates}/{self.rank}").shuffle(rows)
        return [rows[(number + self.rank) % count :: count] for number in range(count)]

    def _score(self, minibatches: batches.Batches, faults: Faults, refuse: bool) -> dict[int, Score]:
        """log π_old and entropy of steps before the first optimiser step, by `id`. refuse: as `_check_some_left`."""
        rows = [row for rows in minibatches for row in rows]
        work = Scoring(self)
        cut = self._cut(rows, faults)
        with self._phases.timed(SCORE):
            collectives.together(lambda: work_through(cut, work, faults, self._runner), "score its share", self.device)
        self._check_some_left(rows, faults, refuse)
        return work.scores

    def _optimiser_step(
        self, rows: list[batches.Row], totals: Totals, scores: dict[int, Score], faults: Faults, first: bool
    ) -> tuple[Tally, float | None]:
        """Accumulate over micro-batches, add over ranks, clip, step. Returns this minibatch's metrics and its norm.

        The norm is None where the step was skipped. `first`: no minibatch of the update has changed the weights yet.
        """
        work = Learning(self, totals, scores)
        cut = self._cut(rows, faults)
        with self._phases.timed(GRADIENT):
            collectives.together(lambda: work_through(cut, work, faults, self._runner), "finish its share", self.device)
        if not self._check_some_left(rows, faults, refuse=first):
            faults.remark("nothing of a minibatch was left to train on: the optimiser's step was skipped")
            return work.tally, None
        with self._phases.timed(REDUCE):
            norm = self._gradient_over_ranks()
        if not bool(torch.isfinite(norm)):
            self._skip(float(norm), rows, totals, scores, faults, first)
            return work.tally, None
        self._skipped_in_a_row = 0
        with self._phases.timed(STEP):
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.trainer.gradient_clip, norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return work.tally, float(norm)

    def _gradient_over_ranks(self) -> torch.Tensor:
        """Sum the gradients over ranks, which sharded ones are already. Returns their norm."""
        if not self.sharded:
            for parameter in self.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            collectives.add_tensors([parameter.grad for parameter in self.parameters])
        return parts.total_norm([p.grad for p in self.parameters if p.grad is not None])

    def _check_some_left(self, rows: list[batches.Row], faults: Faults, refuse: bool) -> bool:
        """Whether any sample of the rows is left, over all ranks. If none is, the cause is looked for.

        Raises NonFiniteError if the weights are the cause. If the samples are, raises SampleError if `refuse`, which is
        not for rows beside which others have been trained on, or still can be.
        """
        here = batches.samples_of(rows)
        left_out = [sample for sample in here if id(sample) in faults.left_out]
        bad, steps = collectives.all_sum([float(len(left_out)), float(len(here))], self.device)
        if bad < steps or not steps:  # left out before, or not selected
            return bad < steps
        if not parts.all_finite(self.parameters, self.device):
            raise NonFiniteError("the weights are not finite: resume from a checkpoint")
        if refuse:
            blamed = sorted(set[str]().union(*collectives.all_gather(batches.trajectories(left_out))))
            fits = " and fits the device's memory" if faults.no_memory else ""
            raise SampleError(
                f"the weights are finite, but no sample of a minibatch gives finite numbers{fits}: {blamed}", blamed
            )
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
        blamed = sorted(set[str]().union(*collectives.all_gather(batches.trajectories(culprits))))
        bad, steps = collectives.all_sum([float(len(culprits)), float(batches.steps(rows))], self.device)
        repeated = f"the gradient's norm was {norm} at {self._skipped_in_a_row} steps in a row"
        if not bad or bad == steps:
            raise NonFiniteError(
                f"{repeated}, and {'every sample' if bad else 'no sample'} alone gives such a gradient, so the weights "
                "are at fault: resume from an earlier checkpoint, with a lower trainer.learning_rate"
            )
        groups = sorted({sample.group_id for sample in culprits})
        of_groups = f" of groups {', '.join(groups)}" if groups else ""
        raise SampleError(f"{repeated}: the cause is trajectories {', '.join(blamed)}{of_groups}", blamed)

    def _culprits(self, rows: list[batches.Row], totals: Totals, scores: dict[int, Score]) -> list[Sample]:
        """The samples of this rank whose own gradient is not finite; this takes one backward pass each.

        Where passes are in step, each rank's next sample is tried together with those of the others, and only if
        that fails each of them by itself.
        """
        alone = [[batches.Row.of([branch.keyed])] for row in rows for branch in row.branches]
        count, turns = len(alone), [self.rank]
        if self.sharded:
            count = int(collectives.all_max([float(count)], self.device)[0])
            turns = list(range(int(self.state.num_processes)))

        def finite(part: list[batches.Row]) -> bool:
            work_through([part] if part else [], Learning(self, totals, scores), Faults(), self._runner)
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            return not gradients or bool(torch.isfinite(parts.total_norm(gradients)))

        found = []
        for number in range(count):
            part = alone[number] if number < len(alone) else []
            if finite(part):
                continue
            for rank in turns:
                if not finite(part if rank == self.rank else []) and rank == self.rank:
                    found += batches.samples_of(part)
        self.optimizer.zero_grad(set_to_none=True)
        return found

    # ---- what the passes need ----

    def prepare(self, part: list[batches.Row]) -> batches.MicroBatch:
        """The part's inputs, in host memory. Raises SampleError, UnknownScreenshot, CancelledUpdateError."""
        if self._cancelled.is_set():
            raise CancelledUpdateError("the worker is closing")
        return self._collate(part)

    def evaluate(self, inputs: batches.MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's log-probs and entropies, float32 [T]."""
        return self._forward(self.policy, inputs)

    @torch.no_grad()
    def evaluate_reference(self, inputs: batches.MicroBatch) -> torch.Tensor | None:
        """The reference model's log-probs, float32 [T]; None without one."""
        return None if self.reference is None else self._forward(self.reference, inputs)[0]

    def loss(
        self, part: list[batches.Row], inputs: batches.MicroBatch, totals: Totals, scores: Mapping[int, Score]
    ) -> MicroLoss:
        """Raises NotFinite with the samples whose log-probs or loss are not finite."""
        # Before the policy's pass, as `SwitchedOff` asks.
        reference = self.evaluate_reference(inputs)
        new, entropy = self.evaluate(inputs)
        check_finite(part, inputs.steps, new + entropy, "its log-probs are not finite")
        samples = batches.samples_of(part)
        old = torch.cat([scores[id(one)].logprobs for one in samples]) if id(samples[0]) in scores else new.detach()
        if reference is not None:
            check_finite(part, inputs.steps, reference, "the reference model's log-probs are not finite")
        return micro_loss(self.recipe, part, inputs, totals, new, old, entropy, reference)

    def forget_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

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
            raise SampleError(f"{blamed[0].name}: {error}", batches.trajectories(blamed)) from error
        return batches.collate(rows, screenshots, self.layout)

    def _cut(self, rows: list[batches.Row], faults: Faults) -> batches.Batches:
        """Micro-batches, of sizes that have not been too large yet, whose screenshots are prepared from now on."""
        cut = batches.cut(rows, faults.within(self.token_limit))
        self.screenshots.ahead(image for part in cut for row in part for image in row.images)
        return cut

    def _make_policy(self, model: PreTrainedModel, blank: Blank | None) -> Policy:
        """The policy, or the reference if the model does not train."""
        banned = torch.tensor(load_banned_tokens(self.folder), dtype=torch.int64, device=self.device)
        trains = any(parameter.requires_grad for parameter in model.parameters())
        # The reference's tower never trains, and makes something else of a screenshot than the policy's.
        kept = self.encoded if trains else vision.EncodedScreenshots(self.config.trainer.encoded_cache_bytes)
        if self.config.trainer.freeze_vision and trains:
            vision.freeze(model)
        if self.config.trainer.fused_kernels and self.device.type == "cuda":
            fused.speed_up(model)
        entropy_gradient = self.recipe.entropy_coefficient > 0
        return Policy(
            model, self.config.temperature, banned, entropy_gradient=entropy_gradient, blank=blank, kept=kept,
            operations=self._operations,
        )  # fmt: skip

    def _forward(self, policy: Forward, inputs: batches.MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        # Sharded weights are gathered in the dtype in which they are used.
        autocast = self.dtype == torch.bfloat16 and not self.sharded
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            logprobs, entropy = policy(inputs.to(self.device))
        return logprobs, entropy

    # ---- weights for others ----

    def snapshot(self, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """A copy of the weights by their checkpoint names, in the model's dtype; training does not change it.

        `into`: an earlier copy that nobody needs any more, whose memory is used again. Sharded weights go into rank 0's
        copy: all ranks call this, and the others get nothing. An adapter is merged into what it belongs to.
        """
        return copied(self.model, self.dtype, self.rank == 0 or not self.sharded, into)

    def served(self, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """What replicas get of this version: `snapshot`, or the adapter alone in the same way."""
        copy = copied_adapter if self.config.trainer.serves_adapter else copied
        return copy(self.model, self.dtype, self.rank == 0 or not self.sharded, into)

    def save_checkpoint(self, path: Path) -> None:
        """Stage and write a checkpoint."""
        self.stage_checkpoint(path)()

    def stage_checkpoint(self, path: Path) -> Callable[[], None]:
        """Copy the trainer's state into host memory. What this returns writes it, from any thread, while others train.

        It writes a folder that `from_pretrained` loads and `resume_from` continues from; it is complete or absent.
        Sharded: all ranks call both at the same time, and write into one folder, which all of them must see.
        """
        source = self.config.model.folder  # the checkpoint that a run resumed from is deleted in time
        state = (self.model, self.dtype, self.optimizer, self.updates, self.version)
        saved = checkpoint.Saved(source, *state, self.config.trainer.lora, self._digest)
        if self._writers is not None:
            return checkpoint.stage_sharded(path, saved, self.snapshot, self.device, self._writers)
        return checkpoint.stage(path, saved, self.snapshot)
