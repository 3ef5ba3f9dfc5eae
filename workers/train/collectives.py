"""What ranks add up or show each other; with one rank it is the value itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

BUCKET_ELEMENTS = 1 << 26
"""Gradients are added in flat buckets of at most this many elements (one tensor may be larger)."""


def add(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over ranks. float64, so that token counts stay exact."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over ranks."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def rank() -> int:
    """This rank's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: T) -> list[T]:
    """Every rank's value, by rank. It travels as a pickle: for small things."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def _reduce(values: Sequence[float], device: torch.device, operation: dist.ReduceOp) -> list[float]:
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    result: list[float] = tensor.tolist()
    return result


def add_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors of one dtype over ranks, in place. All ranks pass the same shapes in the same order."""
    if not dist.is_initialized():
        return
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            _add_bucket(bucket)
            bucket = []
        bucket.append(tensor)
    if bucket:
        _add_bucket(bucket)


def _add_bucket(bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
