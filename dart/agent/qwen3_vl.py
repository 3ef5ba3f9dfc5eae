"""Qwen3-VL's `computer_use` grammar: one tool call, positions on a grid of 0 to 999.

    <any thought>
    <tool_call>
    {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [x, y]}}
    </tool_call>

`scroll` and `hscroll` count wheel notches, as the family's own harness takes its `pixels`; positive scrolls up and
right. `left_click_drag` starts at the pointer: a drag with a path of one point. A failure is "could not",
never a claim that the task is infeasible.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeGuard

from dart.agent.keys import keysym_of, name_of
from dart.agent.parsing import ParseError, checked_text, grid_pixels, grid_point, shown, without_stop_token
from dart.core.action import (
    Action,
    Click,
    Drag,
    Finish,
    FinishStatus,
    Keys,
    MouseButton,
    Move,
    Point,
    Scroll,
    Single,
    TypeText,
    Wait,
)

TOOL = "computer_use"
GRID = 1000
MAX_NOTCHES = 2**31 - 1  # the limit of the wire format

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CLICKS: dict[str, tuple[MouseButton, int]] = {
    "left_click": ("left", 1),
    "right_click": ("right", 1),
    "middle_click": ("middle", 1),
    "double_click": ("left", 2),
    "triple_click": ("left", 3),
}
_CLICK_NAMES = {how: name for name, how in CLICKS.items()}
_STATUSES: dict[str, FinishStatus] = {"success": "success", "failure": "fail"}
_STATUS_NAMES = {status: name for name, status in _STATUSES.items()}
_SPACE = re.compile(r"\s*")

Arguments = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Qwen3VL:
    """The screenshot's size does not matter: the grid is the same for all."""

    def parse(self, text: str, width: int, height: int) -> Single:
        return self.action(read_arguments(without_stop_token(text)))

    def action(self, given: Arguments) -> Single:
        """The canonical action of a tool call's arguments. Raises ParseError."""
        arguments = dict(given)
        action = arguments.pop("action", None)
        if not isinstance(action, str):
            raise ParseError("bad_arguments", "arguments.action is not a string")
        if action not in CALLS:
            raise ParseError("unknown_action", f"{shown(action)} is not one of {', '.join(CALLS)}")
        required, optional, build = CALLS[action]
        if missing := required - arguments.keys():
            raise ParseError("bad_arguments", f"{action} needs {', '.join(sorted(missing))}")
        if unknown := arguments.keys() - required - optional:
            raise ParseError("bad_arguments", f"{action} does not take {shown(', '.join(sorted(unknown)))}")
        return build(action, arguments)

    def format(self, action: Action, width: int, height: int, thought: str = "") -> str:
        thought = thought.strip()
        if OPEN in thought:
            raise ValueError(f"thought {shown(thought)} has {OPEN} in it, which would be the action")
        call = json.dumps({"name": TOOL, "arguments": _written(action)}, ensure_ascii=False)
        checked_text(call, "action")
        return "\n".join([*([thought] if thought else []), OPEN, call, CLOSE])

    def as_written(self, text: str) -> str:
        """A turn as the model wrote it: no special token is part of one."""
        return text


def read_arguments(text: str) -> Arguments:
    """The arguments of the one tool call in `text`. Raises ParseError."""
    start = text.find(OPEN)
    if start < 0:
        raise ParseError("no_action", f"no {OPEN} in {shown(text)}")
    call, end = json_at(text, space_end(text, start + len(OPEN)))
    end = space_end(text, end)
    if not text.startswith(CLOSE, end):
        if CLOSE.startswith(text[end:]):
            raise ParseError("truncated", f"the tool call is not closed by {CLOSE}")
        raise ParseError("trailing_text", f"{shown(text[end:])} before {CLOSE}")
    rest = text[end + len(CLOSE) :].strip()
    if rest:
        raise ParseError("many_actions" if OPEN in rest else "trailing_text", f"{shown(rest)} after the tool call")
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        raise ParseError("bad_arguments", 'the tool call is not {"name": …, "arguments": {…}}')
    if call["name"] != TOOL:
        raise ParseError("unknown_action", f"the tool is not {TOOL}")
    return call["arguments"]


