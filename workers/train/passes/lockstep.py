"""Ranks that work through their micro-batches in step, because each pass gathers weights from all of them.

Over sharded weights every forward and backward pass is a sequence of collectives, the same on each rank: a rank that
stays away, or stops in the middle, leaves the others waiting for ever. So ranks in step agree before each micro-batch
that there is one; a rank that has none left passes an idle one; and a rank that fails inside a pass still takes part in
the collectives that are left of it, with zeros, before all of them give the pass up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from dart.algo.steps import Steps
from dart.core.capacity.work import Load
from dart.workers.train import collectives
from dart.workers.train.batch import Layout, MicroBatch
from dart.workers.train.errors import TrainError
from dart.workers.train.passes.faults import NotFinite
from dart.workers.train.passes.runner import Passed, PassRunner, Trouble, out_of_memory, release_memory
from dart.workers.train.policy import Blank
from dart.workers.train.vision import EncodedScreenshots

T = TypeVar("T")
NEVER = 1 << 40
"""More collectives than any pass has."""
IDLE_TOKENS = 2
"""Response tokens of an idle micro-batch: the last one sees the image and the token before it."""


class InStep(PassRunner):
    """Weights are sharded: all ranks make the same passes at the same time."""

    def __init__(
        self,
        script: Script,
        policy: FSDPModule,
        reference: FSDPModule | None,
        idle: MicroBatch,
        device: torch.device,
        encoded: Sequence[EncodedScreenshots],
    ) -> None:
        """`encoded`: what frozen vision towers keep."""
        self._script, self._device, self.idle = script, device, idle
        self._policy, self._reference, self._encoded = policy, reference, encoded

    def agree(self, left: bool, problem: TrainError | None) -> bool:
        any_left, problems = collectives.all_sum([float(left), float(problem is not None)], self._device)
        if problems:
            collectives.raise_together(problem, "finish its share", self._device)
        return bool(any_left)

    def run(self, name: str, work: Callable[[], T], *, keep_graph: bool = False) -> Passed[T]:
        result: T | None = None
        trouble: Trouble | None = None
        self._script.begin(name)
        for kept in self._encoded:
            kept.begin_pass()
        try:
            result = work()
        except (NotFinite, TrainError, ValueError) as error:
            trouble = error.with_traceback(None)
        except RuntimeError as error:
            if (trouble := out_of_memory(error)) is None:
                raise
        if trouble is not None:
            self._forget_partial_gradients()
            self._reset(keep_graph=False)
            release_memory()  # what is filled in is as large as a layer with all its weights
        stopped = self._script.end(trouble)
        # The rank that stopped first had no zeros from others yet, so its trouble is its own.
        numbers = [float(trouble is not None), float(-stopped)]
        troubled, first = collectives.all_max(numbers, self._device)
        if troubled:
            result = None
            for kept in self._encoded:
                kept.take_back()
        self._reset(keep_graph=keep_graph and not troubled)
        return Passed(result, trouble, all_passed=not troubled, disturbed=stopped > -first)

    def _forget_partial_gradients(self) -> None:
        """Drop partial gradients of gathered weights after a failed backward pass: the next one would add to them."""
        for parameter in self._policy.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad = None

    def _reset(self, *, keep_graph: bool) -> None:
        """Forget what FSDP keeps of a pass, which after a pass without a backward pass would grow, and would be
        prefetched in the next one."""
        if self._reference is not None:
            self._reference.reset_iter_state()
        if not keep_graph:
            self._policy.reset_iter_state()


@dataclass(frozen=True, slots=True)
class _Step:
    """A collective: how many elements of which type this rank puts in."""

    kind: str
    elements: int
    dtype: torch.dtype


class Script:
    """The sequence of collectives of each kind of pass, as its first, idle run recorded it.

    FSDP calls its collectives through this. A pass that differs from the recorded one raises RuntimeError before it
    communicates: its ranks would wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passes: dict[str, list[_Step]] = {}
        self._name: str | None = None
        self._at = 0
        self._recording = False

    def direct(self, root: torch.nn.Module) -> None:
        """Have every sharded module below the root communicate through this."""
        gather, scatter = _Gather(self), _Scatter(self)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)

    def begin(self, name: str) -> None:
        self._name, self._at = name, 0
        self._recording = name not in self._passes
        self._passes.setdefault(name, [])

    def end(self, trouble: Trouble | None = None) -> int:
        """The pass has ended. If it could not be completed, take part in what is left of it.

        Returns the number of collectives before this rank began to fill in; NEVER if it did not. Raises the trouble of
        a pass that is being recorded: how it would have gone on is not known.
        """
        if self._name is None:
            raise RuntimeError("no pass has begun")
        if self._recording and trouble is not None:
            raise trouble
        left = self._passes[self._name][self._at :]
        self._name = None
        if trouble is None and left:
            raise RuntimeError(f"a pass ended {len(left)} collectives early: other ranks wait for them")
        for step in left:
            self._fill_in(step)
        return self._at if left else NEVER

    def note(self, kind: str, part: torch.Tensor) -> None:
        """A collective is about to begin."""
        if self._name is None:
            return  # outside a pass: when weights are gathered by hand
        step = _Step(kind, part.numel(), part.dtype)
        steps = self._passes[self._name]
        if self._recording:
            steps.append(step)
        elif self._at >= len(steps) or steps[self._at] != step:
            raise RuntimeError(f"collective {self._at} of a {self._name} pass is {step}, not as when it was recorded")
        self._at += 1

    def _fill_in(self, step: _Step) -> None:
        ranks = dist.get_world_size()
        part = torch.zeros(step.elements, dtype=step.dtype, device=self._device)
        if step.kind == "all-gather":
            dist.all_gather_single(part.new_empty(step.elements * ranks), part)
        else:
            dist.reduce_scatter_single(part.new_empty(step.elements // ranks), part)


class _Gather(AllGather):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self._script = script

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._script.note("all-gather", input_tensor)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(ReduceScatter):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self._script = script

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._script.note("reduce-scatter", input_tensor)
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def idle_batch(blank: Blank, layout: Layout) -> MicroBatch:
    """A micro-batch of one row, an image and `IDLE_TOKENS` response tokens, through which every weight is used."""
    token = next(number for number in range(layout.vocab_size) if number not in {*layout.banned, layout.image_token_id})
    response = torch.full((IDLE_TOKENS,), token)
    ids = torch.cat([torch.full((blank.tokens,), layout.image_token_id), response])
    zeros = torch.zeros(IDLE_TOKENS)
    return MicroBatch(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids)).expand(3, 1, -1),
        attention_mask=None,
        pixel_values=blank.pixel_values,
        pixel_form=None,
        image_grid_thw=blank.grid,
        image_digests=(b"blank",),
        image_index=(0,),
        predict_index=torch.arange(blank.tokens - 1, len(ids) - 1),
        token_ids=response,
        behaviour=zeros,
        rescored=torch.zeros(IDLE_TOKENS, dtype=torch.bool),
        advantages=zeros,
        versions=torch.zeros(IDLE_TOKENS, dtype=torch.int64),
        steps=Steps(torch.zeros(IDLE_TOKENS, dtype=torch.int64), torch.tensor([IDLE_TOKENS])),
        load=Load(0, 0, 0, 0, 0),
    )
