"""Timings of full-HD screenshots, from floating-point operations."""

from __future__ import annotations

_IN_BLOCKS = "three to five full-HD screenshots a prompt, three left out at once (`history_stride: 3`)"
_SAID = {
    "honest-sliding": "five full-HD screenshots a prompt, the oldest left out at each step",
    "honest-stride3": _IN_BLOCKS,
    "honest-stride3-frozen-vision": f"{_IN_BLOCKS}, `freeze_vision`",
    "honest-stride3-lora": f"{_IN_BLOCKS}, `lora`",
}


def in_words(set_up: str) -> str:
    """The set-up's name for readers."""
    *rest, last = set_up.split(", ")
    return ", ".join([*rest, _SAID.get(last, last)])