def space_end(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def json_at(text: str, position: int, repeated: bool = False) -> tuple[object, int]:
    """The JSON value at `position` and where it ends. Python's extensions (NaN, repeated names) are ParseErrors;
    `repeated`: names may be, and the last counts."""
    decoder = json.JSONDecoder(object_pairs_hook=None if repeated else _unique, parse_constant=_no_constant)
    try:
        return decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text) or error.msg.startswith("Unterminated string")
        kind = "truncated" if at_end else "bad_json"
        raise ParseError(kind, f"{error.msg} in {shown(text[position:])}") from None
    except RecursionError:
        raise ParseError("bad_json", "the JSON is nested too deeply") from None
    except ParseError:
        raise
    except ValueError:  # Python refuses to read integers of thousands of digits
        raise ParseError("bad_json", f"a number in {shown(text[position:])} is too long") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ParseError("bad_json", f"a name is given twice among {shown(', '.join(name for name, _ in pairs))}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ParseError("bad_json", f"{name} is not JSON")


# ---- one function per kind of action: its arguments → the canonical action ----


def _point(arguments: Arguments) -> Point:
    value = arguments["coordinate"]
    if isinstance(value, Point):
        return value  # read by a rule; JSON has none
    if not (isinstance(value, list) and len(value) == 2 and all(is_int(number) for number in value)):
        raise ParseError("bad_arguments", "coordinate is not [x, y] in whole numbers")
    # A number too large for a float would overflow the comparison's message; it is outside in any case.
    x, y = (max(-1, min(number, GRID)) for number in value)
    return grid_point(x, y, GRID, GRID)


def _point_or_pointer(arguments: Arguments) -> Point | None:
    return _point(arguments) if "coordinate" in arguments else None


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(arguments: Arguments) -> str:
    if not isinstance(arguments["text"], str):
        raise ParseError("bad_arguments", "text is not a string")
    return checked_text(arguments["text"], "text")


def _click(name: str, arguments: Arguments) -> Single:
    button, count = CLICKS[name]
    return Click(_point_or_pointer(arguments), button, count)


def _move(name: str, arguments: Arguments) -> Single:
    return Move(_point(arguments))


def _drag(name: str, arguments: Arguments) -> Single:
    return Drag((_point(arguments),))


def _key(name: str, arguments: Arguments) -> Single:
    return Keys(keysyms_of(arguments["keys"]))


def keysyms_of(names: object) -> tuple[str, ...]:
    """The keysyms of a list of key names. Raises ParseError."""
    if not (isinstance(names, list) and names and all(isinstance(key, str) for key in names)):
        raise ParseError("bad_arguments", "keys is not a list of key names")
    keysyms = []
    for key in names:
        keysym = keysym_of(key)
        if keysym is None:
            raise ParseError("bad_arguments", f"{shown(key)} is not a key")
        keysyms.append(keysym)
    return tuple(keysyms)


def _type(name: str, arguments: Arguments) -> Single:
    return TypeText(_text(arguments))


def _scroll(name: str, arguments: Arguments) -> Single:
    notches = arguments["pixels"]
    if not is_int(notches):
        raise ParseError("bad_arguments", "pixels is not a whole number")
    if abs(notches) > MAX_NOTCHES:
        raise ParseError("out_of_bounds", f"pixels is beyond {MAX_NOTCHES}")
    at = _point_or_pointer(arguments)
    return Scroll(at, dx=notches) if name == "hscroll" else Scroll(at, dy=-notches)


def _wait(name: str, arguments: Arguments) -> Single:
    seconds = arguments["time"]
    if not (is_int(seconds) or isinstance(seconds, float)):
        raise ParseError("bad_arguments", "time is not a number")
    try:
        seconds = float(seconds)
    except OverflowError:
        seconds = math.inf
    if not (0 <= seconds < math.inf):
        raise ParseError("out_of_bounds", f"time {seconds} is not a finite number of seconds from 0")
    return Wait(seconds)


def _terminate(name: str, arguments: Arguments) -> Single:
    status = arguments["status"]
    if not isinstance(status, str) or status not in _STATUSES:
        raise ParseError("bad_arguments", "status is not success or failure")
    return Finish(_STATUSES[status])


def _answer(name: str, arguments: Arguments) -> Single:
    return Finish("success", _text(arguments))


# action: (arguments it must have, arguments it may have, what builds it)
CALLS: dict[str, tuple[frozenset[str], frozenset[str], Callable[[str, Arguments], Single]]] = {
    "key": (frozenset({"keys"}), frozenset(), _key),
    "type": (frozenset({"text"}), frozenset(), _type),
    "mouse_move": (frozenset({"coordinate"}), frozenset(), _move),
    "left_click_drag": (frozenset({"coordinate"}), frozenset(), _drag),
    **{name: (frozenset(), frozenset({"coordinate"}), _click) for name in CLICKS},
    "scroll": (frozenset({"pixels"}), frozenset({"coordinate"}), _scroll),
    "hscroll": (frozenset({"pixels"}), frozenset({"coordinate"}), _scroll),
    "wait": (frozenset({"time"}), frozenset(), _wait),
    "terminate": (frozenset({"status"}), frozenset(), _terminate),
    "answer": (frozenset({"text"}), frozenset(), _answer),
}


def _written(action: Action) -> dict[str, object]:
    """The tool call's arguments for `action`."""
    match action:
        case Keys((_, *_) as keysyms, "press") if all(name_of(keysym) for keysym in keysyms):
            return {"action": "key", "keys": [name_of(keysym) for keysym in keysyms]}
        case TypeText(text):
            return {"action": "type", "text": text}
        case Wait(seconds):
            return {"action": "wait", "time": seconds}
        case Finish("success", answer) if answer:
            return {"action": "answer", "text": answer}
        case Finish(("success" | "fail") as status, ""):
            return {"action": "terminate", "status": _STATUS_NAMES[status]}
        case _:
            return _written_pointer(action)


def _written_pointer(action: Action) -> dict[str, object]:
    match action:
        case Click(at, button, count, (), 0.0) if (button, count) in _CLICK_NAMES:
            return {"action": _CLICK_NAMES[button, count], **_coordinate(at)}
        case Move(at):
            return {"action": "mouse_move", **_coordinate(at)}
        case Drag((end,), "left", 0.0):
            return {"action": "left_click_drag", **_coordinate(end)}
        case Scroll(at, 0, dy):
            return {"action": "scroll", "pixels": -dy, **_coordinate(at)}
        case Scroll(at, dx, 0):
            return {"action": "hscroll", "pixels": dx, **_coordinate(at)}
        case _:
            raise ValueError(f"{action} cannot be written in Qwen3-VL's action space")


def _coordinate(at: Point | None) -> dict[str, list[int]]:
    return {} if at is None else {"coordinate": list(grid_pixels(at, GRID, GRID))}
