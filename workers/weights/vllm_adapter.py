"""The policy's adapter inside vLLM's worker process: version after version in one of vLLM's own slots for adapters.

All requests name that slot, so those in flight go on with whatever it holds, as they do when whole weights change. No
adapter is ever read from a file by a request: what a request names is there before it comes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from dart.workers.weights.transfer import ADAPTER_FILE, ADAPTER_SLOT

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


class Adapter:
    """The one adapter of a model that vLLM has loaded with `enable_lora`."""

    def __init__(self, model: torch.nn.Module, rank: int, alpha: int, target_modules: list[str]) -> None:
        self._manager: LoRAModelManager = model.lora_manager
        self._settings = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=target_modules)

    def begin(self, folder: Path | None) -> None:
        """Take the adapter in the folder, in PEFT's form; without one, an adapter that adds nothing."""
        if folder is not None:
            self.take(load_file(folder / ADAPTER_FILE))
            return
        nothing = self._manager.create_dummy_lora(ADAPTER_SLOT, self._settings.r, {})
        for layer in nothing.loras.values():
            for part in layer.lora_b if isinstance(layer.lora_b, list) else [layer.lora_b]:
                if part is not None:
                    part.zero_()
        self._replace(nothing)

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Serve these from the next forward pass on. Raises ValueError if vLLM has no place for one of them.

        tensors: A [rank, inputs] and B [outputs, rank] of each layer, by PEFT's names, whole on every rank.
        """
        model = self._manager.model
        renames = getattr(model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_SLOT,
            tensors,
            self._settings,
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            weights_mapper=None if renames is None else renames.get_rename_mapper(),
        )
        self._replace(adapter)

    def _replace(self, adapter: LoRAModel) -> None:
        manager = self._manager
        manager.remove_adapter(ADAPTER_SLOT)
        manager.add_adapter(adapter)  # puts together what vLLM computes as one layer, under that layer's name
        # vLLM passes over layers that it does not know, and would serve something else than the policy.
        lost = sorted(name for name in adapter.loras if name not in manager.modules and not _elsewhere(manager, name))
        if lost:
            raise ValueError(f"vLLM has no layer {lost[0]} that could take an adapter ({len(lost)} such in all)")
        manager.activate_adapter(ADAPTER_SLOT)


def _elsewhere(manager: LoRAModelManager, name: str) -> bool:
    """Whether the layer lies on another stage of a pipeline."""
    from vllm.distributed.parallel_state import get_pp_group

    return get_pp_group().world_size > 1 and not any(known == name for known, _ in manager.model.named_modules())
