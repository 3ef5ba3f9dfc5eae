"""What a replica tells vLLM's transfer engine: which group it joins, and what it receives. Loads no torch and no vLLM.

vLLM calls the two `init_info` and `update_info`; their fields depend on the transport's engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from dart.core.capacity.memory import PACK
from dart.v1 import weights_pb2 as wpb
from dart.workers.weights.transfer import TensorSpec


def init_info(transport: str, group: wpb.TransferGroup, timeout_seconds: float) -> dict[str, object]:
    """The group, of which the trainer is rank 0; `timeout_seconds` bounds every single wait over gloo."""
    if transport == "nccl":
        return {
            "master_address": group.host, "master_port": group.port, "rank_offset": 1,
            "world_size": group.world_size, "packed": True, "packed_buffer_size_bytes": PACK,
        }  # fmt: skip
    return {
        "group_id": group.group_id, "host": group.host, "port": group.port,
        "world_size": group.world_size, "timeout_seconds": timeout_seconds,
    }  # fmt: skip


def update_info(transport: str, version: int, tensors: Sequence[TensorSpec]) -> dict[str, object]:
    """The tensors, in the order in which they are sent."""
    if transport == "nccl":
        return {
            "names": [spec.name for spec in tensors],
            "dtype_names": [spec.dtype for spec in tensors],
            "shapes": [list(spec.shape) for spec in tensors],
        }
    return {"version": version, "tensors": [(spec.name, spec.dtype, list(spec.shape)) for spec in tensors]}
