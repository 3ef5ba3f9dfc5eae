"""config.json of the released models that benchmarks are about, as their publishers wrote them. No weights."""

from __future__ import annotations

from dart.core.capacity.shape import Shape, read_shape
from dart.core.json_text import JSON

UI_TARS_7B: dict[str, JSON] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
"""Qwen2.5-VL-7B-Instruct, which UI-TARS-1.5-7B is."""

SCREENSHOT_TOKENS = 2691
"""1920×1080, resized to 1932×1092: 69 · 39 tokens of 28×28 pixels."""


def ui_tars() -> Shape:
    return read_shape(UI_TARS_7B)
