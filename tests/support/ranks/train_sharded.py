"""One rank of `test_train_sharding`: `train_sharded.py FOLDER WINDOWED EARLIER OUT [CASE…]`, in a rank's environment.

Runs every case (or those named) in one process group and saves what each had. WINDOWED: a Qwen2.5-VL; EARLIER: a
checkpoint of one rank, after one update.
"""

from __future__ import annotations

import faulthandler
import hashlib
import math
import random
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from train_samples import PAD, mixed, sample, screenshot, settings, totals

from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as pb
from dart.workers.train import checkpoint
from dart.workers.train.errors import SampleError, TrainError
from dart.workers.train.trainer import Trainer

HANG_SECONDS = 1800
MARK = 77
"""The weight version of samples that come to no number."""
BASE: dict[str, Any] = {"learning_rate": 1e-4, "adam_epsilon": 1e-4, "microbatch_tokens": 120}
"""With this epsilon, rounding in a gradient near 0 does not become a step of its own."""
BOTH = {"entropy_quantile": 0.4, "kl_coefficient": 0.1}
TOO_LONG, LONG_ANSWER = "too long", "12345678901"
"""A sample, and its response, which is longer than all others."""


def batch() -> list[pb.Sample]:
    """Samples of different lengths; two have no image."""
    without = [sample(f"text-{n}", "say" + "!" * n, "12", 0.5, [], group="text") for n in range(2)]
    return [*mixed(groups=3), *without]


def with_long(advantage: float = 1.0) -> list[pb.Sample]:
    return [*batch(), sample(TOO_LONG, "go" * 60, LONG_ANSWER, advantage, [screenshot(7)], group="long")]


