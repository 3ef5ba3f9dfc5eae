"""The shape of a vision-language model, read from its config.json, and how many weights it has.

Qwen2.5-VL (of which UI-TARS 1.5 is one) and Qwen3-VL. The counts are exact: they are those of the layers that
transformers makes (`modeling_qwen2_5_vl.py`, `modeling_qwen3_vl.py`, transformers 5.19).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dart.core.json_text import JSON

QWEN2_5, QWEN3 = "qwen2_5_vl", "qwen3_vl"


class UnknownShape(Exception):
    """A config.json of another family, or one without a size that is needed. Says which."""


@dataclass(frozen=True, slots=True)
class Text:
    """The decoder: H hidden, I intermediate, n query heads and m key-value heads of d channels, V tokens."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    """The head's weights are the embedding's."""
    qkv_bias: bool
    output_bias: bool
    head_norms: bool
    """Queries and keys are normalised for each head (Qwen3)."""

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer that a token is multiplied with: H·n·d + 2·H·m·d + n·d·H (attention) + 3·H·I (MLP)."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer(self) -> int:
        """All weights of one layer: matrices, two norms (2·H), norms of the heads (2·d), biases."""
        biases = self.qkv_bias * self.head_size * (self.heads + 2 * self.kv_heads) + self.output_bias * self.hidden
        return self.layer_matrices + 2 * self.hidden + self.head_norms * 2 * self.head_size + biases

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Weights of LoRA's two matrices beside the named matrices of all layers: rank · (inputs + outputs) each."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        sides = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": self.hidden + queries,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.intermediate),
        }
        return self.layers * rank * sum(sides.get(name, 0) for name in set(targets))

    @property
    def embedding(self) -> int:
        """V·H."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """Embedding, layers, last norm, and the head unless it is tied."""
        return self.embedding * (1 if self.tied else 2) + self.layers * self.layer + self.hidden


@dataclass(frozen=True, slots=True)
class Vision:
    """The tower: h hidden, i intermediate; `merge`² patches become one token of the decoder's `out` channels."""

    family: str
    depth: int
    hidden: int
    intermediate: int
    heads: int
    out: int
    patch_values: int
    """Numbers in a patch: channels · frames · height · width."""
    merge: int
    positions: int
    """Learned position embeddings; Qwen2.5-VL has none."""
    deepstack: int
    """Blocks whose output also goes into the decoder, each through a merger of its own; Qwen3-VL alone."""
    full_blocks: int
    """Blocks whose attention spans the whole image; the others have windows of `window` patches."""
    window: int

    @property
    def merged(self) -> int:
        return self.hidden * self.merge**2

    @property
    def block_matrices(self) -> int:
        """4·h² (attention) + 2·h·i, or 3·h·i where the MLP is gated (Qwen2.5-VL)."""
        return 4 * self.hidden**2 + (3 if self.family == QWEN2_5 else 2) * self.hidden * self.intermediate

    @property
    def block(self) -> int:
        """Matrices, their biases, and two norms: RMSNorm has h weights, LayerNorm 2·h."""
        gated = self.family == QWEN2_5
        biases = 4 * self.hidden + (2 if gated else 1) * self.intermediate + self.hidden
        return self.block_matrices + biases + (2 if gated else 4) * self.hidden

    def adapter(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank beside every matrix of the blocks and of the mergers: rank · (inputs +
        outputs) each."""
        gated = self.family == QWEN2_5
        block = 6 * self.hidden + (3 if gated else 2) * (self.hidden + self.intermediate)
        merger = 3 * self.merged + self.out
        return rank * (self.depth * block + (1 if gated else 1 + self.deepstack) * merger)

    @property
    def merger_matrices(self) -> int:
        """(h·merge²)² + h·merge²·out."""
        return self.merged * (self.merged + self.out)

    @property
    def weights(self) -> int:
        """Patch embedding, positions, blocks, merger, and the mergers of deepstack."""
        biased = self.merger_matrices + self.merged + self.out
        if self.family == QWEN2_5:
            return self.patch_values * self.hidden + self.depth * self.block + biased + self.hidden
        patches = (self.patch_values + 1) * self.hidden
        mergers = biased + 2 * self.hidden + self.deepstack * (biased + 2 * self.merged)
        return patches + self.positions * self.hidden + self.depth * self.block + mergers


@dataclass(frozen=True, slots=True)
class Shape:
    """`stored`: the weights counted in the checkpoint's own files, where they were read; else the config's count."""

    text: Text
    vision: Vision
    stored: int | None = None

    @property
    def computed(self) -> int:
        return self.text.weights + self.vision.weights

    @property
    def outside_layers(self) -> int:
        """Weights that are in no layer of the decoder and no block of the tower: embedding, head, mergers, …"""
        return self.computed - self.text.layers * self.text.layer - self.vision.depth * self.vision.block

    @property
    def weights(self) -> int:
        return self.computed if self.stored is None else self.stored


def read_shape(document: Mapping[str, JSON], stored: int | None = None) -> Shape:
    """From a config.json; older ones have the decoder's sizes at the top. Raises UnknownShape."""
    family = str(document.get("model_type", ""))
    if family not in (QWEN2_5, QWEN3):
        raise UnknownShape(f"model_type is {family or 'missing'}: only {QWEN2_5} and {QWEN3} are known")
    nested = document.get("text_config")
    text = nested if isinstance(nested, Mapping) else document
    vision = document.get("vision_config")
    if not isinstance(vision, Mapping):
        raise UnknownShape("there is no vision_config")
    tied = text.get("tie_word_embeddings", False) if nested is None else document.get("tie_word_embeddings", False)
    try:
        return Shape(_text(family, text, tied=bool(tied)), _vision(family, vision), stored)
    except KeyError as error:
        raise UnknownShape(f"{error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise UnknownShape(f"a size is not a number: {error}") from None


def _text(family: str, found: Mapping[str, Any], *, tied: bool) -> Text:
    heads = int(found["num_attention_heads"])
    third = family == QWEN3
    bias = bool(found.get("attention_bias", False))
    return Text(
        layers=int(found["num_hidden_layers"]),
        hidden=int(found["hidden_size"]),
        intermediate=int(found["intermediate_size"]),
        heads=heads,
        kv_heads=int(found.get("num_key_value_heads") or heads),
        # Qwen2.5-VL ignores a head_dim.
        head_size=int(found.get("head_dim") or 128) if third else int(found["hidden_size"]) // heads,
        vocabulary=int(found["vocab_size"]),
        tied=tied,
        qkv_bias=bias if third else True,
        output_bias=bias and third,
        head_norms=third,
    )


def _vision(family: str, found: Mapping[str, Any]) -> Vision:
    """Where a size is left out, transformers' default counts."""
    third = family == QWEN3
    patch = _one(found.get("patch_size", 16 if third else 14))
    channels = int(found.get("in_channels", found.get("in_chans", 3)))
    depth = int(found.get("depth", 27 if third else 32))
    full = found.get("fullatt_block_indexes", (7, 15, 23, 31))
    return Vision(
        family=family,
        depth=depth,
        hidden=int(found["hidden_size"]),
        intermediate=int(found.get("intermediate_size", 4304 if third else 3420)),
        heads=int(found.get("num_heads", 16)),
        out=int(found.get("out_hidden_size", 3584)),
        patch_values=channels * _one(found.get("temporal_patch_size", 2)) * patch**2,
        merge=int(found.get("spatial_merge_size", 2)),
        positions=int(found.get("num_position_embeddings", 2304)) if third else 0,
        deepstack=len(found.get("deepstack_visual_indexes", (8, 16, 24))) if third else 0,
        full_blocks=depth if third else sum(index < depth for index in full),
        window=0 if third else (int(found.get("window_size", 112)) // patch) ** 2,
    )


def _one(size: int | Sequence[int]) -> int:
    return int(size) if isinstance(size, int | float) else int(size[0])
