"""What the OSWorld agent for Qwen3-VL accepts beyond the strict grammar, as a list of rules.

That agent reads line by line: a tool call is what stands between its tags, or a line that is a JSON object. It carries
out every call of a turn; here the first is taken, and the next is decided on a new screenshot.
"""

from __future__ import annotations

import re

from dart.agent.parsing import ParseError, without_stop_token
from dart.agent.qwen3_vl import CALLS, CLOSE, GRID, OPEN, Arguments, Qwen3VL, is_int, json_at, read_arguments, space_end
from dart.agent.rules.rule import Rule, onto_grid, read_mended, without_plus
from dart.agent.ui_tars import WAIT_SECONDS
from dart.core.action import Action, Point

_BARE_CALL = re.compile(r'^[ \t]*(?=\{\s*"(?:name|arguments)")', re.MULTILINE)


def read_leniently(
    grammar: Qwen3VL, text: str, width: int, height: int, refused: ParseError
) -> tuple[Action, tuple[str, ...]]:
    """The action in a text that the strict grammar refuses, and the names of the rules that it took.

    Raises `refused` if the text holds no tool call, and another ParseError if the call means nothing.
    """
    used: list[str] = []
    arguments = read_mended(without_stop_token(text), TEXT_RULES, read_arguments, refused, used)
    for rule in CALL_RULES:
        made = rule.apply(arguments)
        if made is not None:
            used.append(rule.slug)
            arguments = made
    return grammar.action(arguments), tuple(used)


# ---- where the call is: text → text ----


def _no_tag(text: str) -> str | None:
    found = None if OPEN in text else _BARE_CALL.search(text)
    end = _end_of_json(text, found.end()) if found else None
    return f"{OPEN}{text[found.end() : end]}{CLOSE}" if found and end else None


def _unclosed_tag(text: str) -> str | None:
    start = text.find(OPEN)
    end = _end_of_json(text, start + len(OPEN)) if start >= 0 else None
    return text[:end] + CLOSE if end and CLOSE.startswith(text[end:].strip()) else None


def _first_call(text: str) -> str | None:
    end = _end_of_call(text)
    return text[:end] if end and OPEN in text[end:] else None


def _trailing_text(text: str) -> str | None:
    end = _end_of_call(text)
    return text[:end] if end and text[end:].strip() else None


def _end_of_call(text: str) -> int | None:
    """Where the first tool call ends, its closing tag included."""
    start = text.find(OPEN)
    end = _end_of_json(text, start + len(OPEN)) if start >= 0 else None
    close = space_end(text, end) if end else 0
    return close + len(CLOSE) if end and text.startswith(CLOSE, close) else None


def _end_of_json(text: str, position: int) -> int | None:
    try:
        return json_at(text, space_end(text, position))[1]
    except ParseError:
        return None


# ---- what the call says: arguments → arguments ----


def _grid_edge(arguments: Arguments) -> Arguments | None:
    numbers = _coordinate(arguments)
    if numbers is None or all(0 <= number < GRID for number in numbers):
        return None
    x, y = (onto_grid(number, GRID) for number in numbers)
    return None if x is None or y is None else {**arguments, "coordinate": Point(x / GRID, y / GRID)}


def _fractions(arguments: Arguments) -> Arguments | None:
    numbers, pixels = _coordinate(arguments), arguments.get("pixels")
    if isinstance(pixels, float) and pixels.is_integer():
        return {**arguments, "pixels": int(pixels)}
    if numbers is None or all(map(is_int, numbers)) or not all(0 <= number < GRID for number in numbers):
        return None
    return {**arguments, "coordinate": Point(numbers[0] / GRID, numbers[1] / GRID)}


def _coordinate(arguments: Arguments) -> list[int | float] | None:
    """The two numbers of the coordinate; None if it is anything else."""
    value = arguments.get("coordinate")
    if not isinstance(value, list) or len(value) != 2:
        return None
    numbers = [number for number in value if is_int(number) or isinstance(number, float)]
    return numbers if len(numbers) == 2 else None


