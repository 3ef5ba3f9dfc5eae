"""A grammar: how one family of models writes actions, read into the canonical action and written back.

Strict reading: a text is exactly one action of the grammar, or a `ParseError`. That is what a model learns from when it
is trained from its first action on. Reference reading (`agent.read`) also accepts what the family's own harness
accepts, by the rules that the grammar declares and no others: a released model writes so, and was scored so. The strict
grammar is tried first, so that both give the same for all that it accepts, and at the same cost. Used by the episode
loop (read) and by writers of demonstrations (format).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dart import config
from dart.agent.parsing import ParseError, smart_resize
from dart.agent.qwen3_vl import Qwen3VL
from dart.agent.rules import qwen3_vl as qwen3_vl_rules
from dart.agent.rules import several
from dart.agent.rules import ui_tars as ui_tars_rules
from dart.agent.ui_tars import UITars
from dart.core.action import Action, Single

__all__ = ["Grammar", "ParseError", "Reading", "declared_rules", "make_grammar", "smart_resize"]

Reading = tuple[Action, tuple[str, ...]]
"""An action, and the names of the rules that reading it took: none where the text was in the strict grammar."""


class Grammar(Protocol):
    """`width` and `height` are the original screenshot's, in pixels."""

    def read(self, text: str, width: int, height: int) -> Reading:
        """The one action in `text`. Raises ParseError and nothing else on any text."""

    def format(self, action: Action, width: int, height: int, thought: str = "") -> str:
        """The text of `action`, such that `read` gives it back, positions up to rounding to the grid.

        Raises ValueError for actions that the grammar cannot express.
        """

    def as_written(self, text: str) -> str:
        """A turn as the model wrote it, from its text without special tokens, which is what chat servers answer."""


@dataclass(frozen=True, slots=True)
class Strict:
    grammar: UITars | Qwen3VL

    def read(self, text: str, width: int, height: int) -> Reading:
        return self.grammar.parse(text, width, height), ()

    def format(self, action: Action, width: int, height: int, thought: str = "") -> str:
        return self.grammar.format(action, width, height, thought)

    def as_written(self, text: str) -> str:
        return self.grammar.as_written(text)


@dataclass(frozen=True, slots=True)
class Reference(Strict):
    """Reads with the grammar's rules what the strict grammar refuses; up to `most` actions of one text."""

    most: int = 1

    def read(self, text: str, width: int, height: int) -> Reading:
        if self.most > 1:
            rule = several.UI_TARS if isinstance(self.grammar, UITars) else several.QWEN3_VL
            together = several.read_together(rule, text, self.most, lambda one: self._one(one, width, height))
            if together is not None:
                return together
        return self._one(text, width, height)

    def _one(self, text: str, width: int, height: int) -> tuple[Single, tuple[str, ...]]:
        try:
            return self.grammar.parse(text, width, height), ()
        except ParseError as refused:
            if isinstance(self.grammar, UITars):
                return ui_tars_rules.read_leniently(self.grammar, text, width, height, refused)
            return qwen3_vl_rules.read_leniently(self.grammar, text, width, height, refused)


def make_grammar(agent: config.Agent) -> Grammar:
    """The grammar that the config names."""
    grammar: UITars | Qwen3VL
    if agent.grammar == "qwen3_vl":
        grammar = Qwen3VL()
    else:
        grammar = UITars(
            thousand=agent.coordinates == "thousand",
            multiple=agent.resize_multiple,
            min_pixels=agent.min_pixels,
            max_pixels=agent.max_pixels,
            digits=3 if agent.prompt == "minimal" else 1,
            box_tokens=agent.prompt != "minimal",
        )
    return Reference(grammar, agent.actions_per_step) if agent.read == "reference" else Strict(grammar)


def declared_rules(grammar: str) -> Sequence[tuple[str, str, str]]:
    """(name, what it accepts, an example) of each rule of reference reading, in the order in which they are tried."""
    module = {"ui_tars": ui_tars_rules, "qwen3_vl": qwen3_vl_rules}[grammar]
    together = {"ui_tars": several.UI_TARS, "qwen3_vl": several.QWEN3_VL}[grammar]
    rules = (*module.TEXT_RULES, *module.CALL_RULES, together)
    return [(rule.slug, rule.accepts, rule.example) for rule in rules]
