"""A LoRA adapter in the language model, and if wanted in the vision tower: two thin matrices beside each of their
linear layers' frozen weights.

With it, a layer computes W·x + s·B·(A·x), with s = alpha / rank (Hu et al., arXiv 2106.09685, section 4.1). B begins
at zero, so the policy begins as the model that it was made from. Only A and B train. Switched off (`SwitchedOff`), the
same model is the reference policy, bit for bit, so no second one is held. PEFT supplies the layers, whose forward
pass is `beside`; it is imported here alone, and only where `trainer.lora` is set.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from dart.config import ADAPTER_FOLDER, Lora
from dart.errors import UserError
from dart.workers.train import collectives
from dart.workers.train.batch import MicroBatch
from dart.workers.train.errors import OTHER_CHECKPOINT
from dart.workers.train.passes import parts
from dart.workers.train.policy import Policy

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "default"
"""PEFT's name of a model's only adapter."""
BASE = "base.json"
"""In a checkpoint's adapter: the digest of the weights that it was trained beside."""


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze the model, and put an adapter into it, with the values that follow from the seed.

    On a model without weights (torch's `meta` device) the adapter has none either. Raises UserError.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError:
        raise UserError(
            "trainer.lora: PEFT is not installed: install dart's extra `train` (pip install '.[train]') on the "
            "trainer's machine, or leave trainer.lora out"
        ) from None
    _check_targets(model, lora)
    empty = next(model.parameters()).is_meta
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config(model, lora), model, NAME, low_cpu_mem_usage=empty)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for _, layer in adapted(model):
        layer.forward = functools.partial(beside, layer)


def beside(layer: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """W·x + s·B·(A·x), as PEFT computes it, with scaling and sum as a part of the last product. rows: [..., in].

    PEFT's own way goes over the output four times more, and makes two more of it.
    """
    out: torch.Tensor = layer.base_layer(rows)
    if layer._disable_adapters:
        return out
    down, up = (layer.get_submodule(f"lora_{which}.{NAME}").weight for which in "AB")
    thin = linear(rows, down.to(rows.dtype)).flatten(0, -2).to(out.dtype)
    return torch.addmm(out.flatten(0, -2), thin, up.to(out.dtype).t(), alpha=layer.scaling[NAME]).view_as(out)


def hold_narrow(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold the frozen weights in the dtype in which they are used: nothing is ever added to them."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def peft_config(model: PreTrainedModel, lora: Lora, base: str | None = None) -> LoraConfig:
    """What PEFT calls this adapter; base: the folder of the model that it belongs to."""
    from peft import LoraConfig

    # The vision tower has layers of the same names.
    targets = rf"{re.escape(_decoder_name(model))}\..*\.({'|'.join(lora.target_modules)})"
    if lora.tower:
        targets = "|".join((targets, *map(re.escape, _tower(model))))
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        bias="none",
        base_model_name_or_path=base,
    )


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers that have an adapter, by name."""
    return ((name, part) for name, part in model.named_modules() if hasattr(part, "lora_A"))


class SwitchedOff:
    """The policy without its adapter, as a reference policy. It takes part in the policy's sharding, if any."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __call__(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Policy.forward`. Sharding then forgets its passes, so call it before the one whose gradient is wanted."""
        with self._off():
            result: tuple[torch.Tensor, torch.Tensor] = self._policy(batch)
        # What FSDP has noted of this pass would be taken for a part of the next one.
        if (forget := getattr(self._policy, "reset_iter_state", None)) is not None:
            forget()
        return result

    @contextmanager
    def _off(self) -> Iterator[None]:
        layers = [layer for _, layer in adapted(self._policy.model)]
        try:
            for layer in layers:
                # PEFT's own switch would also make the adapter's weights need no gradient, which sharding relies on.
                layer._disable_adapters = True
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False


def digest_of_base(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Tells the frozen weights below an adapter from others: sha256 of the first row of each, rounded to the dtype.

    All ranks call it at the same time, and get the same.
    """
    digest = hashlib.sha256()
    for name, layer in adapted(model):
        row = parts.local(layer.base_layer.weight.detach())[:1].to(dtype).float().cpu().contiguous()
        digest.update(name.encode())
        digest.update(row.numpy().tobytes())
    return collectives.all_gather(digest.hexdigest())[0]


def check_resumed(folder: Path, lora: Lora | None, digest: str) -> None:
    """Raises UserError unless the checkpoint has the adapter that the config asks for, beside the same base.

    digest: that of the weights of `model.path`; "" without an adapter.
    """
    has = (folder / ADAPTER_FOLDER).is_dir()
    if lora is None and has:
        raise UserError(
            f"checkpoint {folder} was made with trainer.lora, which is not set: set it as it was then, or start a "
            f"new run with model.path: {folder}, which holds the merged weights"
        )
    if lora is None:
        return
    if not has:
        raise UserError(
            f"trainer.lora: {folder}, from which the run continues, has no adapter, so its weights are not those of "
            f"model.path, to which the adapter and the reference policy belong: leave trainer.lora out, or start a new "
            f"run with model.path: {folder}"
        )
    try:
        saved = json.loads((folder / ADAPTER_FOLDER / "adapter_config.json").read_text(encoding="utf-8"))
        base = json.loads((folder / ADAPTER_FOLDER / BASE).read_text(encoding="utf-8"))
        before = {"rank": saved["r"], "alpha": saved["lora_alpha"]}
        trained_beside = base["sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"checkpoint {folder}: its adapter cannot be read ({error}): {OTHER_CHECKPOINT}") from None
    for field, value in before.items():
        if value != (now := getattr(lora, field)):
            raise UserError(
                f"trainer.lora.{field} is {now}, and was {value} when {folder} was made: set it to {value}, or start a "
                "new run"
            )
    if trained_beside != digest:
        raise UserError(
            f"model.path: the adapter in {folder} was trained with other base weights, or with another "
            "trainer.lora.target_modules, tower or model.dtype: set them as they were, or start a new "
            f"run with model.path: {folder}, which holds the merged weights"
        )


def _decoder_name(model: PreTrainedModel) -> str:
    decoder = model.get_decoder()
    names: list[str] = [name for name, part in model.named_modules() if part is decoder]
    return names[0]


def _tower(model: PreTrainedModel) -> list[str]:
    """The names of the vision tower's linear layers, the projection into the language model among them.

    The same whether they have an adapter already or not.
    """
    visual = getattr(model.model, "visual", None)
    linears = {id(part) for part in visual.modules() if isinstance(part, nn.Linear)} if visual is not None else set()
    found = (name for name, part in model.named_modules() if id(part) in linears and not is_adapter(f"{name}."))
    return [name.removesuffix(".base_layer") for name in found]


def _check_targets(model: PreTrainedModel, lora: Lora) -> None:
    """Raises UserError unless each of them is a linear layer of the decoder."""
    named = model.get_decoder().named_modules()
    there = {name.rpartition(".")[2] for name, part in named if isinstance(part, nn.Linear)}
    if missing := sorted(set(lora.target_modules) - there):
        raise UserError(
            f"trainer.lora.target_modules: the language model has no linear layer {', '.join(missing)}: choose from "
            f"{', '.join(sorted(there))}"
        )
    if lora.tower and not _tower(model):
        raise UserError(
            f"trainer.lora.tower: {type(model).__name__} has no vision tower that is known here (Qwen's are): leave it "
            "out"
        )