def _status(arguments: Arguments) -> Arguments | None:
    missing = arguments.get("action") == "terminate" and "status" not in arguments
    return {**arguments, "status": "success"} if missing else None


def _duration(arguments: Arguments) -> Arguments | None:
    if arguments.get("action") != "wait" or "time" in arguments or "duration" not in arguments:
        return None
    rest = {name: value for name, value in arguments.items() if name != "duration"}
    return {**rest, "time": arguments["duration"]}


def _time(arguments: Arguments) -> Arguments | None:
    missing = arguments.get("action") == "wait" and "time" not in arguments
    return {**arguments, "time": WAIT_SECONDS} if missing else None


def _key_text(arguments: Arguments) -> Arguments | None:
    keys = arguments.get("keys")
    return {**arguments, "keys": [keys]} if isinstance(keys, str) else None


def _key_plus(arguments: Arguments) -> Arguments | None:
    keys = arguments.get("keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        return None
    apart = without_plus(keys)
    return {**arguments, "keys": apart} if apart != keys else None


def _extra_argument(arguments: Arguments) -> Arguments | None:
    action = arguments.get("action")
    if not isinstance(action, str) or action not in CALLS:
        return None
    required, optional, _ = CALLS[action]
    kept = {name: value for name, value in arguments.items() if name in required | optional | {"action"}}
    return kept if len(kept) < len(arguments) else None


def _example(arguments: str) -> str:
    return f'<tool_call>{{"name": "computer_use", "arguments": {{{arguments}}}}}</tool_call>'


_CLICK = _example('"action": "left_click"')

TEXT_RULES: tuple[Rule[str, str], ...] = (
    Rule(
        "no-tag",
        "The call may stand on a line of its own without tags.",
        _CLICK.removeprefix(OPEN).removesuffix(CLOSE),
        _no_tag,
    ),
    Rule("unclosed-tag", "The closing tag may be missing.", _CLICK.removesuffix(CLOSE), _unclosed_tag),
    Rule(
        "first-call",
        "Further calls are left for later steps: the first is taken. The reference carries out all of them on one "
        "screenshot.",
        _CLICK + _example('"action": "wait", "time": 1'),
        _first_call,
    ),
    Rule("trailing-text", "Text after the call is ignored.", _CLICK + " Done.", _trailing_text),
)

CALL_RULES: tuple[Rule[Arguments, Arguments], ...] = (
    Rule(
        "grid-edge",
        "A coordinate just outside the grid, such as 1000, is at the screen's edge, where the pointer would stop.",
        _example('"action": "left_click", "coordinate": [1000, 2]'),
        _grid_edge,
    ),
    Rule(
        "fractions",
        "Coordinates may have fractions, and whole wheel notches may be written with a point.",
        _example('"action": "left_click", "coordinate": [10.5, 20]'),
        _fractions,
    ),
    Rule("status", "`terminate` without a status is a success.", _example('"action": "terminate"'), _status),
    Rule(
        "duration",
        "`wait` may call its time `duration`.",
        _example('"action": "wait", "duration": 2'),
        _duration,
    ),
    Rule("time", f"`wait` without a time waits {WAIT_SECONDS:g} seconds.", _example('"action": "wait"'), _time),
    Rule("key-text", "A single key need not be in a list.", _example('"action": "key", "keys": "enter"'), _key_text),
    Rule("key-plus", "`+` may join the keys of a chord.", _example('"action": "key", "keys": ["ctrl+c"]'), _key_plus),
    Rule(
        "extra-argument",
        "An argument that the action does not take, such as the duration of a drag, is ignored.",
        _example('"action": "left_click_drag", "coordinate": [1, 2], "duration": 0.5'),
        _extra_argument,
    ),
)
