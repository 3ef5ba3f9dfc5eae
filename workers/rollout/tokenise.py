"""Prompt parts → token ids, once: text that has been tokenised is never tokenised again.

Each part is tokenised alone, so a part's tokens do not depend on its neighbours: the trainer, the next turn and the
engine all see the same ids. The result is *compact*: exactly one <|image_pad|> per image, which the engine expands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dart.core.types import Image, Markup, PromptPart, Text, Tokens
from dart.wire.tokens import IMAGE_PAD, vision_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_KNOWN_TEXTS = 512
"""Texts whose ids are kept. An accessibility tree has up to some 5,000 ids."""


class PromptEncoder:
    """Encodes with one Hugging Face tokenizer. Not thread-safe, as the tokenizer is not.

    Markup: special tokens in it are parsed. Text: every token that was added to the vocabulary as markup (<|im_end|>,
    <|image_pad|>, <tool_call>, …) is spelt out in plain characters, so that an instruction cannot end a turn or pass
    for an image; ordinary words that were added are treated as words. Tokens: taken as they are. Image: one
    <|image_pad|>.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        if IMAGE_PAD not in vocabulary:
            raise ValueError(f"the tokenizer has no {IMAGE_PAD}: the model does not take images as Qwen-VL models do")
        self._image_pad = int(vocabulary[IMAGE_PAD])
        self._vision_ids = frozenset(vision_token_ids(tokenizer))
        self._added = _occurrences(_markup_tokens(tokenizer))
        self._special = _occurrences(_special_tokens(tokenizer))
        # A text stays in the prompts of several turns, and system texts in all.
        self._known = functools.lru_cache(MOST_KNOWN_TEXTS)(self._encode_part)

    def encode(self, parts: Sequence[PromptPart]) -> tuple[list[int], list[Image]]:
        """The compact ids and the images in the order of their placeholders.

        Raises ValueError for vision tokens among `Tokens` and image placeholders in `Markup`: there would be more
        placeholders than images.
        """
        ids: list[int] = []
        images: list[Image] = []
        for part in parts:
            match part:
                case Markup() | Text():
                    ids += self._known(part)
                case Tokens(sampled):
                    if not self._vision_ids.isdisjoint(sampled):
                        raise ValueError("sampled tokens hold a vision token: those are never sampled")
                    ids += sampled
                case Image():
                    ids.append(self._image_pad)
                    images.append(part)
        return ids, images

    def _encode_part(self, part: Markup | Text) -> tuple[int, ...]:
        if isinstance(part, Text):
            return tuple(self.encode_text(part.text))
        encoded = self._encode(part.text)
        if self._image_pad in encoded:
            raise ValueError(f"markup holds {IMAGE_PAD}: images are parts of their own")
        return tuple(encoded)

    def encode_text(self, text: str) -> list[int]:
        """Untrusted text: it is cut inside every added token that occurs in it, so that none is recognised."""
        return self._encode_plainly(text, self._added)

    def encode_turn(self, text: str) -> list[int]:
        """A turn's text as the policy would sample it: tags and boxes of its grammar become the tokens added for them.

        Other special tokens are spelt out, so that the text cannot end the turn or pass for an image.
        """
        return self._encode_plainly(text, self._special)

    def _encode_plainly(self, text: str, occurrences: re.Pattern[str] | None) -> list[int]:
        if occurrences is None:
            return self._encode(text)
        ids: list[int] = []
        start = 0
        for found in occurrences.finditer(text):
            ids += self._encode(text[start : found.start() + 1])
            start = found.start() + 1
        return ids + self._encode(text[start:])

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def _occurrences(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches where one of the tokens begins; a lookahead, so that overlapping occurrences are all found."""
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("(?=" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


def _markup_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The added tokens that mean more than their characters: the special ones, and tags."""
    added = tokenizer.added_tokens_decoder.values()
    return [str(token) for token in added if token.special or re.fullmatch(r"<.+>", str(token))]


_OF_BOXES = ("<|box_start|>", "<|box_end|>")
"""Special tokens that UI-TARS samples in its actions."""


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    added = tokenizer.added_tokens_decoder.values()
    return [str(token) for token in added if token.special and str(token) not in _OF_BOXES]
