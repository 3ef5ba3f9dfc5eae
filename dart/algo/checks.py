"""Ranks, shapes and dtypes, checked before any arithmetic: broadcasting would turn mistakes into wrong numbers."""

from __future__ import annotations

import torch


def flat(length_of: torch.Tensor | None = None, **tensors: torch.Tensor) -> None:
    """Every tensor is floating point, of rank 1, and as long as `length_of` (else as the first). Raises ValueError."""
    expected = None if length_of is None else length_of.shape[0]
    for name, tensor in tensors.items():
        if tensor.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be flat, [tokens]")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}: it must be floating point")
        expected = tensor.shape[0] if expected is None else expected
        if tensor.shape[0] != expected:
            raise ValueError(f"{name} has {tensor.shape[0]} tokens where {expected} are expected: they are misaligned")


def indices(tensor: torch.Tensor, name: str, length: int, below: int) -> None:
    """`tensor` is int64 [length] with values in [0, below). Raises ValueError."""
    if tensor.dim() != 1 or tensor.shape[0] != length:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be [{length}]")
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name} is {tensor.dtype}: it must be int64")
    if length and (int(tensor.min()) < 0 or int(tensor.max()) >= below):
        raise ValueError(f"{name} goes from {int(tensor.min())} to {int(tensor.max())}: it must stay in [0, {below})")
