"""Canonical actions → command lines for the device's shell. Pure.

Actions are carried out by `adb shell input`, and not by the `/execute_action` of AndroidWorld's server: that has no
drag from one place to another, no scrolling at a place and no key but enter; it presses enter after every text; and it
reads the accessibility tree before each action. Only names of apps are left to it, because it has a table of them.

A phone has no pointer. What an action with no place means is the place of the last one.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from dart.core.action import ROUNDING, Action, Click, Drag, Keys, Point, Scroll, System, SystemKind, TypeText
from dart.workers.env.android.keycodes import codes_of

Typing = Literal["input", "adb_keyboard"]
ACTIONS = frozenset({"move", "click", "drag", "scroll", "keys", "type_text", "wait", "observe", "system"})
"""A touch screen has no buttons that are held apart from a place, and runs no programs."""
SWIPE_MS, SCROLL_MS = 300, 500
"""A drag that names no time takes as long as Android's own `input swipe`; a slower scroll flings less."""
EDGE = 0.05
"""Scrolling keeps this far from the screen's edges, where a finger opens shades or goes back."""
MOST_LINE = 1000
"""Characters of one command line, about 40 words: `input` takes up to half a second for each on old devices."""
MOST_CLICKS = 5
MIDDLE = Point(0.5, 0.5)
KEYBOARD = "com.android.adbkeyboard/.AdbIME"
_KEYS: Mapping[SystemKind, str] = {
    "back": "BACK", "home": "HOME", "app_switch": "APP_SWITCH", "volume_up": "VOLUME_UP", "volume_down": "VOLUME_DOWN",
}  # fmt: skip
_BETWEEN = {"\n": "ENTER", "\t": "TAB"}
_PACKAGE = re.compile(r"[A-Za-z]\w*(\.\w+)+(/[\w.$]+)?")


class Refused(ValueError):
    """The device cannot carry the action out; the message says why, for the policy."""


@dataclass(frozen=True, slots=True)
class Named:
    """An app that only AndroidWorld's server may know, by the name that the policy uses."""

    app: str


@dataclass(frozen=True, slots=True)
class Hands:
    """How actions are carried out on one device."""

    size: tuple[int, int]
    """Of the screen as it is turned now, in the pixels in which `input` counts."""
    typing: Typing = "input"
    apps: Mapping[str, str] | None = None
    scroll_fraction: float = 0.1
    most_seconds: float = 5.0

    def commands(self, action: Action, last: Point) -> list[str] | Named:
        """The command lines, run in this order; none for an action that touches nothing. Raises Refused."""
        match action:
            case Click():
                return self._click(action, action.at or last)
            case Drag():
                return self._drag(action, last)
            case Scroll():
                return self._scroll(action, action.at or last)
            case Keys():
                return [_keys(action)]
            case TypeText():
                return _typed(action.text) if self.typing == "input" else _sent(action.text)
            case System():
                return self._system(action)
            case _:
                return []

    def pixel(self, point: Point) -> tuple[int, int]:
        """The pixel that a place is in."""
        x, y = point.pixels(*self.size)
        return int(x + ROUNDING), int(y + ROUNDING)

    def _ms(self, seconds: float) -> int:
        return max(1, round(1000 * min(seconds, self.most_seconds)))

    def _click(self, action: Click, at: Point) -> list[str]:
        if action.button != "left":
            raise Refused(f"a touch screen has no {action.button} button")
        if action.modifiers:
            raise Refused("no key can be held during a touch")
        x, y = self.pixel(at)
        if action.hold_seconds > 0:
            return [f"input swipe {x} {y} {x} {y} {self._ms(action.hold_seconds)}"] * action.count
        return ["; ".join([f"input tap {x} {y}"] * min(max(action.count, 1), MOST_CLICKS))]

    def _drag(self, action: Drag, last: Point) -> list[str]:
        if action.button != "left":
            raise Refused(f"a touch screen has no {action.button} button")
        path = [self.pixel(point) for point in (action.path if len(action.path) > 1 else (last, *action.path))]
        ms = self._ms(action.duration_seconds) if action.duration_seconds else SWIPE_MS
        if len(path) == 2:
            (x, y), (to_x, to_y) = path
            return [f"input swipe {x} {y} {to_x} {to_y} {ms}"]
        pause = f"sleep {ms / 1000 / (len(path) - 1):.3f}"
        moves = [f"{pause}; input motionevent MOVE {x} {y}" for x, y in path[1:]]
        down, up = (f"input motionevent {kind} {x} {y}" for kind, (x, y) in (("DOWN", path[0]), ("UP", path[-1])))
        return ["; ".join((down, *moves, up))]

    def _scroll(self, action: Scroll, at: Point) -> list[str]:
        """One swipe that moves the content as the wheel would; it ends at the screen's edge if it is too long."""
        if not (action.dx or action.dy):
            return []
        start = Point(_inside(at.x), _inside(at.y))
        end = Point(
            _inside(start.x - action.dx * self.scroll_fraction), _inside(start.y - action.dy * self.scroll_fraction)
        )
        if self.pixel(start) == self.pixel(end):
            raise Refused("there is no room on the screen to scroll that way from that place")
        (x, y), (to_x, to_y) = self.pixel(start), self.pixel(end)
        return [f"input swipe {x} {y} {to_x} {to_y} {SCROLL_MS}"]

    def _system(self, action: System) -> list[str] | Named:
        said = action.argument.strip()
        if action.kind == "open_url":
            if not re.match(r"https?://", said):
                raise Refused(f"{said[:80]!r} is not an http or https address")
            return [f"am start -a android.intent.action.VIEW -d {shlex.quote(said)}"]
        if action.kind == "open_app":
            return self._open(said)
        return [f"input keyevent KEYCODE_{_KEYS[action.kind]}"]

    def _open(self, name: str) -> list[str] | Named:
        by_name = {known.casefold(): target for known, target in (self.apps or {}).items()}
        target = by_name.get(name.casefold(), name)
        if not _PACKAGE.fullmatch(target):
            return Named(name)
        if "/" in target:
            return [f"am start -n {shlex.quote(target)}"]
        return [f"monkey -p {target} -c android.intent.category.LAUNCHER 1"]


