"""Canonical actions as a mouse and a keyboard would make them, through the X server's XTEST extension.

Characters that no key of the layout types (é, €) are put on keys that the layout leaves empty, as xdotool does it. A
key is given another character only when all of them are in use, because applications read the layout late.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from Xlib import XK, X, display
from Xlib.ext import xtest

from dart.core.action import ROUNDING, Action, Button, Click, Drag, Keys, Move, Point, Scroll, TypeText

BUTTONS = {"left": 1, "middle": 2, "right": 3}
UP, DOWN, LEFT, RIGHT = 4, 5, 6, 7
DRAG_STEPS, DRAG_SECONDS = 6, 0.01
"""The fewest moves between two points of a drag, and the least time between them: toolkits start to drag only after a
few."""
DRAG_PAUSE_SECONDS = 0.05
"""Between two moves of a drag that takes its time."""
MOST_NOTCHES = 50
REMAP_SECONDS = 0.3
"""How long applications are given to read their keys before these get other characters."""
_GROUPS = ("latin2", "latin3", "latin4", "greek", "cyrillic", "technical", "special", "publishing", "xf86")
_MORE = {"EuroSign": 0x20AC}
"""Names that python-xlib does not know."""
for _group in _GROUPS:
    XK.load_keysym_group(_group)


def keysym_of_name(name: str) -> int:
    """The number of an X keysym name, or of a single character; 0 if there is none."""
    return int(XK.string_to_keysym(name)) or _MORE.get(name, 0) or (keysym_of_character(name) if len(name) == 1 else 0)


def keysym_of_character(character: str) -> int:
    if character in "\n\r":
        return int(XK.XK_Return)
    if character in "\t\b":
        return int(XK.XK_Tab if character == "\t" else XK.XK_BackSpace)
    code = ord(character)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return 0  # control characters
    return code if code < 0x100 else 0x01000000 | code


class InputDevices:
    """The mouse and the keyboard of one desktop."""

    def __init__(self, connection: display.Display, size: tuple[int, int]) -> None:
        self._display, self._size = connection, size
        least, most = connection.display.info.min_keycode, connection.display.info.max_keycode
        self._codes: dict[int, tuple[int, bool]] = {}
        """Keysym → (key, needs Shift)."""
        self._spare: list[int] = []
        self._borrowed: dict[int, int] = {}
        """Keysym → the spare key that has it."""
        for code, keysyms in enumerate(connection.get_keyboard_mapping(least, most - least + 1), least):
            if not any(keysyms):
                self._spare.append(code)
            for level in (1, 0):
                if level < len(keysyms) and keysyms[level]:
                    known = self._codes.get(keysyms[level])
                    if known is None or known[1] > bool(level):
                        self._codes[keysyms[level]] = (code, bool(level))
        self._shift = self._codes[XK.XK_Shift_L][0]

    @staticmethod
    def refused(action: Action) -> str:
        """Why nothing of the action can be carried out: a key that X does not know. Empty if it can."""
        match action:
            case Keys(keysyms=names) | Click(modifiers=names):
                unknown = [name for name in names if not keysym_of_name(name)]
                return f"X has no key {', '.join(unknown)}" if unknown else ""
            case _:
                return ""

    def carry_out(self, action: Action, most_seconds: float = math.inf) -> None:
        """Returns when the server has handled it; does nothing for an action that is not input.

        `most_seconds`: the longest that a button is held or a drag takes; what asks for more gets this.
        """
        match action:
            case Move(at):
                self._move(at)
            case Click(at, button, count, modifiers, hold):
                self._click(at, BUTTONS[button], count, modifiers, min(hold, most_seconds))
            case Button(at, button, mode):
                self._go(at)
                self._fake(X.ButtonPress if mode == "down" else X.ButtonRelease, BUTTONS[button])
            case Drag(path, button, duration):
                self._drag(path, BUTTONS[button], min(duration, most_seconds))
            case Scroll(at, dx, dy):
                self._go(at)
                self._notches(RIGHT if dx > 0 else LEFT, abs(dx))
                self._notches(DOWN if dy > 0 else UP, abs(dy))
            case Keys(keysyms, mode):
                self._chord(keysyms, mode)
            case TypeText(text):
                for character in text:
                    self._press(keysym_of_character(character))
            case _:
                return
        self._display.sync()

    # ---- mouse ----

    def _move(self, at: Point) -> None:
        x, y = at.pixels(*self._size)
        xtest.fake_input(self._display, X.MotionNotify, x=int(x + ROUNDING), y=int(y + ROUNDING))

    def _go(self, at: Point | None) -> None:
        if at is not None:
            self._move(at)

    def _click(self, at: Point | None, button: int, count: int, modifiers: Sequence[str], hold: float) -> None:
        self._go(at)
        self._chord(modifiers, "down")
        for _ in range(max(1, min(count, 3))):
            self._fake(X.ButtonPress, button)
            if hold:
                self._display.sync()
                time.sleep(hold)
            self._fake(X.ButtonRelease, button)
        self._chord(modifiers, "up")

    def _drag(self, path: Sequence[Point], button: int, duration: float) -> None:
        if len(path) > 1:
            self._move(path[0])
        elif path:  # only the end is given: the drag starts where the pointer is
            at = self._display.screen().root.query_pointer()
            path = (Point(at.root_x / self._size[0], at.root_y / self._size[1]), *path)
        seconds = duration / max(1, len(path) - 1)
        steps = max(DRAG_STEPS, round(seconds / DRAG_PAUSE_SECONDS))
        self._fake(X.ButtonPress, button)
        for start, end in pairwise(path):
            for step in range(1, steps + 1):
                share = step / steps
                between = Point(start.x + (end.x - start.x) * share, start.y + (end.y - start.y) * share)
                self._move(between if step < steps else end)
                self._display.sync()
                time.sleep(max(DRAG_SECONDS, seconds / steps))
        self._fake(X.ButtonRelease, button)

    def _notches(self, button: int, count: int) -> None:
        for _ in range(min(count, MOST_NOTCHES)):
            self._fake(X.ButtonPress, button)
            self._fake(X.ButtonRelease, button)

    # ---- keyboard ----

    def _chord(self, names: Sequence[str], mode: str) -> None:
        keys = [key for name in names if (key := self._key(keysym_of_name(name))) is not None]
        codes = list(self._with_shift(keys))
        if mode in ("press", "down"):
            for code in codes:
                self._fake(X.KeyPress, code)
        if mode in ("press", "up"):
            for code in reversed(codes):
                self._fake(X.KeyRelease, code)

    def _with_shift(self, keys: Sequence[tuple[int, bool]]) -> Iterator[int]:
        """Shift goes down before the first key that needs it, unless the chord already has it."""
        held = any(code == self._shift for code, _ in keys)
        for code, shifted in keys:
            if shifted and not held:
                held = True
                yield self._shift
            yield code

    def _press(self, keysym: int) -> None:
        key = self._key(keysym)
        if key is not None:
            codes = list(self._with_shift([key]))
            for code in codes:
                self._fake(X.KeyPress, code)
            for code in reversed(codes):
                self._fake(X.KeyRelease, code)

    def _key(self, keysym: int) -> tuple[int, bool] | None:
        """The key that has the keysym, which a spare one gets if none does; None if that is impossible."""
        if not keysym or not (self._spare or self._borrowed or keysym in self._codes):
            return None
        if keysym not in self._codes:
            if not self._spare:
                self._display.sync()
                time.sleep(REMAP_SECONDS)
                self._spare = list(self._borrowed.values())
                for old in self._borrowed:
                    del self._codes[old]
                self._borrowed = {}
            code = self._spare.pop(0)
            self._display.change_keyboard_mapping(code, [(keysym, keysym)])
            self._display.sync()
            self._borrowed[keysym] = code
            self._codes[keysym] = (code, False)
        return self._codes[keysym]

    def _fake(self, kind: int, detail: int) -> None:
        xtest.fake_input(self._display, kind, detail)
