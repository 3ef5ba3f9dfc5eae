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
NO_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""In errors of libraries that found no memory for themselves; PyTorch's own allocator has an error of its own."""


def out_of_memory(error: RuntimeError) -> torch.OutOfMemoryError | None:
    """The error without its frames, which hold the tensors that filled the memory; None if it is of another kind."""
    if isinstance(error, torch.OutOfMemoryError):
        return error.with_traceback(None)
    return torch.OutOfMemoryError(str(error)) if any(words in str(error) for words in NO_MEMORY) else None


def release_memory() -> None:
    """Give what PyTorch's allocator holds and does not use back to the device, for allocations of other sizes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Once(Generic[T]):
    """Work that is done once, and forgotten when it begins: if it fails, nobody else holds the tensors it is about."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work

    def __call__(self) -> T:
        work, self._work = self._work, None
        if work is None:
            raise RuntimeError("this work has been done")
        return work()


@dataclass(frozen=True)
class Passed(Generic[T]):
    """A pass: its result, or this rank's trouble; `all_passed`: no rank had any.

    `disturbed`: another rank filled in zeros before this one was through, so what this one computed means nothing.
    """

    result: T | None
    trouble: Trouble | None
    all_passed: bool
    disturbed: bool = False


class PassRunner(ABC):
    """How this rank's passes depend on those of others."""

    idle: MicroBatch | None
    """What a rank without a micro-batch computes meanwhile; None: nothing."""

    @abstractmethod
    def agree(self, left: bool, problem: TrainError | None) -> bool:
        """Whether any rank has a micro-batch left. If any rank has a problem, all raise TrainError."""

    @abstractmethod
    def run(self, name: str, work: Callable[[], T], *, keep_graph: bool = False) -> Passed[T]:
        """One pass. `name` says which sequence of collectives it has; `keep_graph`: a backward pass follows."""


class Alone(PassRunner):
    """Every rank has all weights, or there is one rank."""

    idle = None

    def agree(self, left: bool, problem: TrainError | None) -> bool:
        if problem is not None:
            raise problem
        return left

    def run(self, name: str, work: Callable[[], T], *, keep_graph: bool = False) -> Passed[T]:
        trouble: Trouble | None = None
        try:
            return Passed(work(), None, all_passed=True)
        except NotFinite as error:
            trouble = error.with_traceback(None)
        except RuntimeError as error:
            if (trouble := out_of_memory(error)) is None:
                raise
        return Passed(None, trouble, all_passed=False)
