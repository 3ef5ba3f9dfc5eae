"""What UI-TARS's own parser accepts beyond the strict grammar, as a list of rules.

The reference is the action parser that the family was released with, and the OSWorld agent made from it. Where both
accept a text and differ, the OSWorld agent is followed, because the published scores were measured with it. Where the
reference carries out several actions at once, the first is taken, and the next is decided on a new screenshot, unless
`agent.actions_per_step` allows more (`several`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dart.agent.keys import keysym_of
from dart.agent.parsing import ParseError, checked_text, shown, without_stop_token
from dart.agent.rules.rule import (
    LONG_PRESS_SECONDS,
    OUTSIDE,
    Rule,
    held_seconds,
    onto_grid,
    read_mended,
    without_plus,
)
from dart.agent.rules.ui_tars_text import KNOWN, TEXT_RULES, whole_call
from dart.agent.ui_tars import (
    CLICKS,
    DIRECTIONS,
    SIGNATURES,
    UITars,
    box_numbers,
    check_arguments,
    keysyms_of,
    notches_of,
)
from dart.core.action import Click, Drag, Keys, Move, Observe, Point, PressMode, Scroll, Single, System

_KEY_ACTIONS = ("hotkey", "press", "keydown", "release", "keyup")
_FLOAT = re.compile(r"\s*[+-]?(?:\d{1,6}(?:\.\d{0,20})?|\.\d{1,20})\s*", re.ASCII)
_BOX_TOKENS = re.compile(r"<\|box_(?:start|end)\|>|[()]")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the strict grammar need not know, on a screen of this grid."""

    grammar: UITars
    grid: tuple[int, int]
    name: str
    arguments: Mapping[str, str]

    def point(self, box: str) -> Point:
        """Like the strict grammar's, and with fractions. Raises ParseError."""
        numbers = _numbers(box)
        if numbers is None:
            raise ParseError("bad_arguments", f"box {shown(box)} is not (x,y)")
        x, y = _centre(numbers)
        return self.grammar.place(x, y, self.grid)

    def of(self, name: str, *arguments: str) -> bool:
        return self.name == name and all(argument in self.arguments for argument in arguments)

    def with_argument(self, name: str, value: str) -> Call:
        return replace(self, arguments={**self.arguments, name: value})


def read_leniently(
    grammar: UITars, text: str, width: int, height: int, refused: ParseError
) -> tuple[Single, tuple[str, ...]]:
    """The action in a text that the strict grammar refuses, and the names of the rules that it took.

    Raises `refused` if the text holds no call, and another ParseError if the call means nothing.
    """
    used: list[str] = []
    name, arguments = read_mended(without_stop_token(text), TEXT_RULES, whole_call, refused, used)
    call = Call(grammar, grammar.grid(width, height), name, arguments)
    for rule in CALL_RULES:
        made = rule.apply(call)
        if made is None:
            continue
        used.append(rule.slug)
        if not isinstance(made, Call):
            return made, tuple(used)
        call = made
    if call.name not in SIGNATURES:
        raise ParseError("unknown_action", f"{call.name} has no equivalent among the actions of an environment")
    return grammar.action(call.name, call.arguments, call.point), tuple(used)


# ---- what the call says: call → call, or the canonical action that strict words have no call for ----


def _renamed(old: str, new: str) -> Callable[[Call], Call | None]:
    return lambda call: replace(call, name=new) if call.name == old else None


def _key_argument(call: Call) -> Call | None:
    old = "hotkey" if call.name == "hotkey" else "press"
    if call.name not in _KEY_ACTIONS or "key" in call.arguments or old not in call.arguments:
        return None
    rest = {name: value for name, value in call.arguments.items() if name != old}
    return replace(call, arguments={**rest, "key": call.arguments[old]})


def _key_plus(call: Call) -> Call | None:
    if call.name not in _KEY_ACTIONS or "key" not in call.arguments:
        return None
    names = call.arguments["key"].split()
    apart = without_plus(names)
    return call.with_argument("key", " ".join(apart)) if apart != names else None


def _nothing_to_do(call: Call) -> Observe | None:
    """As the family's parser, which skips empty arguments and then presses, scrolls or drags nothing."""
    if call.name == "type" and "content" not in call.arguments:
        return Observe()
    needed = {"scroll": ("direction",), "drag": ("start_box", "end_box")}.get(call.name, ())
    if call.name in _KEY_ACTIONS:
        needed = ("key",)
    return None if all(call.arguments.get(name, "").strip() for name in needed) else Observe()


