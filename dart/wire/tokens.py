"""Token ids that the sampler and the trainer must agree on. No torch, no transformers.

A *sampled* vision token in the history would be taken for an image placeholder and corrupt the prompt. So the roll-out
engine bans these ids while sampling, and the trainer masks the same columns before its softmax: both then use the same
distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_PAD = "<|image_pad|>"


class Vocabulary(Protocol):
    """The part of a Hugging Face tokenizer used here."""

    def get_vocab(self) -> Mapping[str, int]: ...


def vision_token_ids(tokenizer: Vocabulary) -> tuple[int, ...]:
    """Ids that are never sampled: those of `VISION_TOKENS` that this tokenizer has, in ascending order."""
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted(vocabulary[token] for token in VISION_TOKENS if token in vocabulary))
