"""Checkpoint folders: a Hugging Face model that `from_pretrained` loads, and what training needs to resume.

Tokenizer, processor, chat template and defaults of generation are copied byte for byte from the folder that training
started from. Optimiser state, update count, weight version and, where the model's dtype is narrower, float32 weights
are in `trainer_state.pt`. Where ranks hold parts of the weights, all of this is in the folder `trainer_state`, written
by `torch.distributed.checkpoint`. Any number of ranks, sharded or not, resumes from either.

A checkpoint is made in two steps: what the next update will change is copied into host memory, and then written while
updates go on.

With an adapter (`trainer.lora`) the model is the merged one, and the folder `adapter` has the adapter alone, as PEFT
saves it. The trainer's state then has the adapter's weights and nothing of the frozen ones.
"""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from dart import manifest
from dart.config import ADAPTER_FOLDER, Lora
from dart.errors import UserError, first_line
from dart.workers.train import collectives
from dart.workers.train.adapters import lora as adapters
from dart.workers.train.adapters.weights import adapter_of, write_adapter
from dart.workers.train.errors import OTHER_CHECKPOINT, TrainError
from dart.workers.train.passes import parts

CONFIG, GENERATION = "config.json", "generation_config.json"
STATE = "trainer_state.pt"
PARTS = "trainer_state"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", manifest.NAME)
DCP = "torch.distributed.checkpoint."
PATHS = ("pathlib", "pathlib._local")  # the second since Python 3.13
DESCRIBED_BY = (f"{DCP}metadata", f"{DCP}filesystem", "torch", "torch.serialization", *PATHS)
OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, kind) for module in PATHS for kind in ("PosixPath", "WindowsPath")),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of a weight, beside its number of steps."""
LEFT_BYTES = 1e9
"""On the disk of the checkpoints, which is often that of the run's database and screenshots, too."""

