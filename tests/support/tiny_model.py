"""A tiny random Qwen3-VL folder that transformers, AutoProcessor and vLLM all load: the model of the tests.

`build(folder, seed)` writes config, safetensors weights, tokenizer and processor files (about 9 MB in float32, one
second). The weights are random, the shapes are those that were seen to learn from screenshots on a CPU. Attributes
that weigh on a test can be overridden: `build(folder, text={"num_hidden_layers": 2})`.

The vocabulary is byte-level without merges (one token per byte) after the eight special tokens, so any text can be
written and every digit is a token of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MERGED_PATCH_PIXELS = 32
"""Patch 16, merged 2 × 2: screenshots whose sides are multiples of this are not resized."""


def build_tokenizer() -> Any:
    """A byte-level tokenizer of 264 entries with Qwen's special tokens; <|im_end|> ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(SPECIAL_TOKENS) + len(alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    backend.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: Any, max_pixels: int = 1024 * 1024) -> Any:
    """Image and video processor around the tokenizer; images within bounds are only resized to multiples of 32."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    size = {"shortest_edge": MERGED_PATCH_PIXELS**2, "longest_edge": max_pixels}
    shape = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **shape, **half),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size, **shape, **half),
    )


def build_config(tokenizer: Any, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> Any:
    """3.2 million parameters. Learned absolute vision positions (12 × 12) are what makes grounding learnable."""
    from transformers import Qwen3VLConfig

    ids = tokenizer.convert_tokens_to_ids
    hidden = 192
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48,
            "max_position_embeddings": 4096, "tie_word_embeddings": False,
            "rope_parameters": {
                # transformers always interleaves; vLLM does what this says, and it must be said.
                "rope_type": "default", "mrope_section": [8, 8, 8], "mrope_interleaved": True, "rope_theta": 10000.0,
            },
            "bos_token_id": None, "eos_token_id": ids("<|im_end|>"), "pad_token_id": ids("<|endoftext|>"),
            **(text or {}),
        },
        vision_config={
            "depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": hidden, "num_position_embeddings": 144, "deepstack_visual_indexes": [1],
            **(vision or {}),
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )  # fmt: skip


def build(
    folder: Path, seed: int = 0, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None
) -> None:
    """Write the model to `folder`. The same seed gives the same weights; the global random state is left alone."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(build_config(tokenizer, text, vision)).float()
        # At the default scale of 0.02 every prompt gives nearly the same distribution; tests must see differences.
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.mul_(4.0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)


def build_windowed(folder: Path, seed: int = 0) -> None:
    """Write a tiny Qwen2.5-VL, as UI-TARS 1.5 is one, whose first vision block attends within windows of 4 × 4 patches.

    It has the tokenizer and the images of the other model, tied embeddings, and no processor for videos.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = build_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 8, 8], "rope_theta": 10000.0},
            "bos_token_id": None, "eos_token_id": ids("<|im_end|>"), "pad_token_id": ids("<|endoftext|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 64, "out_hidden_size": 96,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.mul_(4.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    build_processor(tokenizer).image_processor.save_pretrained(folder)
