"""A model folder with random weights, which trainer and vLLM load like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from dart.config import BUILTIN_MODELS

BUILTIN = BUILTIN_MODELS / "tiny-qwen3vl"
"""Its tokenizer and image processor do for any model of the family."""
TOKENS = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 3, "vision_end_token_id": 4}
"""Of that tokenizer."""
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
MOST_PIXELS = 12_845_056
"""Of a screenshot, as UI-TARS 1.5 has it."""


def write(folder: Path, document: dict[str, Any], device: torch.device) -> None:
    """Write the model that `document` (its config.json) describes, in bfloat16; it is made on `device`, because a GPU
    is faster at that."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**document | TOKENS)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / file, folder)
    patch = int(document["vision_config"]["patch_size"])
    processor = json.loads((BUILTIN / "preprocessor_config.json").read_text(encoding="utf-8"))
    processor |= {
        "processor_class": PROCESSORS[document["model_type"]],
        "patch_size": patch,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": MOST_PIXELS},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
