"""The same computation as transformers' Qwen3-VL, but faster on one CPU core; for pre-training only.

It assumes that every image in a batch has the same size and that every patch is one frame shown twice (a still
picture). So attention runs over a batch of equal rows instead of looping over images, and the patch embedding needs
half the products. `make.py` calls `speed_up` on its model in memory; the checkpoint is not affected.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from dart.workers.train.kernels import linear


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain softmax attention, [B, heads, L, d]: batched matrix products beat the flash kernel at these sizes."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype), value)


def _vision_attention(
    self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any = None, **_: Any
) -> Tensor:
    images = len(cu_seqlens) - 1
    total = hidden_states.shape[0]
    query, key, value = self.qkv(hidden_states).reshape(total, 3, self.num_heads, -1).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    rows = [
        t.to(value.dtype).reshape(images, total // images, self.num_heads, -1).transpose(1, 2)
        for t in (query, key, value)
    ]
    return self.proj(_attention(*rows).transpose(1, 2).reshape(total, -1))


def _patch_embedding(self: Any, hidden_states: Tensor) -> Tensor:
    weight = self.proj.weight.sum(2).flatten(1)  # [embed, 3 * 16 * 16]: both frames are the same picture
    if hidden_states.shape[1] != weight.shape[1]:
        hidden_states = hidden_states.view(len(hidden_states), self.in_channels, self.temporal_patch_size, -1)[
            :, :, 0
        ].flatten(1)
    return functional.linear(hidden_states, weight, self.proj.bias)


def speed_up(model: Any) -> None:
    """Speed up `model` in place."""
    visual = model.model.visual
    visual.patch_embed.forward = types.MethodType(_patch_embedding, visual.patch_embed)
    linear.speed_up(model)
    for block in visual.blocks:
        block.attn.forward = types.MethodType(_vision_attention, block.attn)
