"""Which step each token belongs to, and sums and means per step. A step's response is GSPO's "sequence"."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dart.algo import checks


@dataclass(frozen=True, slots=True)
class Steps:
    """The S steps of T tokens. index: int64 [T], the step of each token; lengths: int64 [S], tokens of each step.

    Every step must be complete and have tokens, else ValueError is raised.
    """

    index: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        checks.indices(self.index, "step index", self.index.shape[0], self.lengths.shape[0])
        if not torch.equal(torch.bincount(self.index, minlength=self.lengths.shape[0]), self.lengths):
            raise ValueError("lengths are not the numbers of tokens that index gives each step")
        if bool((self.lengths < 1).any()):
            raise ValueError("a step without tokens has no mean")

    @property
    def count(self) -> int:
        return int(self.lengths.shape[0])

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Σ_{t in step} values_t. values: float [T]. Returns [S]."""
        checks.flat(length_of=self.index, values=values)
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """1/T_step Σ_{t in step} values_t. values: float [T]. Returns [S]."""
        return self.sums(values) / self.lengths

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Each step's value at each of its tokens. values: [S]. Returns [T]."""
        return values[self.index]


@dataclass(frozen=True, slots=True)
class Totals:
    """The size of the whole batch, over all micro-batches and ranks.

    steps |D| and tokens count every step, including those that high-entropy selection left out: its indicator is inside
    the expectation. trained_tokens are those of the steps that were left in.
    """

    steps: int
    tokens: int
    trained_tokens: int
