"""Norms, rotary embeddings and gated MLPs on a GPU, each in one kernel instead of five to ten.

transformers computes them operation by operation, and each goes over all hidden states again, mostly in float32.
`torch.compile` makes one kernel of each function here. Only these small functions are compiled, not whole layers: they
take seconds, hold for every shape, and know nothing of adapters, sharding and checkpointing. They round where
transformers rounds, but for the product of a gate, which is rounded once instead of twice.

A tower whose MLPs have 3,420 channels (Qwen2.5-VL's) gets kernels of an older generation, because a row of bfloat16
weights then does not fill whole 16 bytes. Rows of zeros make 3,424 of them, and the result is the same.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo as dynamo
from torch import nn
from torch.nn.functional import linear, pad, silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from dart.core.capacity.shape import QWEN2_5, QWEN3
from dart.errors import UserError

COMPILERS = ("clang", "gcc")
"""Those that Triton looks for, after the environment variable CC."""
ALIGNED = 8
"""Channels: 16 bytes of bfloat16."""
FAMILIES = (QWEN2_5, QWEN3)
HEADERS = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
"""Triton compiles its launcher with it."""
RECOMPILED = 64
"""Times, at most."""
KEPT_WIDE = ("q_norm", "k_norm")
"""Norms before rotary embeddings, which transformers computes in float32. The others end in linear layers."""


def speed_up(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Switch the model's layers over, if it is of a family that was looked at: others, later ones of Qwen's too, mean
    something else by these names.

    backend: of `torch.compile`. Raises UserError if it needs a C compiler and there is none.
    """
    if model.config.model_type not in FAMILIES:
        return
    if backend == "inductor" and not any(map(shutil.which, filter(None, (os.environ.get("CC"), *COMPILERS)))):
        raise UserError(
            "trainer.fused_kernels needs a C compiler on the trainer's machine, and there is none: install gcc "
            "(apt-get install gcc libc6-dev), or set trainer.fused_kernels: false"
        )
    if backend == "inductor" and not HEADERS.is_file():
        raise UserError(
            f"trainer.fused_kernels needs Python's headers on the trainer's machine, and there is no {HEADERS}: "
            "install them (apt-get install python3-dev), or set trainer.fused_kernels: false"
        )
    kernels = Kernels(backend)
    last = model.get_decoder().norm  # the head computes in float32 from its result
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            narrow = module is not last and name.rpartition(".")[2] not in KEPT_WIDE
            module.forward = functools.partial(_norm, kernels, module, narrow)
        elif _is_gated(module):
            module.forward = functools.partial(_gated, kernels, module)
    for name in {type(module).__module__ for module in model.modules()}:
        modelling: Any = sys.modules[name]
        if hasattr(modelling, "apply_rotary_pos_emb"):
            modelling.apply_rotary_pos_emb = functools.partial(_rotated, kernels.rotated)
        if hasattr(modelling, "apply_rotary_pos_emb_vision"):
            modelling.apply_rotary_pos_emb_vision = functools.partial(_rotated_patches, kernels.rotated)


class Kernels:
    """The compiled functions, for any shape. Each is compiled when it is first called, and again for other dtypes, with
    and without gradient: more often than torch allows by itself, but a bounded number of times."""

    def __init__(self, backend: str) -> None:
        dynamo.config.recompile_limit = max(RECOMPILED, dynamo.config.recompile_limit)
        compiled: Callable[..., Callable[..., torch.Tensor]] = functools.partial(
            torch.compile, dynamic=True, backend=backend
        )
        self.norm = compiled(norm)
        self.gate = compiled(gate)
        self.rotated = compiled(rotated)


def norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    """weight · rows / √(mean of squares + epsilon). rows: [N, hidden]."""
    wide = rows.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * scaled.to(rows.dtype)).to(dtype)


def gate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """silu(first) · second."""
    return silu(first) * second


def rotated(rows: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pairs of channels (i, i + d/2) turned by an angle. rows: [..., d]; cosine, sine: broadcast over its heads."""
    low, high = rows.chunk(2, -1)
    return (rows * cosine + torch.cat((-high, low), -1) * sine).to(dtype)


def _norm(kernels: Kernels, module: nn.Module, narrow: bool, hidden_states: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    dtype = torch.promote_types(weight.dtype, hidden_states.dtype)
    # A linear layer would narrow it next, once for each layer that takes it.
    dtype = _product_dtype(hidden_states, dtype) if narrow else dtype
    with _as_told(hidden_states):
        made = kernels.norm(hidden_states.flatten(0, -2), weight, module.variance_epsilon, dtype)
    return made.view(hidden_states.shape)


def _gated(kernels: Kernels, mlp: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    if more := _missing(mlp):
        wide = [
            linear(rows, pad(part.weight, (0, 0, 0, more)), None if part.bias is None else pad(part.bias, (0, more)))
            for part in (mlp.gate_proj, mlp.up_proj)
        ]
        return linear(kernels.gate(*wide), pad(mlp.down_proj.weight, (0, more)), mlp.down_proj.bias)
    result: torch.Tensor = mlp.down_proj(kernels.gate(mlp.gate_proj(rows), mlp.up_proj(rows)))
    return result


def _missing(mlp: nn.Module) -> int:
    """Channels to the next whole 16 bytes, for plain layers."""
    if not all(type(layer) is nn.Linear for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        return 0
    return int(-mlp.gate_proj.weight.shape[0] % ALIGNED)


def _is_gated(module: nn.Module) -> bool:
    layers = ("gate_proj", "up_proj", "down_proj")
    activation = getattr(module, "act_fn", None)
    return all(hasattr(module, name) for name in layers) and isinstance(activation, (nn.SiLU, SiLUActivation))


def _rotated(
    turn: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k: [B, heads, S, d] with `unsqueeze_dim` 1; cos, sin: [B, S, d]."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    dtype = _product_dtype(q, torch.promote_types(q.dtype, cos.dtype))
    with _as_told(q):
        return turn(q, cos, sin, dtype), turn(k, cos, sin, dtype)


def _rotated_patches(
    turn: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k: [S, heads, d]; cos, sin: [S, d], used in float32."""
    cos, sin = cos[None, :, None].float(), sin[None, :, None].float()
    with _as_told(q):
        return turn(q[None], cos, sin, q.dtype)[0], turn(k[None], cos, sin, k.dtype)[0]


def _as_told(like: torch.Tensor) -> torch.autocast:
    """The functions say their dtypes; without autocast there is one state less to compile them for."""
    return torch.autocast(like.device.type, enabled=False)


def _product_dtype(like: torch.Tensor, otherwise: torch.dtype) -> torch.dtype:
    """The dtype in which matrix products take their inputs: autocast's where it is on, else `otherwise`."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else otherwise
