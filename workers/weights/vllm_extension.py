"""The receiving end of a gloo transfer inside vLLM's worker process, and that process's tie to its owner.

vLLM imports this module there because `worker_extension_cls` names `Extension`; the import registers the "gloo"
backend before vLLM creates its transfer engine, and starts watching the owner. Nothing else imports it.

A transfer is staged in host memory and reaches the model only in `finish_weight_update`, so one that breaks half-way
leaves the old weights whole and the replica can go on serving. The price is one copy of the weights in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dart.workers.weights.gloo import Group, receive
from dart.workers.weights.owner import end_with_owner
from dart.workers.weights.transfer import TensorSpec, TransferError


class Extension:
    """Named as vLLM's `worker_extension_cls`; it adds nothing to the worker class."""


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    group_id: str
    host: str
    port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    tensors: list[tuple[str, str, list[int]]] = field(default_factory=list)


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One rank of the replica in the group of `GlooSender`; see the module's docstring for the order of things."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._group: Group | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        if self._group is not None and self._group.group_id == init_info.group_id:
            return
        self.shutdown()
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = Group(
            init_info.group_id,
            init_info.host,
            init_info.port,
            rank=rank,
            world_size=init_info.world_size,
            timeout_seconds=init_info.timeout_seconds,
        )

    def start_weight_update(self) -> None:
        self._staged = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's: it synchronises an accelerator, and there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self._group is None:
            raise TransferError("no group is open")
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in update_info.tensors]
        try:
            self._staged = list(receive(self._group, specs))
        except TransferError:
            self._staged = []
            self.shutdown()
            raise

    def finish_weight_update(self) -> None:
        staged, self._staged = self._staged, []
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(staged)
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """A head tied to the embedding is never "loaded", so the CPU backend's packed copy of it would stay old."""
        for module in self.model.modules():
            if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
end_with_owner()
