"""Linear layers of a float32 model on a CPU, through oneDNN.

PyTorch computes float32 matrix products with MKL, which has no fast kernels for AMD's processors. oneDNN has them, is
part of PyTorch, and gives the same results up to rounding; on an EPYC core it takes about half the time
(docs/decisions.md).
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear


def speed_up(model: torch.nn.Module) -> None:
    """Switch the model's linear layers to oneDNN, if this build of PyTorch has it."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.forward = _Forward(module)


class _Forward:
    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module.bias
        single = rows.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not single or rows.device.type != "cpu" or not rows.numel():
            return linear(rows, weight, bias)
        if not torch.is_grad_enabled():
            return _product(rows, weight, bias)
        return _Linear.apply(rows, weight, bias)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: FunctionCtx, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            _product(grad, weight.t()) if for_rows else None,
            _product(flat.t(), rows.reshape(-1, rows.shape[-1]).t()) if for_weight else None,
            flat.sum(0) if for_bias else None,
        )


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows [..., K] · weight [N, K]ᵀ + bias [N]."""
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
