"""The prompt of one step: instruction, the history that the window holds, this step's screenshot.

What always holds: sampled tokens go back as the tokens they were; the instruction is Text, so special tokens in it
are plain characters; every image stands alone between <|vision_start|> and <|vision_end|>. As long as the window
does not slide, the parts of step k are a prefix of the parts of step k+1, which is what prefix caching needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dart import config
from dart.agent.parsing import STOP_TOKEN
from dart.agent.templates import TEMPLATES
from dart.core.types import Image, Markup, PromptPart, Text, Tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A past step: the screenshot it saw and the tokens that were sampled, the stop token included."""

    image: Image
    token_ids: tuple[int, ...]
    truncated: bool = False
    """The token limit ended it: there is no stop token, the template adds one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    parts: tuple[PromptPart, ...]
    images: tuple[Image, ...]
    """Those in `parts`, oldest first; the last is this step's observation."""


def build_prompt(agent: config.Agent, instruction: str, turns: Sequence[Turn], observation: Image) -> Prompt:
    """The prompt after `turns`, oldest first.

    It has the last `history_turns` turns, and the screenshots of the last `history_screenshots` steps, this one
    included. A turn whose screenshot is too old is still there as text; one that is older than that is left out whole.
    """
    template = TEMPLATES[agent.prompt]
    shown = turns[max(0, len(turns) - agent.history_turns) :]
    first_with_image = len(shown) + 1 - agent.history_screenshots

    parts: list[PromptPart] = [Markup(template.before_instruction), Text(instruction)]
    markup = template.after_instruction
    images: list[Image] = []
    for index, turn in enumerate(shown):
        if index >= first_with_image:
            parts += [Markup(markup + template.before_image), turn.image]
            images.append(turn.image)
            markup = template.after_image
        parts += [Markup(markup + template.before_turn), Tokens(turn.token_ids)]
        markup = (STOP_TOKEN if turn.truncated else "") + template.after_turn
    parts += [
        Markup(markup + template.before_image),
        observation,
        Markup(template.after_image + template.before_turn),
    ]
    return Prompt(tuple(parts), (*images, observation))
