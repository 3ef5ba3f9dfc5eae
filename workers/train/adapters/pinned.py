"""Pinned host memory, which a GPU copies into at full speed, without most of what torch would waste of it.

torch rounds every pinned tensor up to a power of two: 31.4 GB for the 16.6 GB of UI-TARS-1.5-7B. Here tensors are laid
one after another into slabs whose own size is a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SLAB_BYTES = 1 << 30
ALIGNMENT = 256
"""Bytes."""


@dataclass
class _Slab:
    memory: torch.Tensor
    """uint8 [bytes]."""
    used: int = 0


class Slabs:
    """Tensors in pinned host memory, which is given back when the last tensor of a slab is gone."""

    def __init__(self, *, pinned: bool = True) -> None:
        """`pinned`: needs a GPU."""
        self._pinned = pinned
        self._slabs: list[_Slab] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(slab.memory.nbytes for slab in self._slabs)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a storage of its own over a part of a slab: where tensors share a storage, transformers copies
        each of them before it saves them."""
        memory = self.reserve(shape.numel() * dtype.itemsize)
        return torch.from_numpy(memory.numpy()).view(dtype).view(shape)

    def reserve(self, size: int) -> torch.Tensor:
        """uint8 [size], in the first slab that has room. A new slab holds it, and is as large as all before it up to
        SLAB_BYTES, so that a small model takes little."""
        taken = -(-size // ALIGNMENT) * ALIGNMENT
        slab = next((slab for slab in self._slabs if slab.used + taken <= slab.memory.nbytes), None)
        if slab is None:
            length = max(_power_of_two(taken), min(SLAB_BYTES, _power_of_two(self.allocated_bytes)))
            slab = _Slab(torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned))
            self._slabs.append(slab)
        start, slab.used = slab.used, slab.used + taken
        return slab.memory[start : start + size]


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
