"""Actions as the pyautogui programs that OSWorld's own agents write for them, in pixels of the screen.

The words are those of OSWorld's agent for UI-TARS (a double click is `doubleClick`, a drag takes a second, coordinates
have three decimals), so that a recorded action does what OSWorld's agent would have done. Where only its agent for Qwen
has an action (a drag from where the pointer is, keys held and released), the words are that agent's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from dart.core.action import Action, Button, Click, Code, Drag, Keys, Move, Point, Scroll, TypeText
from dart.workers.env.keyboard import of_keysym

log = logging.getLogger(__name__)
Typing = Literal["clipboard", "keyboard"]
DRAG_SECONDS, DRAG_FROM_HERE_SECONDS = 1.0, 0.5
ACTIONS = frozenset({"move", "click", "button", "drag", "scroll", "keys", "type_text", "wait", "observe", "code"})

_NAMES = {
    "Control_L": "ctrl", "Control_R": "ctrlright", "Shift_L": "shift", "Shift_R": "shiftright", "Alt_L": "alt",
    "Alt_R": "altright", "Super_L": "win", "Super_R": "winright", "Meta_L": "win", "Meta_R": "winright",
    "Return": "enter", "KP_Enter": "enter", "Escape": "esc", "Tab": "tab", "BackSpace": "backspace",
    "Delete": "delete", "Insert": "insert", "Home": "home", "End": "end", "Page_Up": "pageup", "Prior": "pageup",
    "Page_Down": "pagedown", "Next": "pagedown", "Left": "left", "Right": "right", "Up": "up", "Down": "down",
    "Caps_Lock": "capslock", "Num_Lock": "numlock", "Scroll_Lock": "scrolllock", "Print": "printscreen",
    "Pause": "pause", "Menu": "apps", "space": " ",
    **{f"F{number}": f"f{number}" for number in range(1, 25)},
}  # fmt: skip
"""pyautogui's names of the keysyms."""
MOST_NOTCHES = 100
"""Of a wheel in one step. pyautogui turns them one by one, and OSWorld's server ends a program after two minutes, so
that without a limit a policy could make its attempt void."""
_CLICKS = {1: "click", 2: "doubleClick", 3: "tripleClick"}


def program(action: Action, screen: tuple[int, int], typing: Typing) -> str:
    """The program, without OSWorld's prelude; empty if there is nothing to run. `screen`: width and height."""

    def at(point: Point) -> str:
        x, y = point.pixels(*screen)
        return f"{round(x, 3)}, {round(y, 3)}"

    def moved(point: Point | None) -> list[str]:
        return [f"pyautogui.moveTo({at(point)})"] if point else []

    match action:
        case Move(point):
            return f"pyautogui.moveTo({at(point)})"
        case Click():
            return _click(action, f"{at(action.at)}, " if action.at else "")
        case Button(point, button, mode):
            return _lines([*moved(point), f"pyautogui.mouse{mode.capitalize()}(button={button!r})"])
        case Drag():
            return _drag(action, [at(point) for point in action.path])
        case Scroll(point, dx, dy):
            x_y = "" if point is None else ", x={}, y={}".format(*at(point).split(", "))
            down, right = (max(-MOST_NOTCHES, min(notches, MOST_NOTCHES)) for notches in (dy, dx))
            vertical = [f"pyautogui.scroll({-down}{x_y})"] if down else []
            return _lines([*vertical, *([f"pyautogui.hscroll({right}{x_y})"] if right else [])])
        case Keys(keysyms, mode):
            return _keys([_name(keysym) for keysym in keysyms], mode)
        case TypeText(text):
            return _pasted(text) if typing == "clipboard" else _typed(text)
        case Code("python" | "pyautogui", source):
            return source
        case _:
            return ""


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines)


def _click(action: Click, at: str) -> str:
    held = [_name(keysym) for keysym in action.modifiers]
    counted = f", clicks={action.count}" if action.count not in _CLICKS else ""
    press = f"pyautogui.{_CLICKS.get(action.count, 'click')}({at}button={action.button!r}{counted})"
    if action.hold_seconds:
        button = f"button={action.button!r}"
        press = f"pyautogui.mouseDown({at}{button})\ntime.sleep({action.hold_seconds})\npyautogui.mouseUp({button})"
    down, up = (f"pyautogui.key{way}({{!r}})" for way in ("Down", "Up"))
    return _lines([*(down.format(key) for key in held), press, *(up.format(key) for key in reversed(held))])


def _drag(action: Drag, path: Sequence[str]) -> str:
    button = "" if action.button == "left" else f", button={action.button!r}"
    if len(path) == 1:
        return f"pyautogui.dragTo({path[0]}, duration={action.duration_seconds or DRAG_FROM_HERE_SECONDS}{button})"
    duration = action.duration_seconds or DRAG_SECONDS
    start, *others = path
    if len(others) == 1:
        return _lines([f"pyautogui.moveTo({start})", f"pyautogui.dragTo({others[0]}, duration={duration}{button})"])
    seconds = round(duration / len(others), 3)
    return _lines(
        [
            f"pyautogui.moveTo({start})",
            f"pyautogui.mouseDown(button={action.button!r})",
            *(f"pyautogui.moveTo({point}, duration={seconds})" for point in others),
            f"pyautogui.mouseUp(button={action.button!r})",
        ]
    )


def _keys(names: Sequence[str], mode: str) -> str:
    if mode == "press":
        return f"pyautogui.hotkey({', '.join(map(repr, names))})"
    ordered = names if mode == "down" else list(reversed(names))
    return _lines([f"pyautogui.key{mode.capitalize()}({name!r})" for name in ordered])


def _name(keysym: str) -> str:
    """pyautogui's name of a keysym. It presses nothing for one that it does not know."""
    if named := _NAMES.get(keysym):
        return named
    key = of_keysym(keysym)
    if key is None or not key.text:
        log.warning("pyautogui has no key %s: nothing is pressed for it", keysym)
        return keysym
    return key.text


def _pasted(text: str) -> str:
    """By way of the clipboard. A line break at the end is the key, as in OSWorld's agent.

    The program's output is closed first: xclip, which pyperclip starts, lives on with it until something else is
    copied, and the server would wait for that.
    """
    body = text.rstrip("\n")
    quiet = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 1); os.dup2(1, 2)"
    paste = [quiet, "import pyperclip", f"pyperclip.copy({body!r})", "pyautogui.hotkey('ctrl', 'v')", "time.sleep(0.5)"]
    return _lines([*(paste if body else []), *(["pyautogui.press('enter')"] if body != text else [])])


def _typed(text: str) -> str:
    """Key by key. `<` is pressed as a chord, as OSWorld does, because pyautogui types `>` for it."""
    lines: list[str] = []
    for place, part in enumerate(text.split("<")):
        lines += ["pyautogui.hotkey('shift', ',')"] if place else []
        lines += [f"pyautogui.typewrite({part!r})"] if part else []
    return _lines(lines)
