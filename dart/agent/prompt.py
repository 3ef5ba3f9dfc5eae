"""The prompt of one step: instruction, the history that the window holds, this step's screenshot.

What always holds: sampled tokens go back as the tokens they were; the instruction is Text, so special tokens in it
are plain characters; every image stands alone between <|vision_start|> and <|vision_end|>. As long as the window
does not slide, the parts of step k are a prefix of the parts of step k+1, which is what prefix caching needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dart import config
from dart.agent.parsing import STOP_TOKEN
from dart.agent.templates import TEMPLATES
from dart.core.types import Block, Image, Markup, Prompt, PromptPart, Text, Tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A past step: the screenshot it saw and the tokens that were sampled, the stop token included."""

    image: Image
    token_ids: tuple[int, ...]
    truncated: bool = False
    """The token limit ended it: there is no stop token, the template adds one."""


class Conversation:
    """The turns of an episode so far, and the prompt that follows from them.

    A prompt has the last `history_turns` turns, and the screenshots of the last `history_screenshots` steps, this one
    included. A turn whose screenshot is too old is still there as text; one that is older than that is left out whole.
    """

    def __init__(self, agent: config.Agent, instruction: str) -> None:
        self._agent, self._template = agent, TEMPLATES[agent.prompt]
        self._turns: list[Turn] = []
        self._instruction = Block((Markup(self._template.before_instruction), Text(instruction)))
        self._blocks: dict[tuple[int, bool, bool], Block] = {}

    def add(self, turn: Turn) -> None:
        self._turns.append(turn)

    def prompt(self, observation: Image) -> Prompt:
        """After the turns that were added."""
        agent, template, count = self._agent, self._template, len(self._turns)
        first = max(0, count - agent.history_turns)
        first_with_image = count + 1 - agent.history_screenshots
        turns = [self._block(i, i >= first_with_image, i == first) for i in range(first, count)]
        now = (
            Markup(self._before(count, count == first) + template.before_image),
            observation,
            Markup(template.after_image + template.before_turn),
        )
        return Prompt((self._instruction, *turns, Block(now)))

    def _block(self, index: int, with_image: bool, first: bool) -> Block:
        key = (index, with_image, first)
        if (known := self._blocks.get(key)) is not None:
            return known
        template, turn = self._template, self._turns[index]
        parts: tuple[PromptPart, ...] = ()
        markup = self._before(index, first)
        if with_image:
            parts = (Markup(markup + template.before_image), turn.image)
            markup = template.after_image
        parts += (Markup(markup + template.before_turn), Tokens(turn.token_ids))
        self._blocks[key] = block = Block(parts)
        return block

    def _before(self, index: int, first: bool) -> str:
        """What ends the turn, or the instruction, that stands before this turn."""
        if first:
            return self._template.after_instruction
        return (STOP_TOKEN if self._turns[index - 1].truncated else "") + self._template.after_turn


def build_prompt(agent: config.Agent, instruction: str, turns: Iterable[Turn], observation: Image) -> Prompt:
    """The prompt after `turns`, oldest first."""
    conversation = Conversation(agent, instruction)
    for turn in turns:
        conversation.add(turn)
    return conversation.prompt(observation)
