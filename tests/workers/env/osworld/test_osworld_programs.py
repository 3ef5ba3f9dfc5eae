"""Actions as the programs that OSWorld's own agents write."""

from __future__ import annotations

import ast

import pytest

from dart.core.action import (
    Action,
    Button,
    Click,
    Code,
    Drag,
    Keys,
    Move,
    Observe,
    Point,
    Scroll,
    System,
    TypeText,
    Wait,
)
from dart.testing import ACTIONS
from dart.workers.env.osworld.programs import Typing, program

SCREEN = (1920, 1080)
MIDDLE, CORNER = Point(0.5, 0.5), Point(0.123456, 0.999)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Click(MIDDLE), "pyautogui.click(960.0, 540.0, button='left')"),
        (Click(CORNER, "right"), "pyautogui.click(237.036, 1078.92, button='right')"),
        (Click(MIDDLE, count=2), "pyautogui.doubleClick(960.0, 540.0, button='left')"),
        (Click(None, count=3), "pyautogui.tripleClick(button='left')"),
        (Click(None, count=4), "pyautogui.click(button='left', clicks=4)"),
        (
            Click(MIDDLE, modifiers=("Control_L", "Shift_L")),
            "pyautogui.keyDown('ctrl')\npyautogui.keyDown('shift')\npyautogui.click(960.0, 540.0, button='left')\n"
            "pyautogui.keyUp('shift')\npyautogui.keyUp('ctrl')",
        ),
        (Move(MIDDLE), "pyautogui.moveTo(960.0, 540.0)"),
        (Button(MIDDLE, "middle"), "pyautogui.moveTo(960.0, 540.0)\npyautogui.mouseDown(button='middle')"),
        (Button(None, mode="up"), "pyautogui.mouseUp(button='left')"),
        (
            Drag((MIDDLE, CORNER)),
            "pyautogui.moveTo(960.0, 540.0)\npyautogui.dragTo(237.036, 1078.92, duration=1.0)",
        ),
        (
            Click(MIDDLE, hold_seconds=1.5),
            "pyautogui.mouseDown(960.0, 540.0, button='left')\ntime.sleep(1.5)\npyautogui.mouseUp(button='left')",
        ),
        (
            Drag((MIDDLE, CORNER), duration_seconds=3.0),
            "pyautogui.moveTo(960.0, 540.0)\npyautogui.dragTo(237.036, 1078.92, duration=3.0)",
        ),
        (Drag((MIDDLE,), "right"), "pyautogui.dragTo(960.0, 540.0, duration=0.5, button='right')"),
        (Scroll(MIDDLE, 0, 5), "pyautogui.scroll(-5, x=960.0, y=540.0)"),
        (Scroll(None, -3, -5), "pyautogui.scroll(5)\npyautogui.hscroll(-3)"),
        (Scroll(None, 10**6, -(2**31)), "pyautogui.scroll(100)\npyautogui.hscroll(100)"),
        (Scroll(MIDDLE), ""),
        (Keys(("Control_L", "c")), "pyautogui.hotkey('ctrl', 'c')"),
        (Keys(("Return",)), "pyautogui.hotkey('enter')"),
        (Keys(("Alt_L", "F4"), "up"), "pyautogui.keyUp('f4')\npyautogui.keyUp('alt')"),
        (Keys(("comma", "space", "Page_Down")), "pyautogui.hotkey(',', ' ', 'pagedown')"),
        (Code("python", "print(1)"), "print(1)"),
        (Code("bash", "reboot"), ""),
        (Wait(3.0), ""),
        (Observe(), ""),
        (System("home"), ""),
    ],
)
def test_programs(action: Action, words: str) -> None:
    assert program(action, SCREEN, "clipboard") == words


@pytest.mark.parametrize("text", ["it's", 'say "hi"', "back\\slash", "two\nlines", "café", "'); import os; ('"])
def test_text_is_a_literal_whatever_is_in_it(text: str) -> None:
    tree = ast.parse(program(TypeText(text), SCREEN, "clipboard"))
    copied = [
        call.args[0] for call in ast.walk(tree) if isinstance(call, ast.Call) and "copy" in ast.unparse(call.func)
    ]
    assert [ast.literal_eval(argument) for argument in copied] == [text]
    typed = ast.parse(program(TypeText(text), SCREEN, "keyboard"))
    assert [ast.literal_eval(call.args[0]) for call in ast.walk(typed) if isinstance(call, ast.Call)] == [text]


def test_a_line_break_at_the_end_is_the_key() -> None:
    assert program(TypeText("ls\n"), SCREEN, "clipboard").endswith("\npyautogui.press('enter')")
    assert program(TypeText("\n"), SCREEN, "clipboard") == "pyautogui.press('enter')"


def test_less_than_is_a_chord() -> None:
    assert program(TypeText("<a<"), SCREEN, "keyboard") == (
        "pyautogui.hotkey('shift', ',')\npyautogui.typewrite('a')\npyautogui.hotkey('shift', ',')"
    )


@pytest.mark.parametrize("typing", ["clipboard", "keyboard"])
def test_every_action_is_a_program_that_python_reads(typing: Typing) -> None:
    for action in ACTIONS:
        ast.parse("import time; " + program(action, SCREEN, typing))
