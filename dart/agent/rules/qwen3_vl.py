"""What the OSWorld agent for Qwen3-VL accepts beyond the strict grammar, as a list of rules.

That agent reads line by line: a tool call is what stands between its tags, or a line that is a JSON object. It carries
out every call of a turn; here the first is taken, and the next is decided on a new screenshot, unless
`agent.actions_per_step` allows more (`several`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace

from dart.agent.keys import keysym_of
from dart.agent.parsing import ParseError, shown, without_stop_token
from dart.agent.qwen3_vl import (
    CALLS,
    CLICKS,
    CLOSE,
    GRID,
    OPEN,
    Arguments,
    Qwen3VL,
    is_int,
    json_at,
    keysyms_of,
    read_arguments,
    space_end,
)
from dart.agent.rules.rule import LONG_PRESS_SECONDS, Rule, held_seconds, onto_grid, read_mended, without_plus
from dart.agent.ui_tars import WAIT_SECONDS
from dart.core.action import Click, Drag, Observe, Point, Single

# A bracket or a quote beside a "+" is a key of a chord.
_REMNANTS = re.compile(r"""^\s*(?:keys=)?\[?['"]?(?!\+)|(?<!\+)['"]?\]?\s*$""")
_CALL, _JSON = re.compile(rf"^[ \t]*{OPEN}(?=\s*\{{)", re.MULTILINE), re.compile(r"\s*\{")
_NAMES = {"name": None, "arguments": None}.keys()
_BARE_CALL = re.compile(r'^[ \t]*(?=\{\s*")', re.MULTILINE)


def read_leniently(
    grammar: Qwen3VL, text: str, width: int, height: int, refused: ParseError
) -> tuple[Single, tuple[str, ...]]:
    """The action in a text that the strict grammar refuses, and the names of the rules that it took.

    Raises `refused` if the text holds no tool call, and another ParseError if the call means nothing.
    """
    used: list[str] = []
    arguments = read_mended(without_stop_token(text), TEXT_RULES, read_arguments, refused, used)
    if not isinstance(arguments.get("action"), str):
        return grammar.action(arguments), ()  # which says why not: the rules look actions up by name
    for rule in CALL_RULES:
        made = rule.apply(arguments)
        if made is None:
            continue
        used.append(rule.slug)
        if not isinstance(made, Mapping):
            return made, tuple(used)
        arguments = made
    return grammar.action(arguments), tuple(used)


# ---- where the call is: text → text ----


def _mentioned_tag(text: str) -> str | None:
    first, call = text.find(OPEN), _CALL.search(text)
    mentioned = call is not None and first < call.start() and not _JSON.match(text, first + len(OPEN))
    return text[call.start() :] if call and mentioned else None


def _no_tag(text: str) -> str | None:
    for found in () if OPEN in text else _BARE_CALL.finditer(text):
        call, end = _json(text, found.end())
        if isinstance(call, dict) and call.keys() >= _NAMES:
            return f"{OPEN}{text[found.end() : end]}{CLOSE}"
    return None


def _unclosed_tag(text: str) -> str | None:
    start = text.find(OPEN)
    end = _end_of_json(text, start + len(OPEN)) if start >= 0 else None
    rest = text[end:].strip() if end else CLOSE
    return text[:end] + CLOSE if rest != CLOSE and CLOSE.startswith(rest) else None


def _first_call(text: str) -> str | None:
    end = _end_of_call(text)
    return text[:end] if end and OPEN in text[end:] else None


def _trailing_text(text: str) -> str | None:
    end = _end_of_call(text)
    return text[:end] if end and text[end:].strip() else None


def _other_names(text: str) -> str | None:
    start = text.find(OPEN) + len(OPEN)
    call, end = _json(text, start)
    if not isinstance(call, dict) or not call.keys() >= _NAMES:
        return None
    kept = json.dumps({name: call[name] for name in _NAMES}, ensure_ascii=False)
    return text[:start] + kept + text[end:]


def calls_apart(text: str) -> list[str]:
    """The texts of several tool calls; none if there are not several."""
    texts, rest = [], without_stop_token(text)
    rest = _mentioned_tag(rest) or rest
    while end := _end_of_call(rest):
        texts.append(rest[:end])
        rest = rest[end:]
    return [*texts[:-1], texts[-1] + rest] if len(texts) > 1 else []


def _end_of_call(text: str) -> int | None:
    """Where the first tool call ends, its closing tag included."""
    start = text.find(OPEN)
    end = _end_of_json(text, start + len(OPEN)) if start >= 0 else None
    close = space_end(text, end) if end else 0
    return close + len(CLOSE) if end and text.startswith(CLOSE, close) else None


def _end_of_json(text: str, position: int) -> int | None:
    return _json(text, position)[1] or None


def _json(text: str, position: int) -> tuple[object, int]:
    """The JSON value at `position` or after the space there, and where it ends; None and 0 if there is none."""
    try:
        return json_at(text, space_end(text, position), repeated=True)
    except ParseError:
        return None, 0


# ---- what the call says: arguments → arguments ----


def _grid_edge(arguments: Arguments) -> Arguments | None:
    numbers = _coordinate(arguments)
    if numbers is None or all(0 <= number < GRID for number in numbers):
        return None
    x, y = (onto_grid(number, GRID) for number in numbers)
    return None if x is None or y is None else {**arguments, "coordinate": Point(x / GRID, y / GRID)}


def _fractions(arguments: Arguments) -> Arguments | None:
    numbers, pixels = _coordinate(arguments), arguments.get("pixels")
    mended: dict[str, object] = {}
    if isinstance(pixels, float) and math.isfinite(pixels):
        mended["pixels"] = int(pixels)
    if numbers is not None and not all(map(is_int, numbers)) and all(0 <= number < GRID for number in numbers):
        mended["coordinate"] = Point(numbers[0] / GRID, numbers[1] / GRID)
    return {**arguments, **mended} if mended else None


def _coordinate(arguments: Arguments) -> list[int | float] | None:
    """The two numbers of the coordinate; None if it is anything else."""
    value = arguments.get("coordinate")
    if not isinstance(value, list) or len(value) != 2:
        return None
    numbers = [number for number in value if is_int(number) or isinstance(number, float)]
    return numbers if len(numbers) == 2 else None


def _status(arguments: Arguments) -> Arguments | None:
    other = arguments.get("action") == "terminate" and arguments.get("status") not in ("success", "failure")
    return {**arguments, "status": "success"} if other else None


def _duration(arguments: Arguments) -> Arguments | None:
    if arguments.get("action") != "wait" or "time" in arguments or "duration" not in arguments:
        return None
    rest = {name: value for name, value in arguments.items() if name != "duration"}
    return {**rest, "time": arguments["duration"]}


def _time(arguments: Arguments) -> Arguments | None:
    time = arguments.get("time")
    given = is_int(time) or isinstance(time, float)
    return {**arguments, "time": WAIT_SECONDS} if arguments.get("action") == "wait" and not given else None


def _key_text(arguments: Arguments) -> Arguments | None:
    keys = arguments.get("keys")
    return {**arguments, "keys": [keys]} if isinstance(keys, str) else None


def _key_plus(arguments: Arguments) -> Arguments | None:
    keys = _keys(arguments)
    apart = without_plus(keys)
    return {**arguments, "keys": apart} if apart != keys else None


def _key_remnants(arguments: Arguments) -> Arguments | None:
    keys = _keys(arguments)
    clean = [key if keysym_of(key) else _REMNANTS.sub("", key) for key in keys]
    return {**arguments, "keys": clean} if clean != keys else None


def _unknown_key(arguments: Arguments) -> Arguments | Observe | None:
    action, keys = arguments.get("action"), _keys(arguments)
    known = [key for key in keys if keysym_of(key)]
    if action not in ("key", *CLICKS) or (len(known) == len(keys) and arguments.get("keys") != []):
        return None
    if action in CLICKS and not known:
        return _without(arguments, "keys")
    return {**arguments, "keys": known} if known else Observe()


def _keys(arguments: Arguments) -> list[str]:
    """The names in `keys`; empty if it is anything but a list of texts."""
    keys = arguments.get("keys")
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else []


def _extra_argument(arguments: Arguments) -> Arguments | None:
    action = arguments.get("action")
    if not isinstance(action, str) or action not in CALLS:
        return None
    required, optional, _ = CALLS[action]
    known = required | optional | {"action"} | _READ_BY_RULES.get(action, frozenset())
    kept = {name: value for name, value in arguments.items() if name in known}
    return kept if len(kept) < len(arguments) else None


_READ_BY_RULES = {"left_click_drag": frozenset({"duration"}), **{name: frozenset({"keys"}) for name in CLICKS}}
"""Arguments that only rules read, by action."""


def _seconds(arguments: Arguments, name: str) -> float:
    value = arguments[name]
    number = float(value) if (is_int(value) and abs(value) < 1e6) or isinstance(value, float) else None
    return held_seconds(number, name, shown(str(value)))


def _without(arguments: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in names}


def _drag_duration(arguments: Arguments) -> Drag | None:
    if arguments.get("action") != "left_click_drag" or "duration" not in arguments:
        return None
    drag = Qwen3VL().action(_without(arguments, "duration"))
    assert isinstance(drag, Drag)
    return replace(drag, duration_seconds=_seconds(arguments, "duration"))


def _long_press(arguments: Arguments) -> Click | None:
    if arguments.get("action") != "long_press":
        return None
    name = next((name for name in ("time", "duration") if name in arguments), "")
    click = Qwen3VL().action({**_without(arguments, "time", "duration"), "action": "left_click"})
    assert isinstance(click, Click)
    return replace(click, hold_seconds=_seconds(arguments, name) if name else LONG_PRESS_SECONDS)


def _held_keys(arguments: Arguments) -> Click | None:
    if arguments.get("action") not in CLICKS or "keys" not in arguments:
        return None
    click = Qwen3VL().action(_without(arguments, "keys"))
    assert isinstance(click, Click)
    return replace(click, modifiers=keysyms_of(arguments["keys"]))


def _example(arguments: str) -> str:
    return f'<tool_call>{{"name": "computer_use", "arguments": {{{arguments}}}}}</tool_call>'


_CLICK = _example('"action": "left_click"')

TWO_CALLS = _CLICK + _example('"action": "wait", "time": 1')

TEXT_RULES: tuple[Rule[str, str], ...] = (
    Rule(
        "mentioned-tag",
        "A tag that no JSON follows is a mention: the call begins with the first tag at the start of a line.",
        f"I answer with a {OPEN}.\n{_CLICK}",
        _mentioned_tag,
    ),
    Rule(
        "no-tag",
        "The call may stand on a line of its own without tags.",
        _CLICK.removeprefix(OPEN).removesuffix(CLOSE),
        _no_tag,
    ),
    Rule("unclosed-tag", "The closing tag may be missing.", _CLICK.removesuffix(CLOSE), _unclosed_tag),
    Rule(
        "first-call",
        "Further calls are left for later steps: the first is taken.",
        TWO_CALLS,
        _first_call,
    ),
    Rule("trailing-text", "Text after the call is ignored.", _CLICK + " Done.", _trailing_text),
    Rule(
        "other-names",
        "Names beside `name` and `arguments` are ignored, and of a name that is given twice the last counts.",
        _CLICK.replace("{", '{"id": 1, ', 1),
        _other_names,
    ),
)

CALL_RULES: tuple[Rule[Arguments, Arguments | Single], ...] = (
    Rule(
        "grid-edge",
        "A coordinate just outside the grid, such as 1000, is at the screen's edge, where the pointer would stop.",
        _example('"action": "left_click", "coordinate": [1000, 2]'),
        _grid_edge,
    ),
    Rule(
        "fractions",
        "Coordinates may have fractions, and wheel notches too, of which the whole ones count.",
        _example('"action": "left_click", "coordinate": [10.5, 20]'),
        _fractions,
    ),
    Rule(
        "status",
        "`terminate` with any status but `failure`, or without one, is a success.",
        _example('"action": "terminate"'),
        _status,
    ),
    Rule(
        "duration",
        "`wait` may call its time `duration`.",
        _example('"action": "wait", "duration": 2'),
        _duration,
    ),
    Rule("time", f"`wait` without a number of seconds waits {WAIT_SECONDS:g}.", _example('"action": "wait"'), _time),
    Rule("key-text", "A single key need not be in a list.", _example('"action": "key", "keys": "enter"'), _key_text),
    Rule(
        "key-remnants",
        "What is left of a list in a key's name is dropped.",
        _example('"action": "key", "keys": ["keys=[ctrl", "c]"]'),
        _key_remnants,
    ),
    Rule(
        "key-plus",
        "`+` may join the keys of a chord, and spaces may stand around them.",
        _example('"action": "key", "keys": ["ctrl + c"]'),
        _key_plus,
    ),
    Rule(
        "unknown-key",
        "A key that does not exist is left out; if no other is left, nothing is pressed.",
        _example('"action": "key", "keys": ["ctrl", "volumeup"]'),
        _unknown_key,
    ),
    Rule(
        "extra-argument",
        "An argument that the action does not take is ignored.",
        _example('"action": "wait", "time": 1, "text": "loading"'),
        _extra_argument,
    ),
    Rule(
        "long-press",
        "`long_press` holds the left button down, for its `time` or `duration` in seconds, or else for "
        f"{LONG_PRESS_SECONDS:g} second.",
        _example('"action": "long_press", "coordinate": [1, 2], "time": 2'),
        _long_press,
    ),
    Rule(
        "drag-duration",
        "`left_click_drag` takes its `duration` in seconds.",
        _example('"action": "left_click_drag", "coordinate": [1, 2], "duration": 0.5'),
        _drag_duration,
    ),
    Rule(
        "held-keys",
        "A click may name `keys` that are held meanwhile.",
        _example('"action": "left_click", "coordinate": [1, 2], "keys": ["ctrl"]'),
        _held_keys,
    ),
)
