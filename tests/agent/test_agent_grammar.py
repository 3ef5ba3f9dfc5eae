"""Strict grammars: real outputs of both model families, malformed ones, round trips, and arbitrary text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dart.agent.grammar import Grammar, ParseError, make_grammar, smart_resize
from dart.agent.keys import KEYSYMS, keysym_of, name_of
from dart.agent.ui_tars import SCROLL_NOTCHES, WAIT_SECONDS
from dart.config import Agent
from dart.core.action import (
    Action,
    Button,
    Click,
    Code,
    Drag,
    Finish,
    Keys,
    Move,
    Observe,
    Point,
    Scroll,
    System,
    TypeText,
    Wait,
)
from dart.errors import UserError

SCREEN = (1920, 1080)
UI_TARS = make_grammar(Agent(read="strict"))  # 1920×1080 is seen as 1932×1092
UI_TARS_1_0 = make_grammar(Agent(read="strict", coordinates="thousand"))
MINIMAL = make_grammar(
    Agent(read="strict", prompt="minimal", resize_multiple=32, min_pixels=32 * 32, max_pixels=1_000_000)
)
QWEN = make_grammar(Agent(read="strict", grammar="qwen3_vl", prompt="qwen3_vl"))
GRAMMARS = pytest.mark.parametrize(
    "grammar", [UI_TARS, UI_TARS_1_0, MINIMAL, QWEN], ids=["ui_tars", "ui_tars_1_0", "minimal", "qwen3_vl"]
)


def at(x: float, y: float) -> Point:
    return Point(x / 1932, y / 1092)


# ---- the resize rule ----


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((1920, 1080), (28, 78_400, 12_845_056), (1932, 1092)),  # 68.57 → 69, 38.57 → 39 times 28
        ((160, 210), (32, 1_024, 1_000_000), (160, 224)),  # 6.56 → 7 times 32
        ((160, 210), (28, 78_400, 12_845_056), (252, 336)),  # × √(78400 / 33600) = 1.5275: 8.73 → 9, 11.46 → 12
        ((3840, 2160), (28, 3_136, 1_003_520), (1316, 728)),  # ÷ √8.265 = 2.8749: 47.70 → 47, 26.83 → 26
        ((42, 70), (28, 1, 1_000_000), (56, 56)),  # 1.5 and 2.5 both round to the even 2
        ((1, 1), (28, 1, 1_000_000), (28, 28)),
    ],
)
def test_resize(size: tuple[int, int], limits: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert smart_resize(*size, *limits) == expected


@pytest.mark.parametrize("size", [(0, 10), (10, 2001)])
def test_resize_refuses_what_the_model_refuses(size: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=f"{size[0]}x{size[1]} pixels"):
        smart_resize(*size, 28, 1, 1_000_000)


# ---- UI-TARS ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thought: I will click on Save.\nAction: click(start_box='(966,546)')", Click(Point(0.5, 0.5))),
        ("Action: click(start_box='<|box_start|>(100,200)<|box_end|>')", Click(at(100, 200))),
        ("Action: click(start_box='(045,007)')", Click(at(45, 7))),
        ("Action: click(start_box='(100,200,300,401)')", Click(at(200, 300.5))),
        ("Action: click(point='<point>510 150</point>')", Click(at(510, 150))),
        ('Action: left_double(start_box="(1, 2)")', Click(at(1, 2), count=2)),
        ("Action: right_single(start_box='(0,0)')", Click(Point(0, 0), "right")),
        ("Action: click(start_box='(1931,1091)')", Click(at(1931, 1091))),
        ("Action: drag(start_box='(1,2)', end_box='(3,4)')", Drag((at(1, 2), at(3, 4)))),
        (
            "Action: drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')",
            Drag((at(1, 2), at(3, 4))),
        ),
        ("Action: hotkey(key='ctrl c')", Keys(("Control_L", "c"))),
        ("Action: hotkey(key='ctrl shift T')", Keys(("Control_L", "Shift_L", "t"))),
        ("Action: hotkey(key='pagedown')", Keys(("Page_Down",))),
        ("Action: hotkey(key='ctrl +')", Keys(("Control_L", "plus"))),
        ("Thought: Type it.\nAction: type(content='hello world\\n')", TypeText("hello world\n")),
        (r"Action: type(content='it\'s \"C:\\new\"')", TypeText('it\'s "C:\\new"')),
        ("Action: type(content='def f():\n\treturn (1)')", TypeText("def f():\n\treturn (1)")),
        ("Action: type(content='')", TypeText("")),
        ("Action: type(content='Action: wait()')", TypeText("Action: wait()")),
        ("Action: scroll(start_box='(0,0)', direction='down')", Scroll(Point(0, 0), dy=SCROLL_NOTCHES)),
        ("Action: scroll(direction='left', start_box='(0,0)')", Scroll(Point(0, 0), dx=-SCROLL_NOTCHES)),
        ("Action: wait()", Wait(WAIT_SECONDS)),
        ("Action: finished()", Finish()),
        ("Action: finished(content='42')", Finish(answer="42")),
        ("Thought: Stuck.\n\nAction: call_user()\n<|im_end|>", Finish("call_user")),
    ],
)
def test_ui_tars_reads(text: str, expected: Action) -> None:
    assert UI_TARS.read(text, *SCREEN) == (expected, ())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "no_action"),
        ("Thought: only this", "no_action"),
        ("Action:", "no_action"),
        ("click(start_box='(1,2)')", "no_action"),
        ("I think.\nAction: wait()", "leading_text"),
        ("Action: 12", "unknown_action"),
        ("Action: tap(start_box='(1,2)')", "unknown_action"),
        ("Action: __import__('os')", "unknown_action"),
        ("Action: wait", "truncated"),
        ("Action: click(", "truncated"),
        ("Action: click(start_box=", "truncated"),
        ("Action: click(start_box='(1,2)", "truncated"),
        ("Action: click(start_box='(1,2)'", "truncated"),
        ("Action: type(content='a\\", "truncated"),
        ("Action: click()", "bad_arguments"),
        ("Action: click('(1,2)')", "bad_arguments"),
        ("Action: click(start_box=(1,2))", "bad_arguments"),
        ("Action: click(start_box='1,2')", "bad_arguments"),
        ("Action: click(start_box='(1,2,3)')", "bad_arguments"),
        ("Action: click(start_box='(-1,2)')", "bad_arguments"),
        ("Action: click(start_box='(1.5,2)')", "bad_arguments"),
        ("Action: click(start_box='(١,2)')", "bad_arguments"),
        ("Action: click(start_box='<|box_start|>(1,2)')", "bad_arguments"),
        ("Action: click(start_box='(1,2)', start_box='(1,2)')", "bad_arguments"),
        ("Action: click(start_box='(1,2)', point='(1,2)')", "bad_arguments"),
        ("Action: click(start_box='(1,2)', button='left')", "bad_arguments"),
        ("Action: click(start_box='(1,2)' ,)", "bad_arguments"),
        ("Action: drag(start_box='(1,2)')", "bad_arguments"),
        ("Action: scroll(start_box='(1,2)', direction='sideways')", "bad_arguments"),
        ("Action: scroll(direction='down')", "bad_arguments"),
        ("Action: hotkey(key='')", "bad_arguments"),
        ("Action: hotkey(key='ctrl+c')", "bad_arguments"),
        ("Action: hotkey(key='ctrl blue')", "bad_arguments"),
        ("Action: type(content='it's')", "bad_arguments"),
        ("Action: type(content='\\q')", "bad_arguments"),
        ("Action: wait(seconds='5')", "bad_arguments"),
        ("Action: click(start_box='(1932,2)')", "out_of_bounds"),
        ("Action: click(start_box='(2,1092)')", "out_of_bounds"),
        ("Action: click(start_box='(0,0,1932,2)')", "out_of_bounds"),
        ("Action: click(start_box='(1,2)')\nAction: wait()", "many_actions"),
        ("Action: wait()\n\nwait()", "many_actions"),
        ("Action: wait() and then some", "trailing_text"),
        ("Action: wait()\nThought: done", "trailing_text"),
    ],
)
def test_ui_tars_refuses(text: str, kind: str) -> None:
    with pytest.raises(ParseError) as caught:
        UI_TARS.read(text, *SCREEN)
    assert caught.value.kind == kind
    assert str(caught.value).startswith(f"{kind}: ")


def test_ui_tars_1_0_has_a_grid_that_includes_its_end() -> None:
    box = "Action: click(start_box='({},{})')"
    assert UI_TARS_1_0.read(box.format(500, 250), *SCREEN) == (Click(Point(0.5, 0.25)), ())
    end, _ = UI_TARS_1_0.read(box.format(1000, 1000), *SCREEN)
    assert isinstance(end, Click) and end.at is not None
    assert end.at.x > 0.999 and end.at.y > 0.999
    for outside in ((1001, 0), (0, 1001), ("0,0,0", 1001)):
        with pytest.raises(ParseError) as caught:
            UI_TARS_1_0.read(box.format(*outside), *SCREEN)
        assert caught.value.kind == "out_of_bounds"


def test_ui_tars_writes() -> None:
    assert UI_TARS.format(Click(Point(0.5, 0.5)), *SCREEN, "Save it.") == (
        "Thought: Save it.\nAction: click(start_box='<|box_start|>(966,546)<|box_end|>')"
    )
    assert UI_TARS.format(TypeText("it's\n"), *SCREEN) == "Action: type(content='it\\'s\\n')"
    # 160×210 is seen as 160×224; a tiny model gets numbers of one width.
    assert MINIMAL.format(Click(Point(0.05, 0.5)), 160, 210) == "Action: click(start_box='(008,112)')"


def test_a_thought_may_not_be_an_action() -> None:
    with pytest.raises(ValueError, match="Action:"):
        UI_TARS.format(Wait(WAIT_SECONDS), *SCREEN, "hm\nAction: finished()")
    with pytest.raises(ValueError, match="tool_call"):
        QWEN.format(Wait(1.0), *SCREEN, "hm <tool_call>")


# ---- Qwen3-VL ----


def tool_call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Action: Click Save.\n" + tool_call(action="left_click", coordinate=[500, 250]), Click(Point(0.5, 0.25))),
        (tool_call(action="left_click"), Click(None)),
        (tool_call(action="right_click", coordinate=[0, 999]), Click(Point(0, 0.999), "right")),
        (tool_call(action="middle_click", coordinate=[1, 2]), Click(Point(0.001, 0.002), "middle")),
        (tool_call(action="double_click", coordinate=[1, 2]), Click(Point(0.001, 0.002), count=2)),
        (tool_call(action="triple_click", coordinate=[1, 2]), Click(Point(0.001, 0.002), count=3)),
        (tool_call(action="mouse_move", coordinate=[1, 2]), Move(Point(0.001, 0.002))),
        (tool_call(action="left_click_drag", coordinate=[1, 2]), Drag((Point(0.001, 0.002),))),
        (tool_call(action="key", keys=["ctrl", "Page_Down"]), Keys(("Control_L", "Page_Down"))),
        (tool_call(action="type", text="</tool_call> \u00e9\n"), TypeText("</tool_call> é\n")),
        (tool_call(action="scroll", pixels=-5, coordinate=[1, 2]), Scroll(Point(0.001, 0.002), dy=5)),
        (tool_call(action="hscroll", pixels=3), Scroll(None, dx=3)),
        (tool_call(action="wait", time=1.5), Wait(1.5)),
        (tool_call(action="wait", time=2), Wait(2.0)),
        (tool_call(action="terminate", status="success") + "<|im_end|>", Finish("success")),
        (tool_call(action="terminate", status="failure"), Finish("fail")),
        (tool_call(action="answer", text="42"), Finish("success", "42")),
        (tool_call(action="left_click").replace("\n", "  "), Click(None)),
    ],
)
def test_qwen3_vl_reads(text: str, expected: Action) -> None:
    assert QWEN.read(text, *SCREEN) == (expected, ())


CLICK = tool_call(action="left_click", coordinate=[1, 2])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "no_action"),
        ("I am done.", "no_action"),
        (CLICK.removesuffix("</tool_call>"), "truncated"),
        (CLICK[:-3], "truncated"),
        (CLICK[:40], "truncated"),
        ("<tool_call>", "truncated"),
        ("<tool_call>{'name': 1}</tool_call>", "bad_json"),
        (CLICK.replace("[1, 2]", "[1, NaN]"), "bad_json"),
        (CLICK.replace("[1, 2]", '[1, 2], "action": "wait"'), "bad_json"),
        (CLICK.replace("[1, 2]", f"[1, {'9' * 5000}]"), "bad_json"),
        ("<tool_call>" + "[" * 100_000, "bad_json"),
        ("<tool_call>[]</tool_call>", "bad_arguments"),
        (CLICK.replace('"name"', '"tool"'), "bad_arguments"),
        (CLICK.replace("computer_use", "mobile_use"), "unknown_action"),
        (tool_call(coordinate=[1, 2]), "bad_arguments"),
        (tool_call(action=["left_click"]), "bad_arguments"),
        (tool_call(action="screenshot"), "unknown_action"),
        (tool_call(action="mouse_move"), "bad_arguments"),
        (tool_call(action="left_click", coordinate=None), "bad_arguments"),
        (tool_call(action="left_click", coordinate=[1]), "bad_arguments"),
        (tool_call(action="left_click", coordinate=[1.5, 2]), "bad_arguments"),
        (tool_call(action="left_click", coordinate=[True, 2]), "bad_arguments"),
        (tool_call(action="left_click", coordinate="1, 2"), "bad_arguments"),
        (tool_call(action="left_click", coordinate=[1, 2], text="ctrl"), "bad_arguments"),
        (tool_call(action="left_click", coordinate=[1000, 2]), "out_of_bounds"),
        (tool_call(action="left_click", coordinate=[1, -2]), "out_of_bounds"),
        (tool_call(action="left_click", coordinate=[10**400, 2]), "out_of_bounds"),
        (tool_call(action="key", keys="ctrl"), "bad_arguments"),
        (tool_call(action="key", keys=[]), "bad_arguments"),
        (tool_call(action="key", keys=["ctrl+c"]), "bad_arguments"),
        (tool_call(action="type", text=1), "bad_arguments"),
        (tool_call(action="type", text="\ud800"), "bad_arguments"),
        (tool_call(action="scroll", pixels="5"), "bad_arguments"),
        (tool_call(action="scroll", pixels=2**31), "out_of_bounds"),
        (tool_call(action="wait", time=-1), "out_of_bounds"),
        (tool_call(action="wait", time=10**400), "out_of_bounds"),
        (CLICK.replace('"left_click", "coordinate": [1, 2]', '"wait", "time": 1e999'), "out_of_bounds"),
        (tool_call(action="wait", time="1"), "bad_arguments"),
        (tool_call(action="terminate", status="done"), "bad_arguments"),
        (tool_call(action="terminate", status=[]), "bad_arguments"),
        (CLICK + CLICK, "many_actions"),
        (CLICK + "\nDone.", "trailing_text"),
        (CLICK.replace("\n</tool_call>", ";\n</tool_call>"), "trailing_text"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_qwen3_vl_refuses(text: str, kind: str) -> None:
    with pytest.raises(ParseError) as caught:
        QWEN.read(text, *SCREEN)
    assert caught.value.kind == kind


# ---- both ----

FRACTIONS = st.floats(0.0, 1.0, exclude_max=True)
POINTS = st.builds(Point, FRACTIONS, FRACTIONS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.sampled_from(KEYSYMS)
BUTTONS = st.sampled_from(["left", "middle", "right"])
ACTIONS = st.one_of(
    st.builds(Move, POINTS),
    st.builds(
        Click,
        st.none() | POINTS,
        BUTTONS,
        st.integers(1, 3),
        st.just(()) | st.just(("Shift_L",)),
    ),
    st.builds(Button, POINTS),
    st.builds(Drag, st.lists(POINTS, min_size=1, max_size=3).map(tuple), BUTTONS),
    st.builds(Scroll, st.none() | POINTS, st.sampled_from([-5, 0, 5]), st.integers(-6, 6)),
    st.builds(Keys, st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.sampled_from(["press", "down", "up"])),
    st.builds(TypeText, TEXTS),
    st.builds(Wait, st.just(WAIT_SECONDS) | st.floats(0, 100)),
    st.builds(Observe),
    st.builds(Finish, st.sampled_from(["success", "fail", "infeasible", "call_user"]), st.just("") | TEXTS),
    st.just(System("home")),
    st.just(Code("python", "pass")),
)
SIZES = st.tuples(st.integers(100, 4000), st.integers(100, 4000))


# What each grammar can write, told apart from its code.
def ui_tars_can_write(action: Action) -> bool:
    match action:
        case Click(where, button, count, modifiers):
            known = (button, count) in {("left", 1), ("left", 2), ("right", 1)}
            return where is not None and known and not modifiers
        case Drag(path, button):
            return len(path) == 2 and button == "left"
        case Scroll(where, dx, dy):
            return where is not None and sorted((abs(dx), abs(dy))) == [0, SCROLL_NOTCHES]
        case Keys(_, mode):
            return mode == "press"
        case Wait(seconds):
            return seconds == WAIT_SECONDS
        case Finish(status, answer):
            return status == "success" or (status == "call_user" and not answer)
        case _:
            return isinstance(action, TypeText)


def qwen3_vl_can_write(action: Action) -> bool:
    match action:
        case Click(_, button, count, modifiers):
            return not modifiers and (count == 1 or button == "left")
        case Drag(path, button):
            return len(path) == 1 and button == "left"
        case Scroll(_, dx, dy):
            return not (dx and dy)
        case Keys(_, mode):
            return mode == "press"
        case Finish(status, answer):
            return status == "success" or (status == "fail" and not answer)
        case _:
            return isinstance(action, Move | TypeText | Wait)


def without_points(action: Action) -> tuple[str, list[Point]]:
    """The action as text with its points cut out, and the points."""
    match action:
        case Move(where):
            return "Move", [where]
        case Click(where, button, count, modifiers):
            return f"{where is None} {button} {count} {modifiers}", [where] if where else []
        case Drag(path, button):
            return f"Drag {button}", list(path)
        case Scroll(where, dx, dy):
            return f"{where is None} {dx} {dy}", [where] if where else []
        case _:
            return repr(action), []


def grid(grammar: Grammar, size: tuple[int, int]) -> tuple[int, int]:
    if grammar is UI_TARS:
        return smart_resize(*size, 28, 100 * 28 * 28, 16384 * 28 * 28)
    return smart_resize(*size, 32, 32 * 32, 1_000_000) if grammar is MINIMAL else (1000, 1000)


@GRAMMARS
@settings(deadline=None)  # a busy machine is no error
@given(action=ACTIONS, size=SIZES, thought=st.sampled_from(["", "I see (1,2).", "Ünï 'quoted'"]))
def test_round_trip(grammar: Grammar, action: Action, size: tuple[int, int], thought: str) -> None:
    can_write = qwen3_vl_can_write if grammar is QWEN else ui_tars_can_write
    if not can_write(action):
        with pytest.raises(ValueError, match="cannot be written"):
            grammar.format(action, *size, thought)
        return
    text = grammar.format(action, *size, thought)
    read, _ = grammar.read(text, *size)
    before, after = without_points(action), without_points(read)
    assert before[0] == after[0]
    columns, rows = grid(grammar, size)
    for written, found in zip(before[1], after[1], strict=True):
        # Half a cell, or a whole one at the far edge, where half up would be outside.
        assert abs(written.x - found.x) * columns <= (0.5 if found.x < 1 - 1 / columns else 1) + 1e-6
        assert abs(written.y - found.y) * rows <= (0.5 if found.y < 1 - 1 / rows else 1) + 1e-6
    # What was read is on the grid: writing it again loses nothing.
    assert grammar.format(read, *size, thought) == text


PIECES = st.sampled_from(
    [
        "Thought: ", "\n", "Action: ", "Action:", "click", "type", "drag", "hotkey", "(", ")", "start_box", "content",
        "=", "'", '"', "\\", ",", "(1,2)", "<|box_start|>", "<point>1 2</point>", "wait()", "<|im_end|>", "<tool_call>",
        "</tool_call>", '{"name": "computer_use", "arguments": {', "}}", '"action": "', 'left_click"',
        ', "coordinate":', "[", "1", "-", "9" * 30, "]", "1e999", "\\ud800", "null", "\x00", "🙂",
    ]
)  # fmt: skip


@GRAMMARS
@settings(deadline=None)  # a busy machine is no error
@given(text=st.text() | st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join))
@example(text="Action: click(start_box='(1,2)')\x1c")
def test_any_text_is_an_action_or_a_parse_error(grammar: Grammar, text: str) -> None:
    try:
        action, _ = grammar.read(text, *SCREEN)
    except ParseError as error:
        assert error.kind
    else:
        assert grammar.format(action, *SCREEN)


# ---- keys ----


def test_every_keysym_has_a_name_that_reads_back() -> None:
    assert len(KEYSYMS) > 100
    for keysym in KEYSYMS:
        assert keysym_of(name_of(keysym) or "") == keysym
        assert keysym_of(keysym) == keysym


@pytest.mark.parametrize(
    ("name", "keysym"),
    [
        ("ENTER", "Return"),
        ("page_up", "Page_Up"),
        ("A", "a"),
        (" ", "space"),
        ("_", "underscore"),
        ("f12", "F12"),
        ("num5", "5"),
        ("add", "plus"),
    ],
)
def test_key_names(name: str, keysym: str) -> None:
    assert keysym_of(name) == keysym


@pytest.mark.parametrize("name", ["", "nokey", "é", "ab", "__"])
def test_no_key(name: str) -> None:
    assert keysym_of(name) is None