Nested = dict[str, dict[str, torch.Tensor]]
Write = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint is made of. source: the folder with the tokenizer and the processor; dtype: of the weights.

    lora: the adapter that the model has, if any; digest: that of the weights below it.
    """

    source: Path
    model: PreTrainedModel
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer
    updates: int
    version: int
    lora: Lora | None = None
    digest: str = ""


def stage(path: Path, saved: Saved, copied: Callable[[], dict[str, torch.Tensor]]) -> Write:
    """Copy what the next update will change. What this returns writes a folder that is either complete or absent
    (`dart.manifest`), from any thread.

    copied: gives a copy of all weights, in the model's dtype. Raises OSError where the disk has too little room.
    """
    states_weights = saved.dtype != torch.float32 or saved.lora is not None
    check_room(path, saved, states_weights=states_weights)
    weights, adapter = copied(), adapter_of(saved.model)
    optimizer = saved.optimizer.state_dict()
    moments = {number: {key: _copy(value) for key, value in one.items()} for number, one in optimizer["state"].items()}
    state = {"optimizer": optimizer | {"state": moments}, "updates": saved.updates, "version": saved.version}
    if states_weights:
        state["weights"] = {name: _copy(weight.detach()) for name, weight in _held(saved.model).items()}

    def write() -> None:
        with manifest.written(path.absolute()) as folder:
            _write_model(folder, saved, weights, adapter)
            torch.save(state, folder / STATE)

    return write


def stage_sharded(
    path: Path,
    saved: Saved,
    gather: Callable[[], dict[str, torch.Tensor]],
    device: torch.device,
    writers: dist.ProcessGroup,
) -> Write:
    """The same by all ranks, each of which copies and writes its parts. Both steps raise TrainError, on all ranks.

    gather: gives rank 0 a copy of all weights, in the model's dtype. All ranks call this at the same time, and what it
    returns; all see the folder. writers: a group of all ranks for the writing threads, which must not get in between
    what the others say to each other.
    """
    first = dist.get_rank() == 0
    with ExitStack() as begun:
        # Leaving this on rank 0 seals the folder and gives it its name; on an error it is removed.
        named = _by_all(lambda: _begun(path, saved, begun) if first else "", device)
        folder = Path(collectives.all_gather(named)[0])
        _by_all(lambda: _check_seen(folder), device)
        # Not by torch's stager, which copies everything from the device twice.
        state = {kind: {name: _copy(one) for name, one in these.items()} for kind, these in _state(saved).items()}
        weights, adapter = gather(), adapter_of(saved.model)
        until_whole = begun.pop_all()

    def write() -> None:
        problem: str | None = None
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread is on GPU 0, where DCP's stream would cost a context
            with until_whole:
                dcp.save(state, checkpoint_id=folder / PARTS, process_group=writers)
                if first:
                    _write_model(folder, saved, weights, adapter)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to be told
            problem = first_line(error)  # that of a MemoryError is its name
        told = [one for one in collectives.all_gather(problem, writers) if one is not None]
        if told:
            raise TrainError(problem or f"another rank could not write the checkpoint: {told[0]}")

    return write


def _begun(path: Path, saved: Saved, begun: ExitStack) -> str:
    check_room(path, saved, states_weights=True)
    return str(begun.enter_context(manifest.written(path.absolute())))


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise OSError(
            errno.ENOENT,
            "rank 0 has made it, and this rank does not see it: put run.directory on a file system that all ranks have",
            str(folder),
        )


def check_room(path: Path, saved: Saved, *, states_weights: bool) -> None:
    """Raises OSError where a checkpoint would leave less than LEFT_BYTES on its disk: a full one ends the run.

    states_weights: the trainer's state has the weights that train in float32, beside those of the model's folder.
    """
    manifest.remove_left(path.absolute().parent)
    every = {name: weight.numel() for name, weight in saved.model.named_parameters()}
    train = sum(weight.numel() for weight in saved.model.parameters() if weight.requires_grad)
    needed = sum(every.values()) * saved.dtype.itemsize + train * len(MOMENTS) * torch.float32.itemsize
    if states_weights:
        needed += sum(every[name] for name in _held(saved.model)) * torch.float32.itemsize
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed + LEFT_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"it has {needed / 1e9:.1f} GB, and of {free / 1e9:.1f} GB that are free {LEFT_BYTES / 1e9:g} GB are left "
            "to the run: make room, or lower checkpoint.keep",
            str(folder),
        )


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.to("cpu", copy=True)


def _by_all(work: Callable[[], T], device: torch.device) -> T:
    """The work's result, if it succeeded on every rank."""

    def told() -> T:
        try:
            return work()
        except OSError as error:
            raise TrainError(str(error)) from error

    return collectives.together(told, "write the checkpoint", device)


def _write_model(
    folder: Path, saved: Saved, weights: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]
) -> None:
    saved.model.save_pretrained(folder, state_dict=weights)
    _write_dtype(folder / CONFIG, saved.dtype)
    (folder / GENERATION).unlink(missing_ok=True)  # it says nothing: see `model.load_model`
    for file in saved.source.iterdir():
        if file.is_file() and file.name != CONFIG and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    if saved.lora is not None:
        write_adapter(folder / ADAPTER_FOLDER, saved.model, saved.lora, saved.source, adapter, saved.digest)


