"""A prompt as chat messages, for a teacher behind a chat endpoint: the same text, history and screenshots.

The template's markup already cuts the prompt into ChatML messages; here they become JSON. The open turn at the end,
which the policy would continue, is left to the endpoint.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypedDict

from dart.core.types import Image, Markup, Prompt, Text, Tokens

_MARKS = re.compile(r"(<\|im_start\|>|<\|im_end\|>|<\|vision_start\|>|<\|vision_end\|>)")
_ROLE = re.compile(r"(system|user|assistant)\n")


class TextContent(TypedDict):
    type: Literal["text"]
    text: str


class ImageContent(TypedDict):
    type: Literal["image_url"]
    image_url: dict[str, str]


Content = TextContent | ImageContent


class ChatMessage(TypedDict):
    """One message as OpenAI's chat endpoints take it."""

    role: str
    content: str | list[Content]


def chat_messages(
    prompt: Prompt, said: Callable[[Sequence[int]], str], stored: Mapping[bytes, bytes] = MappingProxyType({})
) -> list[ChatMessage]:
    """OpenAI's chat messages. `said` gives the text of a turn in the prompt from its tokens. `stored`: by digest, the
    bytes of screenshots whose `data` is empty.

    If the template names no roles, sampled turns are the assistant's and the rest is the user's.
    """
    chat = _Chat()
    for part in prompt.parts:
        match part:
            case Markup(markup):
                chat.follow(markup)
            case Text(text):
                chat.write(text)
            case Tokens(ids):
                chat.message.role = "assistant"
                chat.write(said(ids))
                chat.open = False  # the stop token is one of the tokens
            case Image():
                chat.show(part, part.data or stored.get(part.sha256, b""))
    return [{"role": message.role, "content": _content(message.content)} for message in chat.messages[:-1]]


@dataclass(slots=True)
class _Message:
    role: str
    content: list[Content] = field(default_factory=list)


class _Chat:
    """The messages so far; the last one takes further content while it is open."""

    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self.open = False

    @property
    def message(self) -> _Message:
        return self.messages[-1]

    def follow(self, markup: str) -> None:
        """Begin and end messages where the markup does, and add the text in between."""
        pieces = _MARKS.split(markup)
        for mark, words in zip(["", *pieces[1::2]], pieces[::2], strict=True):
            if mark == "<|im_start|>":
                role = _ROLE.match(words)
                self.messages.append(_Message(role[1] if role else "user"))
                self.open = True
                self.write(words[role.end() :] if role else words)
                continue
            self.open = self.open and mark != "<|im_end|>"
            self.write(words)

    def write(self, text: str) -> None:
        if self.open and text:
            self.message.content.append({"type": "text", "text": text})

    def show(self, image: Image, data: bytes) -> None:
        url = f"data:{image.media_type};base64,{base64.b64encode(data).decode()}"
        self.message.content.append({"type": "image_url", "image_url": {"url": url}})


def _content(parts: list[Content]) -> str | list[Content]:
    """Text without screenshots becomes one string, which every chat template accepts."""
    words = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(words) if len(words) == len(parts) else parts