def _unknown_key(call: Call) -> Call | Observe | None:
    if call.name not in (*_KEY_ACTIONS, *CLICKS):
        return None
    names = without_plus(call.arguments.get("key", "").split())
    known = [name for name in names if keysym_of(name)]
    if len(known) == len(names):
        return None
    if call.name in CLICKS and not known:
        return replace(call, arguments={name: value for name, value in call.arguments.items() if name != "key"})
    if call.name not in ("hotkey", *CLICKS):
        known = []  # it takes one name: `page down` is no key, and not the key `down`
    return call.with_argument("key", " ".join(known)) if known else Observe()


def _direction(call: Call) -> Call | None:
    given = call.arguments.get("direction", "").lower()
    if call.name != "scroll" or call.arguments.get("direction") in DIRECTIONS:
        return None
    meant = next((name for name in ("up", "down", "left", "right") if name in given), None)
    return call.with_argument("direction", meant) if meant else None


def _loose_box(call: Call) -> Call | None:
    return _with_boxes(call, lambda box: None if box_numbers(box) else _numbers(box))


def _screen_edge(call: Call) -> Call | None:
    columns, rows = call.grid

    def inside(number: float, size: int) -> bool:
        # 1.0's grid includes its end.
        return 0 <= number < size or (call.grammar.thousand and number == size)

    def moved(box: str) -> tuple[float, float] | None:
        numbers = _numbers(box)
        if numbers is None or all(map(inside, numbers, (columns, rows) * 2)):
            return None
        x, y = _centre(numbers)
        at_x, at_y = onto_grid(x, columns), onto_grid(y, rows)
        return None if at_x is None or at_y is None else (at_x, at_y)

    return _with_boxes(call, moved)


def _with_boxes(call: Call, mend: Callable[[str], Sequence[float] | None]) -> Call | None:
    """The call with the boxes that `mend` has other numbers for; None if there are none."""
    made = {name: mend(call.arguments[name]) for name in ("start_box", "end_box") if name in call.arguments}
    written = {name: f"({','.join(f'{n:.15f}' for n in numbers)})" for name, numbers in made.items() if numbers}
    return replace(call, arguments={**call.arguments, **written}) if written else None


def _numbers(box: str) -> Sequence[float] | None:
    """The two or four numbers of a box in a strict or a loose form."""
    if strict := box_numbers(box):
        return strict
    numbers = _BOX_TOKENS.sub("", box).split(",")
    if len(numbers) not in (2, 4) or not all(map(_FLOAT.fullmatch, numbers)):
        return None
    return [float(number) for number in numbers]


def _centre(numbers: Sequence[float]) -> tuple[float, float]:
    return (numbers[0] + numbers[-2]) / 2, (numbers[1] + numbers[-1]) / 2


def _extra_argument(call: Call) -> Call | None:
    required, optional = KNOWN[call.name]
    kept = {name: value for name, value in call.arguments.items() if name in required | optional}
    return replace(call, arguments=kept) if len(kept) < len(call.arguments) else None


def _scroll_place(call: Call) -> Scroll | None:
    if call.name != "scroll" or call.arguments.get("start_box", "").strip() or "direction" not in call.arguments:
        return None
    return Scroll(None, *notches_of(call.arguments["direction"]))


def _hover(call: Call) -> Move | None:
    return Move(call.point(_argument(call, "start_box"))) if call.name == "hover" else None


def _key_action(mode: PressMode, *names: str) -> Callable[[Call], Keys | None]:
    def apply(call: Call) -> Keys | None:
        if call.name not in names:
            return None
        keys = keysyms_of(_argument(call, "key"))
        if len(keys) > 1:
            raise ParseError("bad_arguments", f"{call.name} takes one key: {shown(call.arguments['key'])} are several")
        return Keys(keys, mode)

    return apply


def _seconds(call: Call, *names: str) -> float | None:
    """The seconds in one of these arguments; None if they are empty or not there. Raises ParseError."""
    name = next((name for name in names if call.arguments.get(name, "").strip()), None)
    if name is None:
        return None
    value = call.arguments[name]
    return held_seconds(float(value) if _FLOAT.fullmatch(value) else None, name, shown(value))


def _long_press(call: Call) -> Click | None:
    if call.name != "long_press":
        return None
    at, seconds = call.point(_argument(call, "start_box")), _seconds(call, "time", "duration")
    return Click(at, hold_seconds=LONG_PRESS_SECONDS if seconds is None else seconds)


def _drag_duration(call: Call) -> Drag | None:
    if call.name != "drag" or "duration" not in call.arguments:
        return None
    ends = call.point(_argument(call, "start_box")), call.point(_argument(call, "end_box"))
    return Drag(ends, duration_seconds=_seconds(call, "duration") or 0.0)


