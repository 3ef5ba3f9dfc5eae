"""Canonical actions → DevTools input commands: pure, no browser."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.agent import keys as names
from dart.core import action as a
from dart.workers.env import keyboard
from dart.workers.env.inputs import PAUSE, InputDevices

POINTS = st.builds(a.Point, st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
BUTTONS = st.sampled_from(["left", "middle", "right"])
KEYSYMS = st.lists(st.sampled_from(["Control_L", "Shift_L", "a", "A", "Return", "plus", "F5", "nonsense"])).map(tuple)
ACTIONS = st.one_of(
    st.builds(a.Move, POINTS),
    st.builds(a.Click, st.none() | POINTS, BUTTONS, st.integers(1, 3), KEYSYMS, st.floats(0, 60)),
    st.builds(a.Drag, st.lists(POINTS, max_size=4).map(tuple), BUTTONS, st.floats(0, 60)),
    st.builds(a.Scroll, st.none() | POINTS, st.integers(-5, 5), st.integers(-5, 5)),
    st.builds(a.Keys, KEYSYMS),
    st.builds(a.TypeText, st.text()),
    st.builds(a.Wait, st.floats(0, 9)),
    st.builds(a.Finish),
    st.builds(a.System, st.sampled_from(["back", "open_url"])),
    st.builds(a.Code, st.just("js"), st.just("alert(1)")),
)


def keys(*actions: a.Action) -> list[tuple[str, str, int, str]]:
    devices = InputDevices((160, 210))
    calls = [call for action in actions for call in devices.calls(action)]
    return [(c["type"], c["key"], c["modifiers"], c.get("text", "")) for _, c in calls]


def test_a_click_is_move_press_release_at_pixels() -> None:
    calls = InputDevices((160, 210)).calls(a.Click(a.Point(0.5, 0.1)))
    assert [(c["type"], c["x"], c["y"], c["button"], c["buttons"]) for _, c in calls] == [
        ("mouseMoved", 80, 21, "none", 0),
        ("mousePressed", 80, 21, "left", 1),
        ("mouseReleased", 80, 21, "left", 0),
    ]


def test_a_double_click_counts_and_an_unplaced_one_stays_where_the_pointer_is() -> None:
    devices = InputDevices((100, 100))
    devices.calls(a.Move(a.Point(0.25, 0.75)))
    calls = devices.calls(a.Click(None, "right", 2))
    assert [(c["type"], c["x"], c["y"], c["clickCount"]) for _, c in calls] == [
        ("mousePressed", 25, 75, 1),
        ("mouseReleased", 25, 75, 1),
        ("mousePressed", 25, 75, 2),
        ("mouseReleased", 25, 75, 2),
    ]


def test_places_and_the_pointer_are_in_what_is_shown_now() -> None:
    devices = InputDevices((1000, 800))
    devices.calls(a.Move(a.Point(0.9, 0.9)))
    devices.resize(200, 100)  # a popup
    first, *_, last = devices.calls(a.Drag((a.Point(0.5, 0.5),)))
    assert [(c["x"], c["y"]) for _, c in (first, last)] == [(199, 99), (100, 50)]


def test_a_drag_moves_with_the_button_held_and_ends_at_the_last_point() -> None:
    calls = [c for _, c in InputDevices((100, 100)).calls(a.Drag((a.Point(0.1, 0.1), a.Point(0.5, 0.9))))]
    assert [c["type"] for c in calls] == ["mouseMoved", "mousePressed", *["mouseMoved"] * 4, "mouseReleased"]
    assert {c["buttons"] for c in calls[1:-1]} == {1}
    assert (calls[-1]["x"], calls[-1]["y"], calls[-1]["buttons"]) == (50, 90, 0)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (a.TypeText("a"), [("keyDown", "a", 0, "a"), ("keyUp", "a", 0, "")]),
        (
            a.TypeText("A"),
            [
                ("rawKeyDown", "Shift", 8, ""),
                ("keyDown", "A", 8, "A"),
                ("keyUp", "A", 8, ""),
                ("keyUp", "Shift", 0, ""),
            ],
        ),
        (a.TypeText("\n"), [("keyDown", "Enter", 0, "\r"), ("keyUp", "Enter", 0, "")]),
        (
            a.Keys(("Control_L", "a")),
            [
                ("rawKeyDown", "Control", 2, ""),
                ("rawKeyDown", "a", 2, ""),
                ("keyUp", "a", 2, ""),
                ("keyUp", "Control", 0, ""),
            ],
        ),
        (
            a.Keys(("Shift_L", "1")),
            [
                ("rawKeyDown", "Shift", 8, ""),
                ("keyDown", "!", 8, "!"),
                ("keyUp", "!", 8, ""),
                ("keyUp", "Shift", 0, ""),
            ],
        ),
        (
            a.Keys(("Control_L", "Shift_L", "a")),
            [
                ("rawKeyDown", "Control", 2, ""),
                ("rawKeyDown", "Shift", 10, ""),
                ("rawKeyDown", "A", 10, ""),
                ("keyUp", "A", 10, ""),
                ("keyUp", "Shift", 2, ""),
                ("keyUp", "Control", 0, ""),
            ],
        ),
        (a.Keys(("no_such_key",)), []),
    ],
)
def test_keys(action: a.Action, expected: list[tuple[str, str, int, str]]) -> None:
    assert keys(action) == expected


def test_a_character_that_no_key_types_is_inserted() -> None:
    assert InputDevices((10, 10)).calls(a.TypeText("é")) == [("Input.insertText", {"text": "é"})]


def test_a_modifier_held_down_counts_for_the_click_that_follows() -> None:
    devices = InputDevices((100, 100))
    devices.calls(a.Keys(("Shift_L",), "down"))
    assert {c["modifiers"] for _, c in devices.calls(a.Click(a.Point(0, 0)))} == {8}
    devices.calls(a.Keys(("Shift_L",), "up"))
    assert {c["modifiers"] for _, c in devices.calls(a.Click(a.Point(0, 0)))} == {0}


def test_a_long_press_holds_the_button_and_no_longer_than_is_allowed() -> None:
    for most, held in ((10.0, 1.5), (0.5, 0.5)):
        calls = InputDevices((100, 100), most).calls(a.Click(None, modifiers=("Shift_L",), hold_seconds=1.5))
        assert [c.get("type") or c for _, c in calls] == [
            "rawKeyDown", "mousePressed", {"seconds": held}, "mouseReleased", "keyUp",
        ]  # fmt: skip


@pytest.mark.parametrize("duration", [0.3, 2.0, 60.0])
def test_a_drag_takes_its_time_and_passes_every_point(duration: float) -> None:
    path = tuple(a.Point(x, y) for x, y in ((0.1, 0.1), (0.9, 0.1), (0.9, 0.9), (0.1, 0.9)))
    calls = InputDevices((100, 100)).calls(a.Drag(path, duration_seconds=duration))
    pauses = [c["seconds"] for method, c in calls if method == PAUSE]
    assert sum(pauses) == pytest.approx(duration) and len(pauses) <= 200
    moves = [(c["x"], c["y"]) for method, c in calls if method != PAUSE and c["type"] == "mouseMoved"]
    assert [(x, y) for x, y in moves if (x, y) in {(10, 10), (90, 10), (90, 90), (10, 90)}] == [
        (10, 10), (90, 10), (90, 90), (10, 90),
    ]  # fmt: skip


def test_every_key_that_a_grammar_knows_is_on_the_keyboard() -> None:
    assert [name for name in names.KEYSYMS if keyboard.of_keysym(name) is None] == []
    assert keys(a.Keys(("F24",))) == [("rawKeyDown", "F24", 0, ""), ("keyUp", "F24", 0, "")]
    assert keys(a.Keys(("Num_Lock",))) == [("rawKeyDown", "NumLock", 0, ""), ("keyUp", "NumLock", 0, "")]


def test_a_key_that_it_does_not_have_is_refused_by_name() -> None:
    refused = InputDevices.refused
    assert refused(a.Keys(("Control_L", "XF86Copy"))) == "the keyboard has no key XF86Copy"
    assert refused(a.Click(None, modifiers=("Hyper_L",))) == "the keyboard has no key Hyper_L"
    assert refused(a.Keys(("Control_L", "c"))) == refused(a.Wait(1.0)) == ""


@given(st.lists(ACTIONS, max_size=6))
def test_what_is_pressed_is_let_go_and_inside(actions: list[a.Action]) -> None:
    devices = InputDevices((160, 210))
    pressed = 0
    for action in actions:
        for method, c in devices.calls(action):
            if method == "Input.dispatchMouseEvent":
                assert 0 <= c["x"] < 160 and 0 <= c["y"] < 210
                pressed += {"mousePressed": 1, "mouseReleased": -1}.get(c["type"], 0)
        assert pressed == 0
    last = devices.calls(a.Click(None))[-1][1]
    assert (last["buttons"], last["modifiers"]) == (0, 0)
