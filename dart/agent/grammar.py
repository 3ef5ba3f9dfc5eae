"""A grammar: how one family of models writes actions, read strictly into the canonical action and written back.

A text is exactly one action of the grammar or a `ParseError`; nothing is guessed or repaired, because a repaired action
would be rewarded as if the policy had written it. Used by the episode loop (parse) and by writers of demonstrations
(format).
"""

from __future__ import annotations

from typing import Protocol

from dart import config
from dart.agent.parsing import ParseError, smart_resize
from dart.agent.qwen3_vl import Qwen3VL
from dart.agent.ui_tars import UITars
from dart.core.action import Action

__all__ = ["Grammar", "ParseError", "make_grammar", "smart_resize"]


class Grammar(Protocol):
    """`width` and `height` are the original screenshot's, in pixels."""

    def parse(self, text: str, width: int, height: int) -> Action:
        """The one action in `text`. Raises ParseError and nothing else on any text."""

    def format(self, action: Action, width: int, height: int, thought: str = "") -> str:
        """The text of `action`, such that `parse` gives it back, positions up to rounding to the grid.

        Raises ValueError for actions that the grammar cannot express.
        """


def make_grammar(agent: config.Agent) -> Grammar:
    """The grammar that the config names."""
    if agent.grammar == "qwen3_vl":
        return Qwen3VL()
    return UITars(
        thousand=agent.coordinates == "thousand",
        multiple=agent.resize_multiple,
        min_pixels=agent.min_pixels,
        max_pixels=agent.max_pixels,
        digits=3 if agent.prompt == "minimal" else 1,
    )
