"""Canonical actions → DevTools input commands, as a mouse and a keyboard would make them. No I/O.

An `InputDevices` keeps what real devices keep: where the pointer is, which buttons and modifier keys are held. Where a
person would wait in the middle of an action, there is a command PAUSE with the seconds, which DevTools does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dart.core.action import Action, Button, Click, Drag, Keys, Move, Point, Scroll, TypeText
from dart.workers.env import keyboard

Call = tuple[str, Mapping[str, object]]

_BUTTON_BITS = {"left": 1, "right": 2, "middle": 4}
NOTCH_PIXELS = 53  # how far Chromium on Linux scrolls for one notch of the wheel
DRAG_STEPS = 4  # moves between two points of a drag: pages start to drag only after a few
DRAG_MOVE_SECONDS = 0.05  # between two moves of a drag that takes its time
MOST_DRAG_MOVES = 200
PAUSE = "dart.pause"


class InputDevices:
    """The mouse and keyboard of one page."""

    def __init__(self, viewport: tuple[int, int], most_seconds: float = math.inf) -> None:
        """`most_seconds`: the longest that a button is held or a drag takes; what asks for more gets this."""
        self._viewport, self._most_seconds = viewport, most_seconds
        self._pointer = (viewport[0] / 2, viewport[1] / 2)
        self._buttons = 0
        self._modifiers = 0

    def resize(self, width: int, height: int) -> None:
        """What is pointed at is now this large; the pointer stays on it."""
        x, y = self._pointer
        self._viewport, self._pointer = (width, height), (min(x, width - 1), min(y, height - 1))

    @staticmethod
    def refused(action: Action) -> str:
        """Why nothing of the action can be carried out: a key that the keyboard does not have. Empty if it can."""
        match action:
            case Keys(keysyms=names) | Click(modifiers=names):
                unknown = [name for name in names if keyboard.of_keysym(name) is None]
                return f"the keyboard has no key {', '.join(unknown)}" if unknown else ""
            case _:
                return ""

    def calls(self, action: Action) -> list[Call]:
        """The commands that carry out the action; empty for an action that is not input (wait, finish, …)."""
        match action:
            case Move(at):
                return list(self._move(at))
            case Click(at, button, count, modifiers, hold):
                return list(self._click(at, button, count, modifiers, hold))
            case Button(at, button, mode):
                moved = list(self._move(at)) if at is not None else []
                return [*moved, self._press(button, 1) if mode == "down" else self._let_go(button, 1)]
            case Drag(path, button, duration):
                return list(self._drag(path, button, duration))
            case Scroll(at, dx, dy):
                return list(self._scroll(at, dx, dy))
            case Keys(keysyms, mode):
                return list(self._chord(keysyms, mode))
            case TypeText(text):
                return [call for character in text for call in self._character(character)]
            case _:
                return []

    # ---- mouse ----

    def _move(self, at: Point) -> Iterator[Call]:
        self._pointer = at.pixels(*self._viewport)
        button = next((name for name, bit in _BUTTON_BITS.items() if self._buttons & bit), "none")
        yield self._mouse("mouseMoved", button=button)

    def _press(self, button: str, count: int) -> Call:
        self._buttons |= _BUTTON_BITS[button]
        return self._mouse("mousePressed", button=button, clickCount=count)

    def _let_go(self, button: str, count: int) -> Call:
        self._buttons &= ~_BUTTON_BITS[button]
        return self._mouse("mouseReleased", button=button, clickCount=count)

    def _pause(self, seconds: float) -> list[Call]:
        return [(PAUSE, {"seconds": seconds})] if seconds > 0 else []

    def _click(
        self, at: Point | None, button: str, count: int, modifiers: Sequence[str], hold: float
    ) -> Iterator[Call]:
        yield from self._chord(modifiers, "down")
        if at is not None:
            yield from self._move(at)
        for number in range(1, max(1, min(count, 3)) + 1):
            yield self._press(button, number)
            yield from self._pause(min(hold, self._most_seconds))
            yield self._let_go(button, number)
        yield from self._chord(modifiers, "up")

    def _drag(self, path: Sequence[Point], button: str, duration: float) -> Iterator[Call]:
        if not path:
            return
        if len(path) == 1:  # only the end is given: the drag starts where the pointer is
            (x, y), (width, height) = self._pointer, self._viewport
            path = (Point(x / width, y / height), *path)
        seconds, parts = min(duration, self._most_seconds), len(path) - 1
        moves = min(MOST_DRAG_MOVES // parts, math.ceil(seconds / DRAG_MOVE_SECONDS / parts))
        steps = max(DRAG_STEPS, moves)
        yield from self._move(path[0])
        yield self._press(button, 1)
        for start, end in pairwise(path):
            for step in range(1, steps + 1):
                share = step / steps
                yield from self._pause(seconds / parts / steps)
                yield from self._move(
                    Point(start.x + (end.x - start.x) * share, start.y + (end.y - start.y) * share)
                    if step < steps
                    else end
                )
        yield self._let_go(button, 1)

    def _scroll(self, at: Point | None, dx: int, dy: int) -> Iterator[Call]:
        if at is not None:
            yield from self._move(at)
        if dx or dy:
            yield self._mouse("mouseWheel", deltaX=dx * NOTCH_PIXELS, deltaY=dy * NOTCH_PIXELS)

    def _mouse(self, kind: str, **parameters: object) -> Call:
        x, y = self._pointer
        base = {"type": kind, "x": x, "y": y, "buttons": self._buttons, "modifiers": self._modifiers}
        return "Input.dispatchMouseEvent", {**base, **parameters}

    # ---- keyboard ----

    def _chord(self, keysyms: Sequence[str], mode: str) -> Iterator[Call]:
        keys = [key for name in keysyms if (key := keyboard.of_keysym(name)) is not None]
        if mode in ("press", "down"):
            for key in keys:
                yield from self._key_down(self._as_held(key))
        if mode in ("press", "up"):
            for key in reversed(keys):
                yield from self._key_up(self._as_held(key))

    def _as_held(self, key: keyboard.Key) -> keyboard.Key:
        return keyboard.with_shift(key) if self._modifiers & keyboard.SHIFT else key

    def _character(self, character: str) -> Iterator[Call]:
        key = keyboard.of_character(character)
        if key is None:  # no key types it: insert it as an input method would
            yield "Input.insertText", {"text": character}
            return
        yield from self._key_down(key)
        yield from self._key_up(key)

    def _key_down(self, key: keyboard.Key) -> Iterator[Call]:
        self._modifiers |= key.modifier
        if key.shifted and not self._modifiers:
            yield self._key("rawKeyDown", keyboard.SHIFT_KEY, keyboard.SHIFT)
        modifiers = self._modifiers | (keyboard.SHIFT if key.shifted else 0)
        types = key.text and not modifiers & (keyboard.CONTROL | keyboard.ALT | keyboard.META)
        yield self._key("keyDown" if types else "rawKeyDown", key, modifiers, key.text if types else "")

    def _key_up(self, key: keyboard.Key) -> Iterator[Call]:
        self._modifiers &= ~key.modifier
        yield self._key("keyUp", key, self._modifiers | (keyboard.SHIFT if key.shifted else 0))
        if key.shifted and not self._modifiers:
            yield self._key("keyUp", keyboard.SHIFT_KEY, 0)

    def _key(self, kind: str, key: keyboard.Key, modifiers: int, text: str = "") -> Call:
        parameters: dict[str, object] = {
            "type": kind,
            "key": key.key,
            "code": key.code,
            "windowsVirtualKeyCode": key.virtual,
            "nativeVirtualKeyCode": key.virtual,
            "modifiers": modifiers,
        }
        if text:
            parameters |= {"text": text, "unmodifiedText": text}
        return "Input.dispatchKeyEvent", parameters


def is_key(parameters: Mapping[str, object], key: str) -> bool:
    """Whether a command's parameters are those of pressing the key."""
    return parameters.get("type") in ("keyDown", "rawKeyDown") and parameters.get("key") == key


def during_drag(call: Call, dragged: Mapping[str, object] | None) -> Call:
    """The command, or what it is while something is dragged, when there are no events of the mouse."""
    _, parameters = call
    kind = {"mouseMoved": "dragOver", "mouseReleased": "drop"}.get(str(parameters.get("type")))
    kind = "dragCancel" if is_key(parameters, "Escape") else kind
    if dragged is None or kind is None:
        return call
    place = {name: parameters.get(name, 0) for name in ("x", "y", "modifiers")}
    return "Input.dispatchDragEvent", {"type": kind, "data": dragged, **place}
