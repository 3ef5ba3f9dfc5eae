"""UI-TARS's action grammar, 1.0 and 1.5.

    Thought: <anything>
    Action: click(start_box='(x,y)')

The thought may be left out; the action may not. Positions are pixels of the resized screenshot (1.5) or a 0-1000 grid
(1.0). A box is written (x,y), <|box_start|>(x,y)<|box_end|>, <point>x y</point>, or with four numbers, of which the
centre is taken. `type` keeps its text unchanged: like any newline in typed text, a trailing one is the Enter key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from dart.agent.keys import keysym_of, name_of
from dart.agent.parsing import (
    ParseError,
    checked_text,
    grid_pixels,
    grid_point,
    shown,
    smart_resize,
    without_stop_token,
)
from dart.core.action import Action, Click, Drag, Finish, Keys, MouseButton, Point, Scroll, Single, TypeText, Wait

WAIT_SECONDS = 5.0  # as the prompt promises for wait()
SCROLL_NOTCHES = 5  # as the family's own harness scrolls for one scroll()
THOUSAND = 1000

CLICKS: dict[str, tuple[MouseButton, int]] = {
    "click": ("left", 1),
    "left_double": ("left", 2),
    "right_single": ("right", 1),
}
_CLICK_NAMES = {how: name for name, how in CLICKS.items()}
DIRECTIONS = {
    "down": (0, SCROLL_NOTCHES),
    "up": (0, -SCROLL_NOTCHES),
    "right": (SCROLL_NOTCHES, 0),
    "left": (-SCROLL_NOTCHES, 0),
}
_DIRECTION_NAMES = {notches: name for name, notches in DIRECTIONS.items()}

Signatures = Mapping[str, tuple[frozenset[str], frozenset[str]]]
"""Action → (arguments it must have, arguments it may have)."""
SIGNATURES: Signatures = {
    **{name: (frozenset({"start_box"}), frozenset()) for name in CLICKS},
    "drag": (frozenset({"start_box", "end_box"}), frozenset()),
    "hotkey": (frozenset({"key"}), frozenset()),
    "type": (frozenset({"content"}), frozenset()),
    "scroll": (frozenset({"start_box", "direction"}), frozenset()),
    "wait": (frozenset(), frozenset()),
    "finished": (frozenset(), frozenset({"content"})),
    "call_user": (frozenset(), frozenset()),
}
ALIASES = {"point": "start_box", "start_point": "start_box", "end_point": "end_box"}

ACTION_LINE = re.compile(r"^Action:[ \t]*", re.MULTILINE)
_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*", re.ASCII)
OPENED = re.compile(rf"{_NAME.pattern}\(\s*", re.ASCII)
_PLAIN = re.compile(r"""[^'"\\]+""")
_ARGUMENT = re.compile(r"""\s*([A-Za-z_]\w*)\s*=\s*(['"])([^'"\\]*)\2\s*""", re.ASCII)
"""A whole argument as nearly every one is written: its string has no quotes and no escapes."""
ESCAPES = {"n": "\n", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
WRITTEN = str.maketrans({"\n": "\\n", "\t": "\\t", "'": "\\'", '"': '\\"', "\\": "\\\\"})
_NUMBER = r"\s*(\d{1,6})\s*"
BOX_START, BOX_END = "<|box_start|>", "<|box_end|>"
_BARE_BOX = re.compile(r"""(?<=_box=['"])\(\s*\d{1,6}(?:\s*,\s*\d{1,6}){1,3}\s*\)(?=['"])""", re.ASCII)
_BOX = re.compile(
    rf"(?P<marked><\|box_start\|>)?\({_NUMBER},{_NUMBER}(?:,{_NUMBER},{_NUMBER})?\)(?(marked)<\|box_end\|>)"
    r"|<point>\s*(\d{1,6})\s+(\d{1,6})\s*</point>",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class UITars:
    """`thousand` is 1.0's grid. The other numbers are the model's image processor's, needed for 1.5's pixels.

    `digits` zero-pads the coordinates that `format` writes, and `box_tokens` puts them between the family's tokens for
    boxes. The family's own way is 1 digit, with tokens; where the prompt is `minimal` it is 3 digits and no tokens,
    because a tiny model learns numbers of fixed width more easily. `parse` reads both.
    """

    thousand: bool
    multiple: int
    min_pixels: int
    max_pixels: int
    digits: int = 1
    box_tokens: bool = True

    def parse(self, text: str, width: int, height: int) -> Single:
        name, arguments = read_call(action_text(without_stop_token(text)))
        return self.action(name, arguments, lambda box: self.point(box, width, height))

    def action(self, name: str, arguments: Mapping[str, str], point: Callable[[str], Point]) -> Single:
        """The canonical action of a call; `point` reads its boxes. Raises ParseError."""
        check_arguments(name, arguments)
        if name in CLICKS:
            button, count = CLICKS[name]
            return Click(point(arguments["start_box"]), button, count)
        match name:
            case "drag":
                return Drag((point(arguments["start_box"]), point(arguments["end_box"])))
            case "hotkey":
                return Keys(keysyms_of(arguments["key"]))
            case "type":
                return TypeText(checked_text(arguments["content"], "content"))
            case "scroll":
                notches = notches_of(arguments["direction"])
                return Scroll(point(arguments["start_box"]), *notches)
            case "wait":
                return Wait(WAIT_SECONDS)
            case "finished":
                return Finish("success", checked_text(arguments.get("content", ""), "content"))
            case _:
                return Finish("call_user")

    def format(self, action: Action, width: int, height: int, thought: str = "") -> str:
        thought = thought.strip()
        if ACTION_LINE.search(thought):
            raise ValueError(
                f"thought {shown(thought)} has a line that begins with 'Action:', which would be the action"
            )
        call = self._written(action, width, height)
        return f"Thought: {thought}\nAction: {call}" if thought else f"Action: {call}"

    def _written(self, action: Action, width: int, height: int) -> str:
        match action:
            case Click(Point() as at, button, count, (), 0.0) if (button, count) in _CLICK_NAMES:
                return f"{_CLICK_NAMES[button, count]}(start_box='{self._box(at, width, height)}')"
            case Drag((start, end), "left", 0.0):
                boxes = self._box(start, width, height), self._box(end, width, height)
                return f"drag(start_box='{boxes[0]}', end_box='{boxes[1]}')"
            case Keys((_, *_) as keysyms, "press") if all(name_of(keysym) for keysym in keysyms):
                return f"hotkey(key={_quoted(' '.join(name_of(keysym) or '' for keysym in keysyms))})"
            case TypeText(text):
                return f"type(content={_quoted(text)})"
            case Scroll(Point() as at, dx, dy) if (dx, dy) in _DIRECTION_NAMES:
                box = self._box(at, width, height)
                return f"scroll(start_box='{box}', direction='{_DIRECTION_NAMES[dx, dy]}')"
            case Wait(seconds) if seconds == WAIT_SECONDS:
                return "wait()"
            case Finish("success", answer):
                return f"finished(content={_quoted(answer)})"
            case Finish("call_user", ""):
                return "call_user()"
            case _:
                raise ValueError(f"{action} cannot be written in UI-TARS's action space")

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """The width and height of what coordinates count, for a screenshot of this size."""
        if self.thousand:
            return THOUSAND, THOUSAND
        return smart_resize(width, height, self.multiple, self.min_pixels, self.max_pixels)

    def point(self, box: str, width: int, height: int) -> Point:
        """The position that a box names. Raises ParseError."""
        numbers = box_numbers(box)
        if numbers is None:
            raise ParseError("bad_arguments", f"box {shown(box)} is not (x,y)")
        grid = self.grid(width, height)
        if len(numbers) == 2:
            return self.place(numbers[0], numbers[1], grid)
        left, top, right, bottom = numbers
        for x, y in ((left, top), (right, bottom)):
            self.place(x, y, grid)  # both corners must be inside
        return self.place((left + right) / 2, (top + bottom) / 2, grid)

    def place(self, x: float, y: float, grid: tuple[int, int]) -> Point:
        """The point at (x, y) of the grid. Raises ParseError outside of it.

        1.0's grid includes its end: 1000 is the screen's last pixel. 1.5's pixels end before the width.
        """
        if self.thousand:
            if max(x, y) > THOUSAND:
                raise ParseError("out_of_bounds", f"({x:g}, {y:g}) is outside the grid of 0 to {THOUSAND}")
            x, y = min(x, THOUSAND - 0.5), min(y, THOUSAND - 0.5)
        return grid_point(x, y, *grid)

    def _box(self, at: Point, width: int, height: int) -> str:
        x, y = grid_pixels(at, *self.grid(width, height))
        box = f"({x:0{self.digits}d},{y:0{self.digits}d})"
        return f"{BOX_START}{box}{BOX_END}" if self.box_tokens else box

    def as_written(self, text: str) -> str:
        """A turn whose special tokens were left out, as chat servers do, with the tokens of its boxes again."""
        return _BARE_BOX.sub(rf"{BOX_START}\g<0>{BOX_END}", text) if self.box_tokens else text


def box_numbers(box: str) -> list[int] | None:
    """The two or four numbers of a box in one of the strict forms; None if it has none of them."""
    found = _BOX.fullmatch(box.strip())
    return found and [int(number) for number in found.groups()[1:] if number is not None]


def notches_of(direction: str) -> tuple[int, int]:
    """Wheel notches of a direction, (dx, dy). Raises ParseError."""
    if direction not in DIRECTIONS:
        raise ParseError("bad_arguments", f"direction {shown(direction)} is not down, up, right or left")
    return DIRECTIONS[direction]


def action_text(text: str) -> str:
    """The text after the first `Action:` at the start of a line. Raises ParseError.

    Only a thought may come before it.
    """
    found = ACTION_LINE.search(text)
    if found is None:
        raise ParseError("no_action", f"no line of {shown(text)} begins with 'Action:'")
    before = text[: found.start()].strip()
    if before and not before.startswith("Thought:"):
        raise ParseError("leading_text", f"{shown(before)} before the action is not a thought")
    return text[found.end() :]


def read_call(text: str) -> tuple[str, dict[str, str]]:
    """`name(argument='value', …)`, whole, as a name and its arguments. Raises ParseError."""
    name, arguments, end = call_at_start(text)
    rest = text[end:].strip()
    if rest:
        kind = "many_actions" if _begins_action(rest) else "trailing_text"
        raise ParseError(kind, f"{shown(rest)} after the action")
    return name, arguments


def call_at_start(text: str, names: Container[str] = SIGNATURES) -> tuple[str, dict[str, str], int]:
    """The call of one of `names` that `text` begins with: its name, its arguments and where it ends. Raises
    ParseError."""
    found = OPENED.match(text) or _NAME.match(text)
    if found is None:
        raise ParseError("no_action" if not text.strip() else "unknown_action", f"{shown(text)} is not an action")
    name, position = found[1], found.end()
    if name not in names:
        raise ParseError("unknown_action", f"{shown(name)} is not one of {', '.join(SIGNATURES)}")
    position = _skip_space(text, position) if found.re is OPENED else _expect(text, position, "(")
    arguments: dict[str, str] = {}
    while not text.startswith(")", position):
        if arguments:
            position = _expect(text, position, ",")
        if plain := _ARGUMENT.match(text, position):
            argument, value, position = plain[1], plain[3], plain.end()
            argument = ALIASES.get(argument, argument)
        else:
            argument, position = _argument_name(text, position)
            value, position = _string(text, position)
        if argument in arguments:
            raise ParseError("bad_arguments", f"argument {argument} is given twice")
        arguments[argument], position = value, _skip_space(text, position)
    return name, arguments, position + 1


def _begins_action(text: str) -> bool:
    found = _NAME.match(text.removeprefix("Action:"))
    return found is not None and (found[1] in SIGNATURES or text.startswith("Action:"))


def _argument_name(text: str, position: int) -> tuple[str, int]:
    found = _NAME.match(text, position)
    if found is None:
        _expect(text, position, "an argument's name")
        raise AssertionError("unreachable: no text begins with that")
    return ALIASES.get(found[1], found[1]), _skip_space(text, _expect(text, found.end(), "="))


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _expect(text: str, position: int, token: str) -> int:
    """The position after `token` and white space. Text that ends before it is truncated; any other text is an error."""
    if text.startswith(token, position):
        return _skip_space(text, position + len(token))
    if position >= len(text):
        raise ParseError("truncated", f"{shown(text)} ends where {token} should follow")
    raise ParseError("bad_arguments", f"{token} should stand where {shown(text[position:], 40)} stands")


def _string(text: str, position: int) -> tuple[str, int]:
    """The quoted string at `position` with its escapes resolved, and the position after it."""
    quote = text[position : position + 1]
    if quote not in ("'", '"'):
        position = _expect(text, position, "'")
    characters: list[str] = []
    position += 1
    while position < len(text):
        if plain := _PLAIN.match(text, position):
            characters.append(plain[0])
            position = plain.end()
            continue
        character = text[position]
        if character == quote:
            return "".join(characters), position + 1
        if character == "\\":
            position += 1
            if position >= len(text):
                break
            if text[position] not in ESCAPES:
                raise ParseError(
                    "bad_arguments", f"\\{ascii(text[position])[1:-1]} is not an escape: write \\\\ for \\"
                )
            character = ESCAPES[text[position]]
        characters.append(character)
        position += 1
    raise ParseError("truncated", f"the string {shown(''.join(characters))} is not closed")


def _quoted(text: str) -> str:
    return f"'{checked_text(text, 'text').translate(WRITTEN)}'"


def check_arguments(name: str, arguments: Mapping[str, str], signatures: Signatures = SIGNATURES) -> None:
    """Raises ParseError for an argument that is missing or that the action does not take."""
    required, optional = signatures[name]
    if arguments.keys() == required:
        return
    if missing := required - arguments.keys():
        raise ParseError("bad_arguments", f"{name} needs {', '.join(sorted(missing))}")
    if unknown := arguments.keys() - required - optional:
        raise ParseError("bad_arguments", f"{name} does not take {', '.join(sorted(unknown))}")


def keysyms_of(keys: str) -> tuple[str, ...]:
    """The keysyms of key names with spaces between them. Raises ParseError."""
    names = keys.split()
    if not names:
        raise ParseError("bad_arguments", "key is empty")
    keysyms = [keysym for name in names if (keysym := keysym_of(name))]
    if len(keysyms) < len(names):
        unknown = next(name for name in names if keysym_of(name) is None)
        raise ParseError("bad_arguments", f"{shown(unknown)} is not a key")
    return tuple(keysyms)
