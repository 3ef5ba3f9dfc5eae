"""Whether a rank works through its micro-batches alone, or in step with others (`lockstep`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch

from dart.workers.train.batch import MicroBatch
from dart.workers.train.errors import TrainError
from dart.workers.train.passes.faults import NotFinite

T = TypeVar("T")
Trouble: TypeAlias = NotFinite | torch.OutOfMemoryError | TrainError | ValueError


@dataclass(frozen=True)
class Passed(Generic[T]):
    """A pass: its result, or this rank's trouble; `all_passed`: no rank had any.

    `disturbed`: another rank filled in zeros before this one was through, so what this one computed means nothing.
    """

    result: T | None
    trouble: Trouble | None
    all_passed: bool
    disturbed: bool = False


class Pace(ABC):
    """How this rank's passes depend on those of others."""

    idle: MicroBatch | None
    """What a rank without a micro-batch computes meanwhile; None: nothing."""

    @abstractmethod
    def agree(self, left: bool, problem: TrainError | None) -> bool:
        """Whether any rank has a micro-batch left. If any rank has a problem, all raise TrainError."""

    @abstractmethod
    def run(self, name: str, work: Callable[[], T], *, keep_graph: bool = False) -> Passed[T]:
        """One pass. `name` says which sequence of collectives it has; `keep_graph`: a backward pass follows."""


class Alone(Pace):
    """Every rank has all weights, or there is one rank."""

    idle = None

    def agree(self, left: bool, problem: TrainError | None) -> bool:
        if problem is not None:
            raise problem
        return left

    def run(self, name: str, work: Callable[[], T], *, keep_graph: bool = False) -> Passed[T]:
        try:
            return Passed(work(), None, all_passed=True)
        except (NotFinite, torch.OutOfMemoryError) as error:
            # Without its frames, which hold the tensors that filled the memory.
            return Passed(None, error.with_traceback(None), all_passed=False)
