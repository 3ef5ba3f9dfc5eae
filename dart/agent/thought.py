"""A policy's text, divided into its thought and its action, for people to read. Parsers don't use it."""

from __future__ import annotations

import re

_ACTION = re.compile(r"(?:^|\n)[^\S\n]*(?:Action:|<tool_call>)")
"""What the action begins with in the grammars' texts: UI-TARS's and Qwen's."""
_THOUGHT = re.compile(r"^\s*(?:Thought:\s*|<think>)|</think>\s*$")


def split_thought(text: str) -> tuple[str, str]:
    """(thought, action). The thought is without its label; it is empty where the text is an action alone, and the
    action is empty where no grammar's action begins."""
    found = _ACTION.search(text)
    thought, action = (text[: found.start()], text[found.start() :]) if found else (text, "")
    return _THOUGHT.sub("", thought).strip(), action.strip()