def failed(command: str, output: str, status: int) -> str:
    """Why a command line of `Hands.commands` did nothing, in the device's words; empty if it worked."""
    # Programs of many Android versions report errors with status 0.
    wrong = status != 0 or re.search(r"^Error|Exception|monkey aborted", output, re.MULTILINE)
    return f"{command[:80]}: {output.strip()[-300:] or f'status {status}'}" if wrong else ""


def _inside(fraction: float) -> float:
    return min(max(fraction, EDGE), 1 - EDGE)


def _keys(action: Keys) -> str:
    if action.mode != "press":
        raise Refused("a key of this device cannot be held over several actions, only pressed")
    try:
        codes = [f"KEYCODE_{code}" for code in codes_of(action.keysyms)]
    except LookupError as error:
        raise Refused(f"this device has no key {error.args[0]}") from None
    if not codes:
        raise Refused("the chord has no key")
    return f"input {'keyevent' if len(codes) == 1 else 'keycombination'} {' '.join(codes)}"


def _typed(text: str) -> list[str]:
    """By `input text`, word by word, as it mixes up the letters of long texts."""
    if strange := sorted({one for one in text if one not in "\n\t" and not " " <= one <= "~"}):
        raise Refused(
            f"text with {''.join(strange)[:20]!r} was not typed: `adb shell input text` types only ASCII "
            "(environment.options.typing: adb_keyboard types everything)"
        )
    return _lines(text, lambda words: [f"input text {shlex.quote(word)}" for word in _words(words)])


def _sent(text: str) -> list[str]:
    """To the ADBKeyBoard app, in base64."""

    def broadcasts(line: str) -> list[str]:
        pieces = [line[at : at + 500] for at in range(0, len(line), 500)]
        return [
            f"am broadcast -a ADB_INPUT_B64 --es msg {base64.b64encode(piece.encode()).decode()}" for piece in pieces
        ]

    return _lines(text, broadcasts)


def _words(line: str) -> list[str]:
    """Words with the space before them, which `input text` writes as %s; a real `%s` is cut in two."""
    pieces = (piece for word in re.findall(r" *[^ ]{1,100}| +$", line) for piece in re.split(r"(?<=%)(?=s)", word))
    return [piece.replace(" ", "%s") for piece in pieces]


def _lines(text: str, write: Callable[[str], list[str]]) -> list[str]:
    """Command lines that type the text: `write` what is between line ends and tabs, which are keys."""
    steps: list[str] = []
    for part in re.split(r"([\n\t])", text):
        if part in _BETWEEN:
            steps.append(f"input keyevent KEYCODE_{_BETWEEN[part]}")
        elif part:
            steps += write(part)
    lines: list[str] = []
    for step in steps:
        if lines and len(lines[-1]) + len(step) < MOST_LINE:
            lines[-1] += f" && {step}"
        else:
            lines.append(step)
    return lines
