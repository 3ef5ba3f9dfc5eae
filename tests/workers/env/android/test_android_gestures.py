"""Actions as command lines, key codes, and the accessibility tree as text: no device."""

from __future__ import annotations

import re
import shlex

import pytest

from dart.agent.keys import KEYSYMS
from dart.core.action import (
    Action,
    Button,
    Click,
    Drag,
    Keys,
    Move,
    Observe,
    Point,
    Scroll,
    System,
    TypeText,
    Wait,
    pointer_after,
)
from dart.core.action_json import kind_of
from dart.testing import ACTIONS as EVERY_KIND
from dart.workers.env.android.gestures import ACTIONS, MIDDLE, Hands, Named, Refused
from dart.workers.env.android.keycodes import codes_of
from dart.workers.env.android.tree import text_of

PIXEL = Hands((1080, 2400))


def written(action: Action, last: Point = MIDDLE, hands: Hands = PIXEL) -> list[str]:
    commands = hands.commands(action, last)
    assert not isinstance(commands, Named)
    return commands


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (Click(Point(0.25, 0.5)), ["input tap 270 1200"]),
        (Click(None), ["input tap 540 1200"]),
        (Click(Point(0.5, 0.5), count=2), ["input tap 540 1200; input tap 540 1200"]),
        (Click(Point(0.5, 0.5), hold_seconds=1.5), ["input swipe 540 1200 540 1200 1500"]),
        (Click(Point(0.5, 0.5), hold_seconds=60), ["input swipe 540 1200 540 1200 5000"]),
        (Drag((Point(0.1, 0.1), Point(0.9, 0.9))), ["input swipe 108 240 972 2160 300"]),
        (Drag((Point(0.9, 0.9),), duration_seconds=2), ["input swipe 540 1200 972 2160 2000"]),
        (
            Drag((Point(0.0, 0.0), Point(0.5, 0.0), Point(0.5, 0.5)), duration_seconds=1),
            [
                "input motionevent DOWN 0 0; sleep 0.500; input motionevent MOVE 540 0; sleep 0.500; "
                "input motionevent MOVE 540 1200; input motionevent UP 540 1200"
            ],
        ),
        (Scroll(Point(0.5, 0.5), dy=3), ["input swipe 540 1200 540 480 500"]),
        (Scroll(Point(0.5, 0.5), dy=-3), ["input swipe 540 1200 540 1920 500"]),
        (Scroll(Point(0.5, 0.5), dx=2), ["input swipe 540 1200 324 1200 500"]),
        (Scroll(Point(0.5, 0.5), dy=50), ["input swipe 540 1200 540 120 500"]),
        (Scroll(None), []),
        (Keys(("Return",)), ["input keyevent KEYCODE_ENTER"]),
        (Keys(("Control_L", "a")), ["input keycombination KEYCODE_CTRL_LEFT KEYCODE_A"]),
        (Keys(("question",)), ["input keycombination KEYCODE_SHIFT_LEFT KEYCODE_SLASH"]),
        (System("back"), ["input keyevent KEYCODE_BACK"]),
        (System("app_switch"), ["input keyevent KEYCODE_APP_SWITCH"]),
        (System("volume_up"), ["input keyevent KEYCODE_VOLUME_UP"]),
        (System("open_app", "com.a.b"), ["monkey -p com.a.b -c android.intent.category.LAUNCHER 1"]),
        (System("open_app", "com.a.b/.Main"), ["am start -n com.a.b/.Main"]),
        (System("open_url", "https://a/b?c=d&e='f'"), ["am start -a android.intent.action.VIEW -d "
                                                       + shlex.quote("https://a/b?c=d&e='f'")]),
        (Move(Point(0.1, 0.1)), []),
        (Observe(), []),
        (Wait(1.0), []),
    ],
)  # fmt: skip
def test_an_action_as_command_lines(action: Action, expected: list[str]) -> None:
    assert written(action) == expected


@pytest.mark.parametrize(
    "action",
    [
        Click(MIDDLE, "right"), Click(MIDDLE, modifiers=("Control_L",)), Drag((MIDDLE, MIDDLE), "middle"),
        Keys(("F13",)), Keys(("Control_L", "NoSuchKey")), Keys(("a",), "down"), Keys(()), TypeText("é"),
        TypeText("日本"),
        TypeText("\x1b"), System("open_url", "file:///x"), System("open_url", "; reboot"),
        Scroll(Point(0.5, 0.99), dy=-3),
    ],
)  # fmt: skip
def test_what_a_touch_screen_cannot_do_is_refused_whole(action: Action) -> None:
    with pytest.raises(Refused):
        PIXEL.commands(action, MIDDLE)