def cut_short(image: ipb.Image) -> None:
    image.data = image.data[: len(image.data) // 2]
    image.sha256 = hashlib.sha256(image.data).digest()


DAMAGE: dict[str, Callable[[pb.Sample], None]] = {
    "log-probs for": lambda one: one.logprobs.append(0.0),
    "advantage nan": lambda one: setattr(one, "advantage", math.nan),
    "token 9999": lambda one: one.prompt_token_ids.append(9999),
    "placeholders": lambda one: one.prompt_token_ids.insert(2, PAD),
    "cut short": lambda one: cut_short(one.images[0]),
}
"""What can be wrong with a sample that has a screenshot, by what its error says. The first three are seen when samples
are read, the others when inputs are made of them, between passes."""


def shared_out(samples: list[pb.Sample], rank: int, ranks: int) -> list[pb.Sample]:
    """The first rank has two samples, the last the long one too, if there is one."""
    if ranks == 1:
        return samples
    return samples[:2] if rank == 0 else samples[2:][rank - 1 :: ranks - 1]


def held(trainer: Trainer) -> dict[str, float]:
    """Which share of the weights and of Adam's moments this rank holds."""

    def here(tensor: torch.Tensor) -> int:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()

    whole = sum(parameter.numel() for parameter in trainer.parameters)
    moments = sum(here(state["exp_avg"]) + here(state["exp_avg_sq"]) for state in trainer.optimizer.state.values())
    return {"weights": sum(map(here, trainer.parameters)) / whole, "moments": moments / (2 * whole)}


def out_of_memory(trainer: Trainer, *, backward: bool, rows: int = 1, length: int = 10**9) -> None:
    """From now on a micro-batch of more rows than this, or as long as this, does not fit the memory of this rank."""
    first, last = trainer.model.get_decoder().layers

    def too_much(hidden: torch.Tensor) -> bool:
        return hidden.shape[0] > rows or hidden.shape[1] >= length

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        if too_much(args[0] if args else kwargs["hidden_states"]):
            raise torch.OutOfMemoryError("injected")

    def raising(_gradient: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    def after(_module: Any, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and too_much(hidden):
            hidden.register_hook(raising)

    if backward:
        last.register_forward_hook(after)
    else:
        first.register_forward_pre_hook(before, with_kwargs=True)


@torch.no_grad()
def logprobs_of(trainer: Trainer, samples: list[pb.Sample]) -> torch.Tensor:
    """Log-probs of all tokens, in one pass, which all ranks make with the same samples at the same time."""
    (rows,) = trainer._read(samples, ())
    return trainer.evaluate(trainer._collate(rows))[0]


class Cases:
    """Each method is a case, run by all ranks at the same time."""

    def __init__(self, folder: Path, windowed: Path, earlier: Path, out: Path) -> None:
        self._folder, self._windowed, self._earlier, self._out = folder, windowed, earlier, out
        self.rank = self.ranks = 0

    def trainer(self, **trainer: Any) -> Trainer:
        folder = trainer.pop("folder", self._folder)
        made = Trainer(settings(folder, **{**BASE, "sharding": "full", **trainer}))
        self.rank, self.ranks = made.rank, int(made.state.num_processes)
        return made

    def update(self, trainer: Trainer, samples: list[pb.Sample]) -> dict[str, float]:
        return trainer.update(shared_out(samples, self.rank, self.ranks), *totals(samples))

    def selection_and_kl(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, checkpointing in (("kept", False), ("checkpointed", True)):
            trainer = self.trainer(loss=BOTH, gradient_checkpointing=checkpointing)
            metrics = [self.update(trainer, batch()) for _ in range(3)]
            found[name] = {"weights": trainer.snapshot(), "metrics": metrics[-1], "held": held(trainer)}
        return found

    def nothing_on_one_rank(self) -> dict[str, Any]:
        trainer = self.trainer(gradient_checkpointing=True)
        samples = batch()
        for _ in range(2):
            metrics = trainer.update(samples if self.rank == 1 else [], *totals(samples))
        return {"weights": trainer.snapshot(), "metrics": metrics}

    def bad_data(self) -> dict[str, Any]:
        """For each of ten seeds one sample of one rank is damaged, and two trainers get the batch: it is met in the
        passes that score and in those that add to the gradient. Then both get a batch with nothing wrong."""
        trainers = {"both": self.trainer(loss=BOTH), "plain": self.trainer()}
        kinds, refused = list(DAMAGE), []
        for seed in range(10):
            draw, broken, kind = random.Random(seed), batch(), kinds[seed % len(kinds)]
            at = draw.randrange(self.ranks)
            one = draw.choice([one for one in shared_out(broken, at, self.ranks) if one.images])
            DAMAGE[kind](one)
            for trainer in trainers.values():
                try:
                    self.update(trainer, broken)
                except SampleError as error:
                    refused.append((kind, at, one.trajectory_id, str(error), error.trajectories))
        after = {name: (self.update(trainer, batch()), trainer.snapshot()) for name, trainer in trainers.items()}
        return {"refused": refused, "after": after, "versions": [trainer.version for trainer in trainers.values()]}

    def no_number(self) -> dict[str, Any]:
        """The last rank's long sample comes to no number."""
        trainer = self.trainer()
        forward = trainer._forward

        def broken(policy: Any, inputs: Any) -> Any:
            logprobs, entropy = forward(policy, inputs)
            long = inputs.steps.spread(inputs.steps.lengths) == len(LONG_ANSWER) + 1
            return torch.where(long & (inputs.load.tokens > 0), torch.nan, logprobs), entropy

        if self.rank == self.ranks - 1:
            trainer._forward = broken  # type: ignore[method-assign]
        metrics = self.update(trainer, with_long())
        return {"weights": trainer.snapshot(), "metrics": metrics, "remarks": trainer.remarks}

    def no_number_on_any_rank(self) -> dict[str, Any]:
        """Each rank has a sample that comes to no number, and stops before the reference's pass at the same time."""
        trainer = self.trainer(loss={"kl_coefficient": 0.1})
        forward = trainer._forward

        def broken(policy: Any, inputs: Any) -> Any:
            logprobs, entropy = forward(policy, inputs)
            return torch.where(inputs.versions == MARK, torch.nan, logprobs), entropy

        trainer._forward = broken  # type: ignore[method-assign]
        samples = batch()
        for number in (0, 2):
            samples[number].versions[0].version = MARK
        metrics = self.update(trainer, samples)
        return {"metrics": metrics, "remarks": trainer.remarks}

    def infinite_gradient(self) -> dict[str, Any]:
        """The last rank's long sample has an infinite gradient, in two updates; the third is without it."""
        trainer = self.trainer()
        forward = trainer._forward

        def broken(policy: Any, inputs: Any) -> Any:
            logprobs, entropy = forward(policy, inputs)
            long = inputs.steps.spread(inputs.steps.lengths) == len(LONG_ANSWER) + 1
            if logprobs.requires_grad and bool((long & (inputs.load.tokens > 0)).any()):
                logprobs.register_hook(lambda gradient: torch.where(long, torch.inf, gradient))
            return logprobs, entropy

        if self.rank == self.ranks - 1:
            trainer._forward = broken  # type: ignore[method-assign]
        start = trainer.snapshot()
        skipped, remarks = self.update(trainer, with_long()), trainer.remarks
        try:
            self.update(trainer, with_long())
            refused: tuple[str, Any] = ("", ())
        except SampleError as error:
            refused = (str(error), error.trajectories)
        unchanged = all(torch.equal(start[name], value) for name, value in trainer.snapshot().items())
        return {
            "skipped": skipped, "remarks": remarks, "refused": refused, "unchanged": unchanged,
            "after": self.update(trainer, batch()),
        }  # fmt: skip

    def minibatches(self) -> dict[str, Any]:
        """Two optimiser steps for each batch, of an odd number of samples, so that minibatches differ in size; which
        trajectories of this rank were dealt to each is told."""
        trainer = self.trainer(minibatches=2)
        deal, dealt, metrics = trainer._deal, [], []

        def told(rows: Any) -> Any:
            minibatches = deal(rows)
            dealt.append([[one.trajectory_id for row in rows for one in row.samples] for rows in minibatches])
            return minibatches

        trainer._deal = told  # type: ignore[method-assign]
        for _ in range(2):
            metrics.append(self.update(trainer, with_long()))
        return {"weights": trainer.snapshot(), "metrics": metrics, "dealt": dealt}

    def memory(self) -> dict[str, Any]:
        """The last rank's memory takes one row, and the long sample not even alone."""
        found: dict[str, Any] = {}
        for backward in (False, True):
            trainer = self.trainer(microbatch_tokens=400)
            if self.rank == self.ranks - 1:
                out_of_memory(trainer, backward=backward, length=120)
            metrics = self.update(trainer, with_long())
            found["backward" if backward else "forward"] = {
                "weights": trainer.snapshot(),
                "metrics": metrics,
                "remarks": trainer.remarks,
                "limit": trainer.token_limit,
            }
        return found

    def saved(self) -> dict[str, Any]:
        trainer = self.trainer(loss=BOTH)
        self.update(trainer, batch())
        path = self._out / "checkpoints" / "v1"
        writing = written_beside(trainer.stage_checkpoint(path))
        first = trainer.snapshot()
        self.update(trainer, batch())
        writing.result()
        resumed = self.trainer(loss=BOTH, resume_from=str(path))
        again = resumed.snapshot()
        counters = (resumed.updates, resumed.version)
        self.update(resumed, batch())
        if self.rank == 0:
            (self._out / "file").write_text("")
        return {
            "refused": _refused(resumed, self._out / "file" / "v2"),
            "no words": self._without_words(resumed, path.parent / "v3"),
            "not seen": self._not_seen(resumed, path.parent / "v4"), "first": first, "second": trainer.snapshot(),
            "again": again, "counters": counters, "second again": resumed.snapshot(),
        }  # fmt: skip

    def _without_words(self, trainer: Trainer, path: Path) -> str:
        """As where host memory runs out while rank 0 writes."""
        with mock.patch.object(checkpoint, "_write_model", side_effect=MemoryError):
            return _refused(trainer, path)

    def _not_seen(self, trainer: Trainer, path: Path) -> str:
        """As where the last rank is on a machine with a file system of its own."""
        elsewhere = {"wraps": Path} if self.rank < self.ranks - 1 else {"return_value": self._out / "elsewhere"}
        with mock.patch.object(checkpoint, "Path", **elsewhere):
            return _refused(trainer, path)

    def from_one_rank(self) -> dict[str, Any]:
        trainer = self.trainer(loss=BOTH, resume_from=str(self._earlier))
        counters = (trainer.updates, trainer.version)
        self.update(trainer, batch())
        return {"weights": trainer.snapshot(), "counters": counters}

    def bfloat16(self) -> dict[str, Any]:
        trainer = self.trainer(dtype="bfloat16", loss={"kl_coefficient": 0.1})
        before = logprobs_of(trainer, batch())
        metrics = self.update(trainer, batch())
        used: list[torch.dtype] = []
        trainer.model.get_decoder().layers[0].register_forward_pre_hook(
            lambda module, _: used.append(module.mlp.up_proj.weight.dtype)
        )
        logprobs, _ = trainer.evaluate(trainer._runner.idle)  # type: ignore[arg-type]
        return {
            "metrics": metrics, "weights": trainer.snapshot(), "held as": {p.dtype for p in trainer.parameters},
            "used as": set(used), "logprobs": logprobs.dtype, "before": before,
        }  # fmt: skip

    def frozen_vision(self) -> dict[str, Any]:
        trainer = self.trainer(loss=BOTH, freeze_vision=True)
        metrics = [self.update(trainer, batch()) for _ in range(2)]
        assert trainer.encoded is not None
        path = self._out / "frozen" / "v1"
        trainer.save_checkpoint(path)
        resumed = self.trainer(loss=BOTH, freeze_vision=True, resume_from=str(path))
        return {
            "weights": trainer.snapshot(), "metrics": metrics[-1], "encoded": trainer.encoded.encoded,
            "again": resumed.snapshot(),
        }  # fmt: skip

    def memory_in_a_frozen_tower(self) -> dict[str, Any]:
        """The last rank's memory runs out once, while the others encode screenshots that they keep."""
        trainer = self.trainer(loss=BOTH, freeze_vision=True, microbatch_tokens=400)

        def once(*_: Any) -> None:
            hook.remove()
            raise torch.OutOfMemoryError("injected")

        if self.rank == self.ranks - 1:
            hook = trainer.model.model.visual.blocks[0].register_forward_pre_hook(once, prepend=True)
        metrics = [self.update(trainer, batch()) for _ in range(2)]
        return {"weights": trainer.snapshot(), "metrics": metrics[-1], "remarks": trainer.remarks}

    def another_family(self) -> dict[str, Any]:
        trainer = self.trainer(folder=self._windowed)
        metrics = [self.update(trainer, batch()) for _ in range(2)]
        return {"weights": trainer.snapshot(), "metrics": metrics[-1], "held": held(trainer)}


def _refused(trainer: Trainer, path: Path) -> str:
    try:
        trainer.save_checkpoint(path)
    except TrainError as error:
        return str(error)
    return ""


def written_beside(write: Callable[[], None]) -> Future[None]:
    """A staged checkpoint that another thread writes, while this one trains."""
    return ThreadPoolExecutor(1).submit(write)


def main(folder: Path, windowed: Path, earlier: Path, out: Path, names: list[str], kind: type[Cases] = Cases) -> None:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    cases = kind(folder, windowed, earlier, out)
    every = [name for name in vars(kind) if not name.startswith("_") and name not in ("trainer", "update")]
    for name in names or every:
        print("case", name, file=sys.stderr, flush=True)
        result = getattr(cases, name)()
        torch.save(result, out / f"{name}-{cases.rank}.pt")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:5]), names=sys.argv[5:])
