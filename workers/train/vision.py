"""Qwen's vision towers with fewer, larger kernels: same values (up to rounding), same weights, several times faster.

`features` gives a micro-batch's screenshots as the text model takes them. If the tower does not train, they are
computed without gradient and kept by digest (`EncodedScreenshots`), because later passes and updates would compute the
same.

Attention is within each image, or within each window of one. Without FlashAttention, transformers loops over them in
Python; here those of one length go through one `scaled_dot_product_attention`. The patch embedding is a convolution
whose stride equals its kernel size, so every patch is one row of a matrix product, which is four times faster on a CPU
than `Conv3d`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from dart.errors import UserError
from dart.screenshots.held import Held
from dart.workers.train.batch import MicroBatch

NAME = "dart_flash_by_length"
"""Contains "flash": by that transformers recognises implementations that take packed sequences with cu_seqlens."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Screenshots as the text model takes them (`mm_encoder_outputs`), with the names that transformers uses.

    pooler_output: one tensor [tokens, hidden] for each; deepstack_features: the same for each level that Qwen3-VL adds
    to its first layers, None for a model without.
    """

    pooler_output: tuple[torch.Tensor, ...]
    deepstack_features: list[tuple[torch.Tensor, ...]] | None


class EncodedScreenshots:
    """What a frozen tower made of screenshots, by digest, in host memory; the least recently used are evicted first.

    A 1920 × 1080 screenshot takes 19 MB for Qwen2.5-VL-7B in bfloat16. For one model, and one thread.
    """

    def __init__(self, most_bytes: int) -> None:
        self._held: Held[tuple[torch.Tensor, ...]] = Held(most_bytes, lambda one: sum(part.nbytes for part in one))
        self.encoded = 0
        """How many screenshots the tower was run on."""
        self._fresh: list[bytes] | None = None
        """What the pass under way has encoded; None unless passes are announced."""

    def begin_pass(self) -> None:
        self._fresh = []

    def take_back(self) -> None:
        """Forget what this pass has encoded: weights that other ranks were to give may have been missing."""
        for digest in self._fresh or ():
            self._held.drop(digest)

    def get(self, model: PreTrainedModel, batch: MicroBatch) -> list[tuple[torch.Tensor, ...]]:
        """For each of the batch's U distinct screenshots its levels, [tokens, hidden] each, the pooled output first."""
        digests, device = batch.image_digests, batch.input_ids.device
        levels = {digest: one for digest in digests if (one := self._held.get(digest)) is not None}
        missing = [number for number, digest in enumerate(digests) if digest not in levels]
        if missing:
            assert batch.pixel_values is not None and batch.image_grid_thw is not None, "it has screenshots"
            pixels = batch.pixel_values.split(batch.image_grid_thw.prod(-1).tolist())
            chosen = torch.cat([pixels[number] for number in missing])
            with torch.no_grad():
                made = _levels(model, chosen, batch.image_grid_thw[missing])
            if self._fresh is not None:
                self._fresh += [digests[number] for number in missing]
            self.encoded += len(missing)
            # Clones, because the model gives views of all screenshots together.
            levels |= {digests[n]: tuple(part.clone() for part in one) for n, one in zip(missing, made, strict=True)}
        for digest, one in levels.items():
            self._held.note(digest, tuple(part.to("cpu") for part in one))
        return [tuple(part.to(device) for part in levels[digest]) for digest in digests]


def freeze(model: PreTrainedModel) -> None:
    """The vision tower's parameters, the projection into the text model among them, do not train. Raises UserError."""
    visual = getattr(model.model, "visual", None)
    if visual is None:
        raise UserError(
            f"trainer.freeze_vision: {type(model).__name__} has no vision tower that is known here (Qwen's are): "
            "leave it out"
        )
    visual.requires_grad_(False)


def features(model: PreTrainedModel, batch: MicroBatch, kept: EncodedScreenshots | None = None) -> Encoded | None:
    """The screenshots of the batch's prompts, in reading order; None if it has none.

    The tower runs once for each distinct screenshot of the batch. `kept`, for a frozen tower: and only for those that
    are not kept. Then they have no gradient.
    """
    if batch.pixel_values is None or batch.image_grid_thw is None:
        return None
    made = kept.get(model, batch) if kept else _levels(model, batch.pixel_values, batch.image_grid_thw)
    pooled, *deep = (tuple(made[index][level] for index in batch.image_index) for level in range(len(made[0])))
    return Encoded(pooled, deep or None)


def _levels(model: PreTrainedModel, pixels: torch.Tensor, grids: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
    """For each screenshot the tower's pooled output and its deepstack levels, if it has any."""
    output = model.model.get_image_features(pixels, grids, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()
    return list(zip(output.pooler_output, *deep, strict=True))


def speed_up(model: torch.nn.Module) -> None:
    """Switch the model's vision tower over, if it is one of Qwen's."""
    visual = getattr(model.model, "visual", None)
    if visual is None:
        return
    if visual.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend_by_length)
        visual.config._attn_implementation = NAME
    projection = getattr(getattr(visual, "patch_embed", None), "proj", None)
    if isinstance(projection, torch.nn.Conv3d) and projection.kernel_size == projection.stride:
        visual.patch_embed.forward = functools.partial(embed_patches, projection)


def embed_patches(projection: torch.nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """patches: float [N, channels · time · height · width] in the order of the kernel. Returns [N, hidden]."""
    weight = projection.weight.flatten(1)
    return linear(patches.view(-1, weight.shape[1]).to(weight.dtype), weight, projection.bias)


def attend_by_length(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Full attention within each packed sequence. query, key, value: [1, heads, S, d]. Returns [1, S, heads, d]."""
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError("vision attention takes one packed row and no mask")
    groups = _by_length(cu_seq_lens_q)
    if len(groups) == 1:
        return _same_length(query, key, value, groups[0].count, scaling), None
    output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    for group in groups:
        q, k, v = (x[:, :, group.where] for x in (query, key, value))
        part = _same_length(q, k, v, group.count, scaling)
        output = output.index_copy(1, group.where, part)
    return output, None


@dataclass(frozen=True, slots=True)
class _Group:
    """The packed sequences of one length. where: int64 [count · length], their positions."""

    count: int
    where: torch.Tensor


_GROUPS = WeakTensorKeyDictionary()
"""By the boundaries in use: every block of a pass has the same ones, and reading them waits for the GPU."""


def _by_length(boundaries: torch.Tensor) -> list[_Group]:
    """boundaries: int [sequences + 1], cumulative lengths."""
    if (known := _GROUPS.get(boundaries)) is not None:
        return known  # type: ignore[no-any-return]
    starts: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(boundaries.tolist()):
        starts.setdefault(end - start, []).append(start)
    groups = []
    for length, these in sorted(starts.items()):
        where = torch.tensor(these)[:, None] + torch.arange(length)
        groups.append(_Group(len(these), where.flatten().to(boundaries.device)))
    _GROUPS[boundaries] = groups
    return groups


def _same_length(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, count: int, scaling: float
) -> torch.Tensor:
    _, heads, total, size = query.shape
    q, k, v = (x.view(heads, count, total // count, size).transpose(0, 1) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, scale=scaling)
    return out.transpose(1, 2).reshape(1, total, heads, size)