def _held_keys(call: Call) -> Click | None:
    if call.name not in CLICKS or "key" not in call.arguments:
        return None
    button, count = CLICKS[call.name]
    held = keysyms_of(" ".join(without_plus(call.arguments["key"].split())))
    return Click(call.point(_argument(call, "start_box")), button, count, held)


def _open_app(call: Call) -> System | None:
    if call.name != "open_app":
        return None
    return System("open_app", checked_text(_argument(call, "app_name"), "app_name"))


def _phone_button(call: Call) -> Single | None:
    made: dict[str, Single] = {
        "press_home": System("home"), "press_back": System("back"), "press_enter": Keys(("Return",)),
    }  # fmt: skip
    return made.get(call.name)


def _argument(call: Call, name: str) -> str:
    check_arguments(call.name, call.arguments, KNOWN)
    return call.arguments[name]


CALL_RULES: tuple[Rule[Call, Call | Single], ...] = (
    Rule(
        "left-single",
        "`left_single` is `click`.",
        "Action: left_single(start_box='(1,2)')",
        _renamed("left_single", "click"),
    ),
    Rule(
        "select",
        "`select` is `drag`.",
        "Action: select(start_box='(1,2)', end_box='(3,4)')",
        _renamed("select", "drag"),
    ),
    Rule(
        "key-argument",
        "The key may be an argument `hotkey` of `hotkey`, and `press` of `press` and its like.",
        "Action: hotkey(hotkey='ctrl c')",
        _key_argument,
    ),
    Rule(
        "nothing-to-do",
        "A key action without a key, `type` without content, `scroll` without a direction and `drag` without both "
        "places do nothing.",
        "Action: hotkey(key='')",
        _nothing_to_do,
    ),
    Rule("key-plus", "`+` may join the keys of a chord.", "Action: hotkey(key='ctrl+c')", _key_plus),
    Rule(
        "unknown-key",
        "A key that does not exist is left out; if no other is left, nothing is pressed.",
        "Action: hotkey(key='ctrl volumeup')",
        _unknown_key,
    ),
    Rule(
        "direction",
        "A direction is read without regard to case, and other words may stand beside it.",
        "Action: scroll(start_box='(1,2)', direction='Down')",
        _direction,
    ),
    Rule(
        "loose-box",
        "A box needs no parentheses, or only one of them, and its numbers may have fractions and signs.",
        "Action: click(start_box='10.5,20')",
        _loose_box,
    ),
    Rule(
        "screen-edge",
        f"A position at most {OUTSIDE} outside the screen is at its edge, where the pointer would stop.",
        "Action: click(point='<point>1940 20</point>')",
        _screen_edge,
    ),
    Rule(
        "extra-argument",
        "An argument that the action does not take is ignored.",
        "Action: wait(seconds='5')",
        _extra_argument,
    ),
    Rule(
        "scroll-place",
        "`scroll` without a place scrolls where the pointer is.",
        "Action: scroll(direction='down')",
        _scroll_place,
    ),
    Rule("hover", "`hover` moves the pointer.", "Action: hover(start_box='(1,2)')", _hover),
    Rule(
        "long-press",
        f"`long_press` holds the button down, for its `time` or `duration` in seconds, or else for "
        f"{LONG_PRESS_SECONDS:g} second.",
        "Action: long_press(start_box='(1,2)', time='')",
        _long_press,
    ),
    Rule(
        "drag-duration",
        "`drag` takes its `duration` in seconds.",
        "Action: drag(start_box='(1,2)', end_box='(3,4)', duration='0.5')",
        _drag_duration,
    ),
    Rule(
        "held-keys",
        "A click may name keys that are held meanwhile.",
        "Action: click(start_box='(1,2)', key='ctrl')",
        _held_keys,
    ),
    Rule("press", "`press` presses and releases one key.", "Action: press(key='enter')", _key_action("press", "press")),
    Rule("keydown", "`keydown` holds a key down.", "Action: keydown(key='shift')", _key_action("down", "keydown")),
    Rule(
        "keyup",
        "`release` and `keyup` let a key go.",
        "Action: release(key='shift')",
        _key_action("up", "release", "keyup"),
    ),
    Rule("open-app", "`open_app` opens an app by its name.", "Action: open_app(app_name='Maps')", _open_app),
    Rule(
        "phone-button",
        "`press_home`, `press_back` and `press_enter` are a phone's buttons.",
        "Action: press_back()",
        _phone_button,
    ),
)
