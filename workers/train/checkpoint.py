"""Checkpoint folders: a Hugging Face model that `from_pretrained` loads, and what training needs to resume.

Tokenizer, processor and chat template are copied byte for byte from the folder that training started from. Optimiser
state, update count, weight version and, where the model's dtype is narrower, float32 weights are in `trainer_state.pt`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dart import manifest
from dart.errors import UserError

STATE = "trainer_state.pt"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", manifest.NAME)


def save(
    path: Path,
    *,
    source: Path,
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    optimizer: torch.optim.Optimizer,
    updates: int,
    version: int,
) -> None:
    """Write a folder that is either complete or absent (`dart.manifest`)."""
    with manifest.written(path.absolute()) as folder:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, folder / file.name)
        model.save_pretrained(folder, state_dict=weights)
        _write_dtype(folder / "config.json", dtype)
        state = {"optimizer": optimizer.state_dict(), "updates": updates, "version": version}
        if dtype != torch.float32:
            state["weights"] = {name: p.detach().cpu() for name, p in model.named_parameters()}
        torch.save(state, folder / STATE)


def resume(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Load optimiser state (and float32 weights) into the model and optimiser. Returns updates and version."""
    file = folder / STATE
    if not file.is_file():
        raise UserError(
            f"resume_from: {folder} has no {STATE}, so training cannot resume from it: "
            "name a checkpoint folder of a run, or start a new run with model.path"
        )
    state = torch.load(file, map_location="cpu", weights_only=True)
    try:
        optimizer.load_state_dict(state["optimizer"])
    except (ValueError, KeyError) as error:
        raise UserError(
            f"resume_from: {file} does not fit the model beside it ({error}): use another checkpoint"
        ) from None
    if "weights" in state:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in state["weights"].items():
                parameters[name].copy_(value)
    return int(state["updates"]), int(state["version"])


def _write_dtype(file: Path, dtype: torch.dtype) -> None:
    """The weights are written in the model's dtype, but the model that was saved holds float32."""
    name = str(dtype).removeprefix("torch.")
    config = json.loads(file.read_text(encoding="utf-8"))
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = name
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
