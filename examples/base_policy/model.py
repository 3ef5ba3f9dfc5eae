"""The tiny Qwen3-VL that ships with dart: 3.2 M parameters, built from its config, with a tokenizer of its own.

`build(folder, texts)` writes a complete Hugging Face folder with random weights: transformers' AutoProcessor and
AutoModelForImageTextToText load it, and so does vLLM. The tokenizer has the special tokens of Qwen, the 256 bytes,
and a token for every fixed phrase of the actions and every common word in `texts`. Quoted text (a name to be typed)
and numbers are split into single characters, so that they are copied character by character.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
"""Tokens that are never sampled, and so left out of the softmax in training."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION]
PATCH, MERGE = 16, 2
WORDS = 160
"""The most word tokens."""

CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>\
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{%- endfor %}{% endif %}<|im_end|>\
{%- endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"""
"""The chat template that matches dart's prompt template `minimal`: no roles, no white space."""


def phrases(texts: Iterable[str]) -> list[str]:
    """The phrases that become one token each: fixed parts of the actions, and frequent words outside quotes."""
    fixed: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for text in texts:
        if text.startswith("Action: "):
            fixed.update(re.split(r"\d+|\0", re.sub(r"(content=')(?:[^'\\]|\\.)*'", "\\1\0'", text)))
        else:
            words.update(re.findall(r" [A-Za-z]{2,}|[A-Za-z]{3,}", re.sub(r'"[^"]*"', '""', text)))
    common = [word for word, count in sorted(words.items(), key=lambda item: (-item[1], item[0])) if count > 1][:WORDS]
    return [phrase for phrase in dict.fromkeys([*sorted(fixed), *common]) if len(phrase) > 1]


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    names = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases(texts)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:2] + VISION,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    number = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,  # a tied lm_head keeps a stale packed copy in vLLM on CPU
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [8, 8, 8],
            "mrope_interleaved": True,
            "rope_theta": 10000.0,
        },
        "bos_token_id": None,
        "eos_token_id": number("<|im_end|>"),
        "pad_token_id": number("<|endoftext|>"),
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 192,
        "num_position_embeddings": 144,  # learned absolute positions make grounding learnable
        "deepstack_visual_indexes": [1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def build(folder: Path, texts: Iterable[str], seed: int = 0) -> None:
    """Write the whole folder, with random weights. `texts` are instructions and action strings of its tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    _write_processor(folder)
    torch.manual_seed(seed)
    save(Qwen3VLForConditionalGeneration(make_config(tokenizer)), folder)


def inherit(folder: Path, ancestor: Path) -> None:
    """Give the policy in `folder` the weights of `ancestor`, and its embeddings of the tokens that both have."""
    model, tokenizer = load(folder)
    known, known_tokenizer = load(ancestor)
    weights, given = model.state_dict(), known.state_dict()
    numbers, known_numbers = tokenizer.get_vocab(), known_tokenizer.get_vocab()
    shared = [(number, known_numbers[name]) for name, number in numbers.items() if name in known_numbers]
    to, come_from = (torch.tensor(side) for side in zip(*shared, strict=True))
    for name, value in given.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            weights[name][to] = value[come_from]
        else:
            weights[name] = value
    model.load_state_dict(weights)
    save(model, folder)


def save(model: Any, folder: Path) -> None:
    """Write weights and configs in bfloat16; loading them in float32 gives the final model. `model` is unchanged."""
    weights = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    model.generation_config.update(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=64,
        eos_token_id=model.config.text_config.eos_token_id, pad_token_id=model.config.text_config.pad_token_id,
    )  # fmt: skip
    model.save_pretrained(folder, state_dict=weights)
    (folder / "model.safetensors").chmod(0o644)


def load(folder: Path) -> tuple[Any, Any]:
    """(model in float32, tokenizer)."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def _write_processor(folder: Path) -> None:
    """Write the files by hand: transformers' classes would need torchvision in the training environment."""
    pixels: dict[str, Any] = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 1 << 20},
    }
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps({**kind, **pixels}, indent=2) + "\n", encoding="utf-8")
