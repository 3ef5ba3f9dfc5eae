"""Tensors of which a rank may hold a part: sharded weights, their gradients and their optimiser state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from dart.workers.train import collectives


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that this rank holds; a tensor that is not sharded is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it. For a sharded tensor, all ranks call this at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole value, as `like` is sharded; a copy, on the device of `like`."""
    if not isinstance(like, DTensor):
        return value.to(like.device, copy=True)
    chunks = value.chunk(like.device_mesh.size(), dim=0)
    rank = like.device_mesh.get_local_rank()
    mine = chunks[rank] if rank < len(chunks) else value[:0]
    return DTensor.from_local(
        mine.to(like.device, copy=True), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def copy_into(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole value into a tensor, of which this rank may hold a part."""
    local(target).copy_(local(part_of(value, target)))


def all_finite(parameters: Sequence[torch.nn.Parameter], device: torch.device) -> bool:
    """Whether all of them are, on every rank. All ranks call it at the same time."""
    bad = not all(bool(torch.isfinite(local(parameter)).all()) for parameter in parameters)
    return collectives.all_sum([float(bad)], device) == [0.0]


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients, over all ranks' parts if they are sharded."""
    return whole(torch.nn.utils.get_total_norm(gradients))
