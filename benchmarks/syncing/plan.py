"""What a scene of the benchmark is, and which tensors it sends. Does not import torch: the parent needs none."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dart.workers.weights.transfer import TensorSpec

TENSORS = 64
COLUMNS = 256
UNIT_BYTES = 1024
"""Each tensor's size is a multiple of this: two rows of a matrix."""
MARK = "version"
"""The first tensor's name: it holds the version's number, so that a replica can tell which version it received."""
_EMBEDDING = 40
_LAYER = (8, 3, 2, 0)
"""Shares of a layer's tensors: three matrices of different sizes and a vector."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What both ends of one session need to know; travels as the JSON of Welcome."""

    bytes: int
    slots: int
    token_seconds: float
    transport: str
    timeout_seconds: float
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scene:
        return cls(**json.loads(text))


def tensor_list(total: int) -> list[TensorSpec]:
    """64 bfloat16 tensors, `total` bytes together (to the KiB below): an embedding, matrices and vectors."""
    units = total // UNIT_BYTES
    if units < 2 * TENSORS:
        raise ValueError(f"{total} bytes are too few for {TENSORS} tensors: use {2 * TENSORS * UNIT_BYTES} or more")
    weights = [0, _EMBEDDING, *(_LAYER * TENSORS)][:TENSORS]
    counts = [1 + (units - TENSORS) * weight // sum(weights) for weight in weights]
    counts[-1] += units - sum(counts)
    names = [MARK, "embedding", *(f"layer-{n // 4}.{n % 4}" for n in range(TENSORS - 2))]
    return [
        TensorSpec(name, "bfloat16", (2 * COLUMNS,) if count == 1 else (2 * count, COLUMNS))
        for name, count in zip(names, counts, strict=True)
    ]
