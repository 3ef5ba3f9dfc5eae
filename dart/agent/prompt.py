"""The prompt of one step: instruction, the history that the window holds, this step's screenshot.

Invariants: sampled tokens go back unchanged; the instruction and the environment's texts are Text, with the words
beside them, so special tokens in them are plain characters; every image stands alone between <|vision_start|> and
<|vision_end|>. Unless the window drops something at step k+1 (`agent.window`), the parts of step k are a prefix of the
parts of step k+1, which is what prefix caching and the trainer's rows need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dart import config
from dart.agent.parsing import STOP_TOKEN
from dart.agent.templates import LABELS, VISION_END, VISION_START, Template, template_of
from dart.agent.window import window
from dart.core.cutting import cut
from dart.core.records import unguarded
from dart.core.types import Block, Image, Markup, Observation, Prompt, PromptPart, Text, Tokens


@unguarded
@dataclass(frozen=True, slots=True)
class Turn:
    """A past step: the screenshot it saw and the tokens that were sampled, the stop token included."""

    image: Image
    token_ids: Sequence[int]
    truncated: bool = False
    """The token limit ended it, so it has no stop token and the template adds one."""
    notes: tuple[PromptPart, ...] = ()
    """What the prompt shows beside its screenshot (`shown`)."""


def shown(agent: config.Agent, observation: Observation) -> tuple[PromptPart, ...]:
    """The texts of the environment that stand after the observation's screenshot: those in `agent.show` that it has."""
    if not agent.show:
        return ()
    texts = [(label, getattr(observation, name)) for name, label in LABELS.items() if name in agent.show]
    return tuple(Text(label + cut(text, agent.shown_characters)) for label, text in texts if text)


class Conversation:
    """The turns of an episode so far, and the prompt made from them.

    A prompt has the last turns, at most `history_turns`, and the screenshots of the last steps, including this one, at
    most `history_screenshots`, each with its notes; `window` says how many. Older turns among them remain as text;
    turns before them are left out entirely. The pictures of the instruction stay. A block is made once and shared by
    every prompt that contains it.
    """

    def __init__(self, agent: config.Agent, instruction: str, goals: Sequence[Image] = ()) -> None:
        """`goals`: pictures that belong to the instruction."""
        self._agent, self._goals = agent, tuple(goals)
        pictures = [part for image in goals for part in (Markup(VISION_START), image, Markup(VISION_END))]
        template = template_of(agent)
        before, words, tail = _around(template)
        if pictures:  # which stand before the tail
            tail = ""
        self._joints = _joints(template, tail)
        self._instruction = Block((Markup(before), Text(words + instruction + tail), *pictures))
        self._turns: list[Turn] = []
        self._pictured: list[Block] = []
        """Two blocks for each turn: what comes before its tokens, including its screenshot, and the tokens."""
        self._written: list[Block] = []
        """The same blocks without screenshots, as far as they have been needed."""
        self._now: Block | None = None

    def add(self, turn: Turn) -> None:
        shown = self._now
        if shown is None or shown.images[0][1] is not turn.image:
            shown = self._before(len(self._turns), turn.image, turn.notes)
        self._pictured += (shown, Block((Tokens(turn.token_ids),)))
        self._turns.append(turn)

    def prompt(self, observation: Image, notes: tuple[PromptPart, ...] = ()) -> Prompt:
        """The prompt after the turns added so far. `notes`: what it shows beside the screenshot (`shown`)."""
        agent, count = self._agent, len(self._turns)
        first, pictured = window(count, agent.history_screenshots, agent.history_turns, agent.history_stride)
        for index in range(len(self._written) // 2, pictured):
            self._written += (self._before(index), self._pictured[2 * index + 1])
        blocks = self._written[2 * first : 2 * pictured] + self._pictured[2 * pictured :]
        if blocks and first > 0:
            # The previous turn has slid out, so this one follows the instruction now.
            oldest = self._turns[first]
            blocks[0] = self._before(0, oldest.image, oldest.notes) if first == pictured else self._before(0)
        self._now = self._before(count if blocks else 0, observation, notes)
        images = (*self._goals, *(turn.image for turn in self._turns[pictured:]), observation)
        return Prompt((self._instruction, *blocks, self._now), images)

    def _before(self, index: int, image: Image | None = None, notes: tuple[PromptPart, ...] = ()) -> Block:
        """What comes between the previous turn, or the instruction, and this turn's tokens."""
        truncated = index > 0 and self._turns[index - 1].truncated
        before, after, without_image = self._joints[index > 0, truncated]
        if image is None:
            return without_image
        if notes:
            return Block((before, image, Markup(VISION_END), *notes, Markup(after.text.removeprefix(VISION_END))))
        return Block((before, image, after))


@functools.cache
def _around(template: Template) -> tuple[str, str, str]:
    """The text before the instruction, the words beside it on its line before it, and those after it.

    They are tokenised with the instruction, because a tokenizer joins a space or a full stop with what follows it. A
    token or a tag ends them: it stays markup.
    """
    whole = template.before_instruction
    start = max(whole.rfind("\n"), whole.rfind(">")) + 1
    line, newline, _ = template.after_instruction.partition("\n")
    tail, tag, _ = line.partition("<")
    return whole[:start], whole[start:], tail if tag else tail + newline


@functools.cache
def _joints(template: Template, tail: str) -> Mapping[tuple[bool, bool], tuple[Markup, Markup, Block]]:
    """The template's text before a screenshot, after it, and a block of all of it without a screenshot.

    By whether it follows a turn, and whether that turn was truncated. `tail`: what of `after_instruction` has been
    written with the instruction. An episode looks its template up once, because that takes the hash of all its texts.
    """
    joints = {}
    for after_turn, truncated in ((False, False), (True, False), (True, True)):
        instructed = template.after_instruction.removeprefix(tail)
        begins = (STOP_TOKEN if truncated else "") + template.after_turn if after_turn else instructed
        before, after = Markup(begins + template.before_image), Markup(template.after_image + template.before_turn)
        joints[after_turn, truncated] = before, after, Block((Markup(begins + template.before_turn),))
    return joints


def build_prompt(
    agent: config.Agent,
    instruction: str,
    turns: Iterable[Turn],
    observation: Image,
    notes: tuple[PromptPart, ...] = (),
) -> Prompt:
    """The prompt after `turns`, which are given oldest first."""
    conversation = Conversation(agent, instruction)
    for turn in turns:
        conversation.add(turn)
    return conversation.prompt(observation, notes)