def _held(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The weights that a checkpoint keeps for training: all, or the adapter's, beside which the others never change."""
    weights = dict(model.named_parameters())
    return {name: weight for name, weight in weights.items() if adapters.is_adapter(name)} or weights


def resume(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Load optimiser state (and float32 weights) into the model and optimiser. Returns updates and version.

    All ranks call this at the same time. Raises UserError.
    """
    if (folder / PARTS).is_dir():
        return _resume_from_parts(folder / PARTS, model, optimizer)
    file = folder / STATE
    if not file.is_file():
        raise UserError(
            f"checkpoint {folder} has neither {STATE} nor {PARTS}/, so training cannot resume from it: "
            f"{OTHER_CHECKPOINT}"
        )
    # Mapped, not read: a rank with sharded weights wants a part of each tensor.
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        raise UserError(
            f"checkpoint {folder}: {STATE} is damaged ({type(error).__name__}): restore the folder from a copy, or "
            f"{OTHER_CHECKPOINT}"
        ) from None
    try:
        groups = _with_own_settings(state["optimizer"]["param_groups"], optimizer)
        optimizer.load_state_dict({**_sharded_alike(state["optimizer"], optimizer), "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise _does_not_fit(file, error) from None
    if "weights" in state:
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in state["weights"].items():
                parts.copy_into(parameters[name], value)
    return int(state["updates"]), int(state["version"])


def _resume_from_parts(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    _check_parts(folder)
    state = _state(Saved(folder, model, torch.float32, optimizer, updates=0, version=0))
    try:
        # Into the tensors that are there already.
        dcp.load(state, checkpoint_id=folder)
    except (CheckpointException, ValueError, KeyError, RuntimeError) as error:
        raise _does_not_fit(folder, error) from None
    counters = state["counters"]
    return int(counters["updates"]), int(counters["version"])


class _Described(pickle.Unpickler):
    """Reads what describes a checkpoint's tensors, and makes nothing that is not for that."""

    def find_class(self, module: str, name: str) -> object:
        if module in DESCRIBED_BY and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or (module, name) in OTHERS:
                return found
            if module.startswith(DCP) and isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


def _check_parts(folder: Path) -> None:
    """Raises UserError unless the folder holds tensors alone: torch.distributed.checkpoint unpickles the description,
    and whatever is no tensor."""
    try:
        with (folder / ".metadata").open("rb") as file:
            described = _Described(file).load().state_dict_metadata
        strange = [name for name, one in described.items() if not isinstance(one, TensorStorageMetadata)]
    except OSError as error:
        raise _does_not_fit(folder, error) from None
    except Exception as error:  # noqa: BLE001 - whatever such bytes make pickle raise
        raise UserError(
            f"checkpoint {folder.parent}: {folder.name}/.metadata is not what dart writes ({error}): {OTHER_CHECKPOINT}"
        ) from None
    if strange:
        raise UserError(
            f"checkpoint {folder.parent}: {folder.name} has {strange[0]}, which is no tensor, and dart writes tensors "
            f"alone: {OTHER_CHECKPOINT}"
        )


def _state(saved: Saved) -> Nested:
    """The very tensors of the model and the optimiser, by the weights' names, and the counters.

    A weight without optimiser state gets that of the beginning: zeros.
    """
    weights = _held(saved.model)
    of_optimizer = {name: _adam(saved.optimizer, weights[name]) for name in weights if weights[name].requires_grad}
    return {
        "weights": {name: weight.detach() for name, weight in weights.items()},
        **{key: {name: state[key] for name, state in of_optimizer.items()} for key in ("step", *MOMENTS)},
        "counters": {"updates": torch.tensor(saved.updates), "version": torch.tensor(saved.version)},
    }


def _adam(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = optimizer.state[weight]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        state |= {name: torch.zeros_like(weight.detach()) for name in MOMENTS}
        optimizer.state[weight] = state
    return state


def _sharded_alike(
    state: dict[str, dict[int, dict[str, torch.Tensor]]], optimizer: torch.optim.Optimizer
) -> dict[str, object]:
    """A whole optimiser's state dict with each rank's own parts of the moments."""
    weights = dict(enumerate(weight for group in optimizer.param_groups for weight in group["params"]))

    def mine(number: int, key: str, value: torch.Tensor) -> torch.Tensor:
        return parts.part_of(value, weights[number]) if key in MOMENTS else value.clone()

    shares = {
        number: {key: mine(number, key, value) for key, value in one.items()} for number, one in state["state"].items()
    }
    return {**state, "state": shares}


def _with_own_settings(groups: list[dict[str, object]], optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """A saved optimiser's groups with the settings of the config, which a resumed run may have changed."""
    own = optimizer.state_dict()["param_groups"]
    return [mine | {"params": old["params"]} for mine, old in zip(own, groups, strict=True)]


def _does_not_fit(state: Path, error: Exception) -> UserError:
    return UserError(
        f"checkpoint {state.parent}: {state.name} does not fit the model beside it ({error}): set "
        f"trainer.freeze_vision as it was when the checkpoint was made; or {OTHER_CHECKPOINT}"
    )


def _write_dtype(file: Path, dtype: torch.dtype) -> None:
    """The weights are written in the model's dtype, but the model that was saved holds float32."""
    name = str(dtype).removeprefix("torch.")
    config = json.loads(file.read_text(encoding="utf-8"))
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = name
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
