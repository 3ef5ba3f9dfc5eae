"""The tokens of prompts and actions as dart.agent makes them, with every image placeholder expanded."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from dart.agent.grammar import make_grammar
from dart.agent.prompt import Turn, build_prompt
from dart.config import Agent
from dart.core.action import Action
from dart.core.types import Image, Markup, Tokens
from examples.base_policy.model import MERGE, PATCH, VISION
from examples.base_policy.recipes import Recipe

SIDE = PATCH * MERGE
AGENT = Agent(
    grammar="ui_tars",
    read="strict",
    coordinates="pixels",
    prompt="minimal",
    history_screenshots=2,
    resize_multiple=SIDE,
    min_pixels=SIDE * SIDE,
    max_pixels=1 << 20,
)


def agent_of(recipe: Recipe) -> Agent:
    """The prompts and actions of the recipe's policy."""
    return AGENT.model_copy(update={"history_screenshots": recipe.history_screenshots})


class Chat:
    def __init__(self, tokenizer: Any, agent: Agent = AGENT) -> None:
        self.tokenizer, self.agent, self.grammar = tokenizer, agent, make_grammar(agent)
        number = tokenizer.convert_tokens_to_ids
        self.image_pad, self.end, self.pad = number("<|image_pad|>"), number("<|im_end|>"), number("<|endoftext|>")
        self.banned = [number(name) for name in VISION]
        self._known: dict[tuple[bool, str], list[int]] = {}

    def prompt(self, instruction: str, turns: Sequence[Turn], observation: Image) -> tuple[list[int], list[bytes]]:
        """(token ids, PNGs in order) of the next turn."""
        made = build_prompt(self.agent, instruction, turns, observation)
        ids: list[int] = []
        for part in made.parts:
            if isinstance(part, Image):
                ids += [self.image_pad] * ((part.width // SIDE) * (part.height // SIDE))
            elif isinstance(part, Tokens):
                ids += part.ids
            else:
                ids += self._encode(part.text, plain=not isinstance(part, Markup))
        return ids, [image.data for image in made.images]

    def action_tokens(self, action: Action, observation: Image) -> tuple[int, ...]:
        """The action's text and the stop token."""
        text = self.grammar.format(action, observation.width, observation.height)
        return (*self._encode(text, plain=True), self.end)

    def _encode(self, text: str, plain: bool) -> list[int]:
        key = (plain, text)
        if key not in self._known:
            if len(self._known) > 100_000:
                self._known.clear()
            self._known[key] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)
        return self._known[key]


def image_of(png: bytes) -> Image:
    """An image without its digest, which is not needed here."""
    width, height = struct.unpack(">II", png[16:24])
    return Image(b"", "image/png", width, height, png)
