"""Rules for how UI-TARS's text may be written: where the action begins, how its call is spelt, where it ends."""

from __future__ import annotations

import re
from collections.abc import Callable

from dart.agent.parsing import ParseError, shown, without_stop_token
from dart.agent.rules.rule import Rule
from dart.agent.ui_tars import (
    ACTION_LINE,
    ALIASES,
    ESCAPES,
    OPENED,
    SIGNATURES,
    WRITTEN,
    Signatures,
    action_text,
    call_at_start,
)

_NONE: frozenset[str] = frozenset()
_EXTRA: Signatures = {
    **{name: SIGNATURES["click"] for name in ("left_single", "hover")},
    **{name: (SIGNATURES["click"][0], frozenset({"key"})) for name in ("click", "left_double", "right_single")},
    "left_single": (SIGNATURES["click"][0], frozenset({"key"})),
    "long_press": (SIGNATURES["click"][0], frozenset({"time", "duration"})),
    "drag": (SIGNATURES["drag"][0], frozenset({"duration"})),
    **{name: (frozenset({"key"}), _NONE) for name in ("press", "keydown", "release", "keyup")},
    "select": (SIGNATURES["drag"][0], frozenset({"duration"})),
    "open_app": (frozenset({"app_name"}), _NONE),
    **{name: (_NONE, _NONE) for name in ("press_home", "press_back", "press_enter")},
}
KNOWN: Signatures = {**SIGNATURES, **_EXTRA}
"""The calls of the strict grammar, and those that only rules can read."""
_NEXT_ACTION = re.compile(rf"[ \t]*\n\s*(?:{'|'.join(KNOWN)})[ \t]*\(")
_CONTENT = re.compile(r"""\s*(?:type|finished)\s*\(\s*content\s*=\s*(['"])""")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[0-7]{1,3}|.)", re.DOTALL)
_OPEN_BOX = re.compile(r"""((?:_box|point)\s*=\s*(['"])[^'"]*(?:</point>|<\|box_end\|>))\s*\)?\s*$""")
_PYTHON_ARGUMENT = re.compile(
    r"""(?:([A-Za-z_]\w*)\s*=\s*)?('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*"""
    r"(,\s*|(?=\))|$)",
    re.ASCII | re.DOTALL | re.IGNORECASE,
)
"""An argument as Python has it, with a name or without, and the comma after it."""
_PYTHON_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "r": "\r", "v": "\v"}


def whole_call(text: str) -> tuple[str, dict[str, str]]:
    """The one call in `text`, which only rules may know: its name and its arguments. Raises ParseError."""
    body = action_text(text)
    name, arguments, end = call_at_start(body, KNOWN)
    if body[end:].strip():
        raise ParseError("trailing_text", f"{shown(body[end:])} after the action")
    return name, arguments


# ---- where the action begins: text → text ----


def _one_line(text: str) -> str | None:
    last = text.rfind("Action:")
    return f"{text[:last]}\n{text[last:]}" if last > 0 and text[last - 1] != "\n" else None


def _last_action(text: str) -> str | None:
    first, last = ACTION_LINE.search(text), text.rfind("\nAction:") + 1
    return text[: first.start()] + text[last:] if first and last > first.start() else None


def _reflection(text: str) -> str | None:
    found = ACTION_LINE.search(text)
    return text[found.start() :] if found and text.lstrip().startswith(("Reflection:", "Action_Summary:")) else None


def _no_thought(text: str) -> str | None:
    found = ACTION_LINE.search(text)
    before = text[: found.start()].strip() if found else ""
    return text[found.start() :] if found and before and not before.startswith("Thought:") else None


# ---- how the action is written: what follows `Action:` → the same ----


