"""Weights as others know them: by the names of the checkpoint, with adapters merged into what they belong to.

A Hugging Face folder and the next run see a model without an adapter. A merged weight is W + s·B·A, computed in float32
from the frozen W each time, so that nothing is ever added to W, and no rounding adds up over versions. Replicas see
that, too, or have W already and get A and B (`trainer.lora.sync`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from dart.config import Lora
from dart.workers.train.adapters import lora as adapters
from dart.workers.train.adapters.pinned import Slabs
from dart.workers.train.passes import parts
from dart.workers.weights.transfer import ADAPTER_FILE, ADAPTER_PREFIX

BASE_LAYER = ".base_layer"
"""What PEFT puts into the names of the weights below an adapter."""


def copied(
    model: PreTrainedModel, dtype: torch.dtype, here: bool, into: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """A copy of the model's weights in host memory by their checkpoint names, in the dtype; {} unless it is for here.

    Sharded weights are gathered one after the other: all ranks call this, and one of them wants the copy. `into`: an
    earlier copy that nobody needs any more, whose memory is used again.
    """
    return _host_copy(_merged(model, dtype, here), dtype, here, into)


def copied_adapter(
    model: PreTrainedModel, dtype: torch.dtype, here: bool, into: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The same of the adapter's weights alone, by PEFT's names."""
    return _host_copy(_adapter(model), dtype, here, into)


def _host_copy(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, here: bool, into: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    copies: dict[str, torch.Tensor] = {}
    slabs = Slabs()
    for name, value in weights:
        if here:
            former = into.get(name) if into else None
            pinned = value.device.type == "cuda"
            if former is not None:
                copy = former
            else:
                copy = slabs.empty(value.shape, dtype) if pinned else torch.empty(value.shape, dtype=dtype)
            # Narrowed on the GPU, because a copy from there would send float32 and narrow it in one thread.
            copies[name] = copy.copy_(value.to(dtype) if pinned else value, non_blocking=pinned)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # not the device: a broadcast of older weights may be under way
    return copies


def _merged(model: PreTrainedModel, dtype: torch.dtype, here: bool) -> Iterator[tuple[str, torch.Tensor]]:
    layers = {f"{name}{BASE_LAYER}.weight": layer for name, layer in adapters.adapted(model)}
    for name, parameter in model.named_parameters():
        if adapters.is_adapter(name):
            continue
        if (layer := layers.get(name)) is None:
            yield name.replace(BASE_LAYER, ""), parts.whole(parameter.detach().to(dtype))
            continue
        down, up = (parts.whole(matrix.weight.detach()) for matrix in _matrices(layer))
        weight = parts.whole(parameter.detach()).float()
        if here:
            weight = torch.addmm(weight, up, down, alpha=layer.scaling[adapters.NAME])
        yield name.replace(BASE_LAYER, ""), weight


def _matrices(layer: nn.Module) -> tuple[nn.Linear, nn.Linear]:
    """A [rank, in] and B [out, rank]."""
    return layer.lora_A[adapters.NAME], layer.lora_B[adapters.NAME]


def adapter_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of the adapter in host memory, float32, by PEFT's names; {} without one. All ranks call it together."""
    return {name: weight.to("cpu", copy=True).contiguous() for name, weight in _adapter(model)}


def _adapter(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in model.named_parameters():
        if adapters.is_adapter(name):
            yield ADAPTER_PREFIX + name.replace(f".{adapters.NAME}.", "."), parts.whole(weight.detach())


def write_adapter(
    folder: Path, model: PreTrainedModel, lora: Lora, base: Path, weights: dict[str, torch.Tensor], digest: str
) -> None:
    """Write a folder that PEFT loads onto the model in `base`, and that `check_resumed` knows. Raises OSError."""
    folder.mkdir()
    save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})
    adapters.peft_config(model, lora, str(base)).save_pretrained(folder)
    (folder / adapters.BASE).write_text(json.dumps({"sha256": digest}) + "\n", encoding="utf-8")
