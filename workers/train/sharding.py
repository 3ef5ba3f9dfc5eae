"""Weights sharded over the ranks by torch's `fully_shard` (FSDP2): each rank holds a part of every tensor.

A policy is sharded in units: each decoder layer, each block of the vision tower, and everything else. A unit's weights
are gathered when its forward or backward pass begins and freed when it ends. Its gradients are summed over the ranks,
and each rank keeps those of its part, so that its optimiser state is a part too. Nothing is divided by the number of
ranks, because every mean of the loss is over the whole batch. Parts are float32; with a narrower model dtype, weights
are gathered and used in that dtype, and gradients are summed in float32.

Only rank 0 ever holds a whole model, in host memory while it loads. The others receive each unit's tensors and keep
their parts, so that a device holds its parts and one whole unit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from dart.config import TrainWorkerConfig
from dart.errors import UserError
from dart.workers.train import collectives
from dart.workers.train.adapters import lora as adapters
from dart.workers.train.model import check_folder, layout_of, load_image_processor, load_model, shell
from dart.workers.train.passes.lockstep import InStep, Script, idle_batch
from dart.workers.train.passes.whole import MakePolicy, Ready
from dart.workers.train.policy import Blank, Policy

T = TypeVar("T")

BLANK_PIXELS = 64
"""The sides of an image that is encoded where a pass has no other."""


def load(config: TrainWorkerConfig, folder: Path, device: torch.device, make_policy: MakePolicy) -> Ready:
    """Load the policy from the folder, and the reference from `model.path`. All ranks call it at the same time.

    The reference is held in the model's dtype, to which the policy's weights are rounded in every pass, so that the KL
    to it is exactly 0 at the start. With an adapter, the reference is the policy without it. Raises UserError on all
    ranks.
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UserError(
            f"trainer.sharding: full needs torch 2.13, and this is {torch.__version__}: upgrade it, or set "
            "trainer.sharding: none"
        )
    mesh, script = _mesh_of_ranks(device), Script(device)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    blank = _on_all(lambda: _blank(folder, device))

    lora, referred = config.trainer.lora, config.trainer.loss.kl_coefficient > 0

    def sharded(of: Path, held: torch.dtype, trained: bool) -> Policy:
        def prepare(model: PreTrainedModel) -> None:
            model.requires_grad_(trained)
            if lora is not None:
                adapters.attach(model, lora, config.seed)

        return _load_sharded(of, prepare, lambda model: make_policy(model, blank), mesh, device, dtype, held, script)

    policy = sharded(folder, torch.float32, True)
    own = sharded(config.model.folder, dtype, False) if referred and lora is None else None
    reference = adapters.SwitchedOff(policy) if referred and lora is not None else own
    idle = idle_batch(blank, layout_of(policy.model, folder)).to(device)
    encoded = [one.kept for one in (policy, own) if one is not None and one.kept is not None]
    return Ready(policy, reference, InStep(script, policy, own, idle, device, encoded))


def _blank(folder: Path, device: torch.device) -> Blank:
    """Raises UserError if the folder has no model or no image processor."""
    check_folder(folder)
    processor = load_image_processor(folder)
    made = processor(images=[Image.new("RGB", (BLANK_PIXELS, BLANK_PIXELS))], return_tensors="pt")
    grid = torch.as_tensor(made["image_grid_thw"])
    pixels = torch.as_tensor(made["pixel_values"])
    return Blank(pixels.to(device), grid.to(device), int(grid.prod()) // processor.merge_size**2)


def _mesh_of_ranks(device: torch.device) -> DeviceMesh:
    """All ranks in one dimension. A single process gets a process group of its own, which sharding needs."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),))


def _load_sharded(
    folder: Path,
    prepare: Callable[[PreTrainedModel], None],
    make_policy: Callable[[PreTrainedModel], Policy],
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    held: torch.dtype,
    script: Script,
) -> Policy:
    """The folder's model, sharded. prepare: marks what trains; called for the model with weights (rank 0) and for the
    one without. dtype: of the gathered weights; held: of the parts. Raises UserError on all."""

    def begun() -> tuple[PreTrainedModel | None, Policy]:
        source = None
        if dist.get_rank() == 0:
            source = load_model(folder, torch.device("cpu"))
            prepare(source)
        model = shell(folder, device)
        if source is not None:
            model.generation_config = source.generation_config
        prepare(model)
        return source, make_policy(model)

    source, policy = _on_all(begun)
    model = policy.model
    mixed = MixedPrecisionPolicy(
        param_dtype=None if dtype == held else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for name in [name for name, part in model.named_modules() if _is_unit(part, model)]:
        unit = model.get_submodule(name)
        _fill(unit, None if source is None else source.get_submodule(name), device, held)
        fully_shard(unit, mesh=mesh, mp_policy=mixed)
    _fill(model, source, device, held)
    # Gathered again for the backward pass, so that every pass has the same collectives whatever came before it.
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=True)
    for part in policy.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
    script.direct(policy)
    del source
    gc.collect()  # rank 0's whole model is in reference cycles
    return policy


def _on_all(work: Callable[[], T]) -> T:
    """This rank's result, if every rank has one: no rank waits in vain for another. Raises UserError on all."""
    result, problem = None, None
    try:
        result = work()
    except UserError as error:
        problem = str(error)
    if problems := [one for one in collectives.all_gather(problem) if one is not None]:
        raise UserError(problems[0])
    return result  # type: ignore[return-value]


def _is_unit(part: nn.Module, model: PreTrainedModel) -> bool:
    """Whether it is a decoder layer or a block of the vision tower."""
    visual = getattr(model.model, "visual", None)
    blocks = getattr(visual, "blocks", ())
    return any(part is unit for unit in (*model.get_decoder().layers, *blocks))


def _fill(part: nn.Module, source: nn.Module | None, device: torch.device, held: torch.dtype) -> None:
    """Give the tensors of the part that have no memory yet the values that rank 0 has in `source`, in every rank."""
    tied: dict[int, nn.Parameter] = {}
    for path, owner in list(part.named_modules()):
        twin = None if source is None else source.get_submodule(path)

        def value(name: str, empty: torch.Tensor, dtype: torch.dtype, twin: nn.Module | None = twin) -> torch.Tensor:
            return _from_rank_0(empty, None if twin is None else getattr(twin, name), device, dtype)

        for name, empty in list(owner.named_parameters(recurse=False)):
            if empty.is_meta:
                if id(empty) not in tied:
                    tied[id(empty)] = nn.Parameter(value(name, empty, held), requires_grad=empty.requires_grad)
                setattr(owner, name, tied[id(empty)])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(owner, name, value(name, buffer, buffer.dtype))


def _from_rank_0(
    like: torch.Tensor, source: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    value = torch.empty(like.shape, dtype=dtype, device=device)
    if source is not None:
        value.copy_(source.detach())
    dist.broadcast(value, 0)
    return value