@pytest.mark.parametrize(("width", "height"), [(1080, 2400), (1440, 3120), (720, 1600), (800, 1280), (333, 777)])
def test_every_pixel_of_the_screen_is_hit_exactly(width: int, height: int) -> None:
    hands = Hands((width, height))
    assert [hands.pixel(Point(x / width, 0.0))[0] for x in range(width)] == list(range(width))
    assert [hands.pixel(Point(0.0, y / height))[1] for y in range(height)] == list(range(height))
    assert hands.pixel(Point(1 - 1e-12, 1 - 1e-12)) <= (width, height)


def typed(text: str) -> str:
    """What Android makes of the command lines: `%s` is a space, keys are characters."""
    result = ""
    for line in written(TypeText(text)):
        for command in line.split(" && "):
            words = shlex.split(command)
            assert words[:2] in (["input", "text"], ["input", "keyevent"])
            (said,) = words[2:]
            keys = {"KEYCODE_ENTER": "\n", "KEYCODE_TAB": "\t"}
            result += keys[said] if words[1] == "keyevent" else re.sub(r"%s", " ", said)
    return result


@pytest.mark.parametrize(
    "text",
    [
        "hello", "two words", "  spaces   inside and at the end  ", "it's \"quoted\" \\ `x` $HOME", 
        "100%sure %s %%s % s",
        "a\nb\tc\n", "-n --help", "x" * 350, " ".join(["word"] * 2000), "<>|&;()#*?[]~{}!^=+", "   ", "",
    ],
)  # fmt: skip
def test_text_arrives_as_it_was_written(text: str) -> None:
    assert typed(text) == text
    assert all(len(line) < 4096 for line in written(TypeText(text)))


def test_text_for_the_keyboard_app_is_in_base64() -> None:
    (line,) = written(TypeText("é\n日本"), hands=Hands((10, 10), "adb_keyboard"))
    assert line == (
        "am broadcast -a ADB_INPUT_B64 --es msg w6k= && input keyevent KEYCODE_ENTER && "
        "am broadcast -a ADB_INPUT_B64 --es msg 5pel5pys"
    )


def test_apps_are_opened_by_the_users_names_and_the_rest_is_left_to_the_server() -> None:
    hands = Hands((10, 10), apps={"Notes": "com.example.notes", "Clock": "com.a/com.a.Main"})
    assert hands.commands(System("open_app", "notes "), MIDDLE) == [
        "monkey -p com.example.notes -c android.intent.category.LAUNCHER 1"
    ]
    assert hands.commands(System("open_app", "CLOCK"), MIDDLE) == ["am start -n com.a/com.a.Main"]
    for name in ("Calendar", "$(reboot)", "com.a; reboot", ""):
        assert hands.commands(System("open_app", name), MIDDLE) == Named(name)


def test_an_action_without_a_place_is_where_the_last_one_was() -> None:
    place = pointer_after(Move(Point(0.25, 0.5)), MIDDLE)
    assert written(Click(None), place) == ["input tap 270 1200"]
    assert pointer_after(Drag((MIDDLE, Point(0.1, 0.1))), place) == Point(0.1, 0.1)
    assert pointer_after(Click(None), place) == place == pointer_after(TypeText("x"), place)


def test_the_kinds_that_are_offered_are_those_that_are_written() -> None:
    kinds = {kind_of(action) for action in EVERY_KIND}
    assert kinds - ACTIONS == {"button", "code"}
    assert PIXEL.commands(Button(MIDDLE), MIDDLE) == []  # never sent: the env worker observes instead


def test_every_key_that_a_grammar_names_is_pressed_or_refused_with_its_name() -> None:
    refused = set()
    for keysym in KEYSYMS:
        try:
            assert codes_of((keysym,))
        except LookupError as error:
            refused.add(error.args[0])
    assert refused == {f"F{number}" for number in range(13, 25)}


TREE = """UI hierchary dumped<?xml version='1.0'?><hierarchy rotation="0">
<node class="android.widget.FrameLayout" text="" bounds="[0,0][10,20]">
<node class="android.widget.Button" text="A &amp; B" content-desc="go" resource-id="com.x:id/go" clickable="true"
 enabled="false" bounds="[1,2][3,4]"><node class="android.widget.TextView" text="in" bounds="[1,2][2,3]"/></node>
</node></hierarchy>"""


def test_the_tree_has_a_line_for_each_element_that_says_or_does_something() -> None:
    assert text_of(TREE) == 'Button "A & B" (go) #go [1,2][3,4] clickable disabled\n  TextView "in" [1,2][2,3]'


@pytest.mark.parametrize(
    "text", ["", "ERROR: could not get idle state.", "<hierarchy", "<hierarchy><node></hierarchy>"]
)
def test_what_is_no_tree_is_empty(text: str) -> None:
    assert text_of(text) == ""


def test_a_tree_that_expands_without_end_is_not_read() -> None:
    entities = '<!ENTITY a0 "x">' + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 50}">' for n in range(1, 9))
    assert text_of(f'<!DOCTYPE h [{entities}]><hierarchy><node text="&a8;"/></hierarchy>') == ""
