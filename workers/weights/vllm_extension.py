"""The receiving end of a gloo transfer inside vLLM's worker process, which this module also ties to its owner.

vLLM imports this module there because `worker_extension_cls` names `Extension`; the import registers the "gloo"
backend before vLLM creates its transfer engine, and starts watching the owner. Nothing else imports it.

A thread of its own stages each transfer in host memory, and the weights reach the model only in `finish_weight_update`:
the replica serves while it receives, and a transfer that fails half-way leaves the old weights intact. The price is a
copy of all weights in host memory for each of the replica's GPUs.

With `trainer.lora` and `sync: adapter` the weights that arrive are those of the adapter alone (`vllm_adapter`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dart.malloc import release_free_memory
from dart.workers.weights.gloo import Group, receive
from dart.workers.weights.owner import end_with_owner
from dart.workers.weights.transfer import TensorSpec, TransferError, checksum, is_adapter, spec_of
from dart.workers.weights.vllm_adapter import Adapter


class Extension:
    """The class that `worker_extension_cls` names: vLLM's worker gets its methods."""

    weight_transfer_engine: WeightTransferEngine

    def serve_adapter(self, rank: int, alpha: int, target_modules: list[str], folder: str | None) -> None:
        """From now on, the model is served with an adapter: with that of the folder, or with one that adds nothing."""
        engine = self.weight_transfer_engine
        engine.adapter = Adapter(engine.model, rank, alpha, target_modules)
        engine.adapter.begin(None if folder is None else Path(folder))

    def take_adapter(self) -> None:
        """Serve the adapter that has arrived. Called after `finish_weight_update`, which drops all adapters: vLLM
        assumes that the weights below them have changed."""
        engine = self.weight_transfer_engine
        engine.adapter.take(dict(engine.staged_adapter()))

    def begin_receiving_weights(self, init_info: dict[str, object], update_info: dict[str, object]) -> None:
        """Returns at once; vLLM's own `update_weights` then waits for the transfer."""
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(engine.parse_init_info(init_info))
        engine.begin(engine.parse_update_info(update_info))

    def weights_checksum(self) -> int:
        """Of the tensors that the last transfer over gloo brought."""
        return int(self.weight_transfer_engine.checksum)

    def release_free_memory(self) -> None:
        """Give the kernel back what this process holds free."""
        release_free_memory()


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]
    group_id: str
    host: str
    port: int
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    version: int = 0
    tensors: list[tuple[str, str, list[int]]] = field(default_factory=list)


class _Receiving(threading.Thread):
    """Joins the group, unless `group` is already joined, and receives everything while the engine keeps serving.

    `result` raises whatever went wrong. Every wait is bounded, so an abandoned thread ends by itself.
    """

    def __init__(self, group: Group | None, init: GlooInit, rank: int, update: GlooUpdate) -> None:
        super().__init__(daemon=True, name="weights")
        self.version = update.version
        self._specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in update.tensors]
        self._group, self._init, self._rank = group, init, rank
        self._staged: list[tuple[str, torch.Tensor]] = []
        self.checksum = 0
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            if self._group is None:
                init = self._init
                self._group = Group(
                    init.group_id,
                    init.host,
                    init.port,
                    rank=self._rank,
                    world_size=init.world_size,
                    timeout_seconds=init.timeout_seconds,
                )
            self._staged = list(receive(self._group, self._specs))
            self.checksum = checksum(self._staged)
        except Exception as error:  # noqa: BLE001 - whatever it is, `result` raises it
            self._error = error
            if self._group is not None:
                self._group.close()

    def result(self) -> tuple[Group, list[tuple[str, torch.Tensor]]]:
        """The group and the tensors. Raises TransferError."""
        self.join()
        if self._error is not None or self._group is None:
            raise TransferError(str(self._error))
        return self._group, self._staged


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """One rank of the replica in the group of `GlooSender`; see the module's docstring for the sequence."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self._init: GlooInit | None = None
        self._group_is_new = False
        """Whether nothing has been received since the group was named."""
        self._group: Group | None = None
        self._receiving: _Receiving | None = None
        self._staged: list[tuple[str, torch.Tensor]] = []
        self.checksum = 0
        self.adapter: Adapter | None = None
        """What takes the tensors, if the model is served with an adapter."""

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Set the group to receive from next; the first transfer joins it."""
        if self._group is not None and self._group.group_id != init_info.group_id:
            self.shutdown()
        self._init, self._group_is_new = init_info, True
        self._receiving = None

    def begin(self, update_info: GlooUpdate) -> None:
        """Receive in the background. Raises TransferError if no group was named."""
        if self._init is None or not self._group_is_new:
            raise TransferError(f"version {update_info.version} was not received, and no group was named for it")
        self._group_is_new = False
        parallel = self.parallel_config
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        # The thread owns the group until it is done, so that an abandoned thread disturbs nobody.
        group, self._group = self._group, None
        self._receiving = _Receiving(group, self._init, rank, update_info)
        self._receiving.start()

    def start_weight_update(self) -> None:
        self._staged = []

    def update_weights(self, update_info: dict[str, object]) -> None:
        # Replaces the base class's method, which synchronises an accelerator: there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self._receiving is None:
            self.begin(update_info)
        receiving = self._receiving
        if receiving is None or receiving.version != update_info.version:
            # An abandoned pause may end after the next version has begun to arrive; that one is not for this pause.
            raise TransferError(f"version {update_info.version} is not what was received last")
        self._receiving = None
        self._group, self._staged = receiving.result()
        self.checksum = receiving.checksum
        if (self.adapter is not None) != is_adapter([spec_of(*named) for named in self._staged]):
            kind = "an adapter" if self.adapter is None else "whole weights"
            self._staged = []
            raise TransferError(f"version {update_info.version} is {kind}, which this replica was not started for")

    def finish_weight_update(self) -> None:
        if self.adapter is not None:
            return  # `take_adapter` comes next
        staged, self._staged = self._staged, []
        with torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(staged)
            finalize_layerwise_reload(self.model, self.model_config)
            self._repack_tied_head()

    def staged_adapter(self) -> list[tuple[str, torch.Tensor]]:
        """The adapter that was received last, which is then forgotten here."""
        staged, self._staged = self._staged, []
        return staged

    def _repack_tied_head(self) -> None:
        """A head tied to the embedding is never "loaded", so the CPU backend's packed copy would stay outdated."""
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