def _in_action(mend: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """A rule on the whole text from one on what follows `Action:`."""

    def apply(text: str) -> str | None:
        found = ACTION_LINE.search(text)
        mended = mend(text[found.end() :]) if found else None
        return None if found is None or mended is None else text[: found.end()] + mended

    return apply


def _escapes(body: str) -> str:
    return _ESCAPE.sub(_escape, body)


def _escape(found: re.Match[str]) -> str:
    """A Python escape in the strict grammar's own writing."""
    code = found[1]
    if code in ESCAPES:
        return found[0]
    if code in _PYTHON_ESCAPES:
        return _PYTHON_ESCAPES[code]
    if code[0] in "xu" and len(code) > 1:
        return chr(int(code[1:], 16)).translate(WRITTEN)
    return chr(int(code, 8)).translate(WRITTEN) if code[0] in "01234567" else "\\\\" + code


def _comment(body: str) -> str | None:
    end = _end_of_call(body)
    return body[:end] if end and body[end:].lstrip().startswith("#") else None


def _missing_parenthesis(body: str) -> str | None:
    body = body.rstrip()
    return None if body.endswith(")") or _OPEN_BOX.search(body) else body + ")"


def _missing_quote(body: str) -> str | None:
    found = _OPEN_BOX.search(body)
    return f"{body[: found.end(1)]}{found[2]})" if found else None


def _trailing_comma(body: str) -> str | None:
    before = body.rstrip().removesuffix(")").rstrip()
    return before[:-1] + ")" if before.endswith(",") and body.rstrip().endswith(")") else None


def _quotes(body: str) -> str | None:
    opened = _CONTENT.match(body)
    if opened is None:
        return None
    quote = opened[1]
    close: int | None = None
    for found in re.finditer(rf"{quote}\s*\)", body[opened.end() :]):
        rest = body[opened.end() + found.end() :]
        if _NEXT_ACTION.match(rest) or not rest.strip():
            close = opened.end() + found.start()
            break
    if close is None:
        return None
    content = re.sub(
        rf"\\.|{quote}", lambda one: "\\" + quote if one[0] == quote else one[0], body[opened.end() : close]
    )
    return body[: opened.end()] + content + body[close:]


def _python_arguments(body: str) -> str | None:
    opened = OPENED.match(body)
    if opened is None or _CONTENT.match(body):
        return None
    position, arguments, mended = opened.end(), dict[str, str](), False
    while position < len(body) and body[position] != ")":
        found = _PYTHON_ARGUMENT.match(body, position)
        if found is None:
            return None
        name, value, comma = ALIASES.get(found[1], found[1]), found[2], found[3]
        mended |= not name or name in arguments or value[0] not in "'\""
        if name:
            arguments[name] = value if value[0] in "'\"" else f"'{value}'"
        position = found.end()
        if not comma:
            break
    written = ", ".join(f"{name}={value}" for name, value in arguments.items())
    return body[: opened.end()] + written + body[position:] if mended else None


def _first_action(body: str) -> str | None:
    end = _end_of_call(body)
    return body[:end] if end and _NEXT_ACTION.match(body, end) else None


def calls_apart(text: str) -> list[str]:
    """The texts of several actions, each on a line of its own; none if there are not several.

    An action that needs a rule ends where the next one begins.
    """
    text = without_stop_token(text)
    found = ACTION_LINE.search(text)
    position = found.end() if found else text.rfind("Action:") + len("Action:")
    texts, head, rest = [], text[:position], text[position:].lstrip()
    while "Action:" in head and rest:
        following = _NEXT_ACTION.search(rest, _end_of_call(rest) or 0)
        stop = following.start() if following else len(rest)
        texts.append(head + rest[:stop])
        head, rest = "Action: ", rest[stop:].lstrip()
    return texts if len(texts) > 1 else []


def _end_of_call(body: str) -> int | None:
    try:
        return call_at_start(body, KNOWN)[2]
    except ParseError:
        return None


TEXT_RULES: tuple[Rule[str, str], ...] = (
    Rule(
        "one-line",
        "`Action:` may stand within a line, after the thought; the last one counts.",
        "Thought: Save it. Action: wait()",
        _one_line,
    ),
    Rule(
        "last-action",
        "Of several lines that begin with `Action:`, the last one counts.",
        "Action: click(start_box='(1,2)')\nAction: wait()",
        _last_action,
    ),
    Rule(
        "reflection",
        "`Reflection:` or `Action_Summary:` may stand before the action instead of a thought.",
        "Action_Summary: Save it.\nAction: wait()",
        _reflection,
    ),
    Rule(
        "no-thought", "Text before the action need not begin with `Thought:`.", "Save it.\nAction: wait()", _no_thought
    ),
    Rule(
        "escapes",
        "Escapes are Python's, of which an unknown one stands for itself.",
        "Action: type(content='C:\\data')",
        _in_action(_escapes),
    ),
    Rule(
        "python-arguments",
        "Arguments are Python's: a number needs no quotes, one without a name is ignored, and of one that is given "
        "twice the last counts.",
        "Action: wait(5)",
        _in_action(_python_arguments),
    ),
    Rule(
        "comment",
        "A comment may follow the action.",
        "Action: wait() # until it has loaded",
        _in_action(_comment),
    ),
    Rule(
        "missing-parenthesis",
        "The last parenthesis may be missing.",
        "Action: click(start_box='(1,2)'",
        _in_action(_missing_parenthesis),
    ),
    Rule(
        "missing-quote",
        "The quote after a box's closing tag may be missing, with the last parenthesis or without it.",
        "Action: click(point='<point>1 2</point>",
        _in_action(_missing_quote),
    ),
    Rule(
        "trailing-comma",
        "A comma may follow the last argument.",
        "Action: click(start_box='(1,2)',)",
        _in_action(_trailing_comma),
    ),
    Rule(
        "quotes",
        "Quotes within the text of `type` and `finished` need no escape: the last one before a parenthesis closes it.",
        "Action: finished(content='I've saved it')",
        _in_action(_quotes),
    ),
    Rule(
        "first-action",
        "Further actions, each on a line of its own, are left for later steps: the first is taken.",
        "Action: hotkey(key='shift')\n\nclick(start_box='(1,2)')",
        _in_action(_first_action),
    ),
)
