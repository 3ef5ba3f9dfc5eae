"""Timings of full-HD screenshots, from floating-point operations."""

from __future__ import annotations

_SAID = {
    "honest-sliding": "full-HD timings, the window slides by one",
    "honest-stride3": "full-HD timings, `history_stride: 3`",
    "honest-stride3-frozen-vision": "full-HD timings, `history_stride: 3`, `freeze_vision`",
    "honest-stride3-lora": "full-HD timings, `history_stride: 3`, `lora`",
}


def in_words(set_up: str) -> str:
    """The set-up's name for readers."""
    *rest, last = set_up.split(", ")
    return ", ".join([*rest, _SAID.get(last, last)])
