"""Reference reading: what each rule accepts, what stays refused, and that strict text is read alike."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.agent.grammar import Grammar, ParseError, declared_rules, make_grammar
from dart.agent.qwen3_vl import CALLS
from dart.agent.rules.rule import EDGE
from dart.agent.rules.ui_tars_text import KNOWN
from dart.agent.ui_tars import SCROLL_NOTCHES, WAIT_SECONDS
from dart.config import Agent
from dart.core.action import (
    Action,
    Click,
    Drag,
    Finish,
    Keys,
    Move,
    Observe,
    Point,
    Scroll,
    Several,
    System,
    TypeText,
    Wait,
)
from dart.wire.convert import action_to_proto
from tests.agent.test_agent_grammar import ACTIONS, MINIMAL, PIECES, SIZES

SCREEN = (1920, 1080)
CONFIGS = {
    "ui_tars": Agent(),  # 1920×1080 is seen as 1932×1092
    "thousand": Agent(coordinates="thousand"),
    "qwen3_vl": Agent(grammar="qwen3_vl", prompt="qwen3_vl"),
}
REFERENCE = {name: make_grammar(agent) for name, agent in CONFIGS.items()}
TOGETHER = {name: make_grammar(agent.model_copy(update={"actions_per_step": 3})) for name, agent in CONFIGS.items()}
STRICT = {name: make_grammar(agent.model_copy(update={"read": "strict"})) for name, agent in CONFIGS.items()}
BOTH = pytest.mark.parametrize("name", list(CONFIGS))


def at(x: float, y: float) -> Point:
    return Point(x / 1932, y / 1092)


def call(**arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


# Positions and keys are those of the reference parsers: x / 1932 and y / 1092 of the screen, or a thousandth of it.
UI_TARS: list[tuple[str, Action, str]] = [
    ("Thought: Save. Action: click(start_box='(1,2)')", Click(at(1, 2)), "one-line"),
    ("  Action: wait()", Wait(WAIT_SECONDS), "one-line"),
    ("Thought: a\nAction: click(start_box='(1,2)')\nAction: wait()", Wait(WAIT_SECONDS), "last-action"),
    ("Reflection: Hm.\nAction_Summary: Wait.\nAction: wait()", Wait(WAIT_SECONDS), "reflection"),
    ("Action_Summary: Wait.\nAction: wait()", Wait(WAIT_SECONDS), "reflection"),
    ("I wait.\nAction: wait()", Wait(WAIT_SECONDS), "no-thought"),
    (r"Action: type(content='\d+\t')", TypeText("\\d+\t"), "escapes"),
    (r"Action: type(content='\x41\u00e9\101\r')", TypeText("AéA\r"), "escapes"),
    (r"Action: type(content='\x27\x5c')", TypeText("'\\"), "escapes"),
    ("Action: wait() # for the page", Wait(WAIT_SECONDS), "comment"),
    ("Action: click(start_box='(1,2)'", Click(at(1, 2)), "missing-parenthesis"),
    ("Action: wait(", Wait(WAIT_SECONDS), "missing-parenthesis"),
    ("Action: click(point='<point>1 2</point>'", Click(at(1, 2)), "missing-parenthesis"),
    ("Action: click(point='<point>1 2</point>", Click(at(1, 2)), "missing-quote"),
    ('Action: click(start_box="<|box_start|>(1,2)<|box_end|>)', Click(at(1, 2)), "missing-quote"),
    (
        "Action: drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>",
        Drag((at(1, 2), at(3, 4))),
        "missing-quote",
    ),
    ("Action: wait(5)", Wait(WAIT_SECONDS), "python-arguments"),
    ("Action: wait(time=5)", Wait(WAIT_SECONDS), "python-arguments extra-argument"),
    ("Action: wait(time=5", Wait(WAIT_SECONDS), "python-arguments missing-parenthesis extra-argument"),
    ("Action: wait(5)\n\nhotkey(key=5)", Wait(WAIT_SECONDS), "python-arguments first-action"),
    ("Action: click(start_box='(1,2)', start_box='(3,4)')", Click(at(3, 4)), "python-arguments"),
    ("Action: click(point='<point>1 2</point>', start_box='(3,4)')", Click(at(3, 4)), "python-arguments"),
    ("Action: type(content='x=5, (', n=1, 'b')", TypeText("x=5, (', n=1, 'b"), "quotes"),
    ("Action: hotkey(key=5)", Keys(("5",)), "python-arguments"),
    ("Action: long_press(start_box='(1,2)', time=2)", Click(at(1, 2), hold_seconds=2.0), "python-arguments long-press"),
    ("Action: type('hello')", Observe(), "python-arguments nothing-to-do"),
    ("Action: click(start_box='(1,2)' , )", Click(at(1, 2)), "trailing-comma"),
    ("Action: finished(content='It\\'s done, I've saved it.')", Finish(answer="It's done, I've saved it."), "quotes"),
    ("Action: type(content='it's fine')", TypeText("it's fine"), "quotes"),
    ("Action: type(content='print('a')\n')", TypeText("print('a')\n"), "quotes"),
    ('Action: type(content="say "hi" to it\'s")', TypeText('say "hi" to it\'s'), "quotes"),
    ("Action: hotkey(key='shift')\nclick(start_box='(1,2)')", Keys(("Shift_L",)), "first-action"),
    ("Action: type(content='a')\n\nhotkey(key='enter')\n\nwait()", TypeText("a"), "first-action"),
    ("Action: type(content='it's')\n\nhotkey(key='enter')", TypeText("it's"), "quotes first-action"),
    ("Action: left_single(start_box='(1,2)')", Click(at(1, 2)), "left-single"),
    ("Action: select(start_box='(1,2)', end_box='(3,4)')", Drag((at(1, 2), at(3, 4))), "select"),
    ("Action: hotkey(hotkey='ctrl c')", Keys(("Control_L", "c")), "key-argument"),
    ("Action: press(press='enter')", Keys(("Return",)), "key-argument press"),
    ("Action: hotkey(key='ctrl+c')", Keys(("Control_L", "c")), "key-plus"),
    ("Action: hotkey()", Observe(), "nothing-to-do"),
    ("Action: press(key=' ')", Observe(), "nothing-to-do"),
    ("Action: scroll(start_box='(1,2)', direction='')", Observe(), "nothing-to-do"),
    ("Action: drag(start_box='(1,2)')", Observe(), "nothing-to-do"),
    ("Action: hotkey(key='ctrl++')", Keys(("Control_L", "plus")), "key-plus"),
    ("Action: hotkey(key='ctrl blue')", Keys(("Control_L",)), "unknown-key"),
    ("Action: hotkey(key='ctrl+blue')", Keys(("Control_L",)), "key-plus unknown-key"),
    ("Action: hotkey(key='page down')", Keys(("Down",)), "unknown-key"),
    ("Action: hotkey(key='XF86AudioMute')", Observe(), "unknown-key"),
    ("Action: press(key='page down')", Observe(), "unknown-key"),
    ("Action: keydown(key='KP_Add')", Observe(), "unknown-key"),
    ("Action: click(start_box='(1,2)', key='blue')", Click(at(1, 2)), "unknown-key"),
    (
        "Action: click(start_box='(1,2)', key='ctrl+blue')",
        Click(at(1, 2), modifiers=("Control_L",)),
        "unknown-key held-keys",
    ),
    ("Action: scroll(start_box='(1,2)', direction='Down')", Scroll(at(1, 2), dy=SCROLL_NOTCHES), "direction"),
    ("Action: scroll(start_box='(1,2)', direction='page up')", Scroll(at(1, 2), dy=-SCROLL_NOTCHES), "direction"),
    ("Action: click(start_box='1,2')", Click(at(1, 2)), "loose-box"),
    ("Action: click(start_box='(1.5,2.25)')", Click(at(1.5, 2.25)), "loose-box"),
    ("Action: click(start_box='(1,2')", Click(at(1, 2)), "loose-box"),
    ("Action: click(start_box='<|box_start|>(1,2)')", Click(at(1, 2)), "loose-box"),
    ("Action: click(start_box='(1.5,2,2.5,4)')", Click(at(2, 3)), "loose-box"),
    ("Action: click(start_box='(1940,2)')", Click(Point(EDGE, 2 / 1092)), "screen-edge"),
    ("Action: click(point='<point>3 1092</point>')", Click(Point(3 / 1932, EDGE)), "screen-edge"),
    ("Action: click(start_box='(0,0,1940,4)')", Click(at(970, 2)), "screen-edge"),
    ("Action: click(start_box='(-3,2)')", Click(at(0, 2)), "loose-box screen-edge"),
    ("Action: wait(seconds='5')", Wait(WAIT_SECONDS), "extra-argument"),
    ("Action: scroll(direction='down')", Scroll(None, dy=SCROLL_NOTCHES), "scroll-place"),
    ("Action: scroll(start_box='', direction='Up')", Scroll(None, dy=-SCROLL_NOTCHES), "direction scroll-place"),
    ("Action: hover(start_box='(1,2)')", Move(at(1, 2)), "hover"),
    ("Action: long_press(start_box='(1,2)')", Click(at(1, 2), hold_seconds=1.0), "long-press"),
    ("Action: long_press(start_box='(1,2)', time='')", Click(at(1, 2), hold_seconds=1.0), "long-press"),
    ("Action: long_press(start_box='(1,2)', duration='2.5')", Click(at(1, 2), hold_seconds=2.5), "long-press"),
    (
        "Action: drag(start_box='(1,2)', end_box='(3,4)', duration='0.5')",
        Drag((at(1, 2), at(3, 4)), duration_seconds=0.5),
        "drag-duration",
    ),
    (
        "Action: select(start_box='(1,2)', end_box='(3,4)', duration='')",
        Drag((at(1, 2), at(3, 4))),
        "select drag-duration",
    ),
    (
        "Action: click(start_box='(1,2)', key='ctrl+shift')",
        Click(at(1, 2), modifiers=("Control_L", "Shift_L")),
        "held-keys",
    ),
    ("Action: press(key='enter')", Keys(("Return",)), "press"),
    ("Action: keydown(key='shift')", Keys(("Shift_L",), "down"), "keydown"),
    ("Action: release(key='shift')", Keys(("Shift_L",), "up"), "keyup"),
    ("Action: keyup(key='arrowleft')", Keys(("Left",), "up"), "keyup"),
    ("Action: open_app(app_name='Maps')", System("open_app", "Maps"), "open-app"),
    ("Action: press_home()", System("home"), "phone-button"),
    ("Action: press_back()", System("back"), "phone-button"),
    ("Action: press_enter()", Keys(("Return",)), "phone-button"),
    (
        "Save it. Action: hover(start_box='1,2'",
        Move(at(1, 2)),
        "one-line no-thought missing-parenthesis loose-box hover",
    ),
]
CLICK = call(action="left_click", coordinate=[1, 2])
CLICKED = Click(Point(0.001, 0.002))
QWEN: list[tuple[str, Action, str]] = [
    ("I click.\n" + CLICK.split("\n")[1], CLICKED, "no-tag"),
    (CLICK.split("\n", 1)[1], CLICKED, "no-tag"),
    (CLICK.removesuffix("</tool_call>"), CLICKED, "unclosed-tag"),
    (CLICK[:-3], CLICKED, "unclosed-tag"),
    (f"{CLICK}\n{call(action='wait', time=1)}", CLICKED, "first-call"),
    (f"{CLICK}\nI have clicked.", CLICKED, "trailing-text"),
    (f"I use a <tool_call> to click.\n</think>\n{CLICK}", CLICKED, "mentioned-tag"),
    (f"No <tool_call>.\n{CLICK}\n{call(action='wait', time=1)}", CLICKED, "mentioned-tag first-call"),
    (CLICK.replace('{"name"', '{"id": 1, "name"'), CLICKED, "other-names"),
    (CLICK.replace('{"name"', '{"name": "x", "type": "function", "name"'), CLICKED, "other-names"),
    ('{"a": 1}\n' + CLICK.split("\n")[1].replace('{"name"', '{"id": 1, "name"'), CLICKED, "no-tag other-names"),
    (call(action="key", keys=[]), Observe(), "unknown-key"),
    (call(action="left_click", coordinate=[1, 2], keys=[]), CLICKED, "unknown-key"),
    (call(action="scroll", pixels=-2.5), Scroll(None, dy=2), "fractions"),
    (call(action="left_click", coordinate=[1000, 2]), Click(Point(EDGE, 0.002)), "grid-edge"),
    (call(action="left_click", coordinate=[1.5, -2]), Click(Point(0.0015, 0.0)), "grid-edge"),
    (call(action="left_click", coordinate=[500.5, 2]), Click(Point(0.5005, 0.002)), "fractions"),
    (call(action="scroll", pixels=-5.0), Scroll(None, dy=5), "fractions"),
    (call(action="scroll", pixels=-5.0, coordinate=[1.5, 2]), Scroll(Point(0.0015, 0.002), dy=5), "fractions"),
    (call(action="terminate"), Finish("success"), "status"),
    *(
        (call(action="terminate", status=status), Finish("success"), "status")
        for status in ("done", "fail", "Failure", "", None, 7, ["failure"])
    ),
    (call(action="wait", duration=3), Wait(3.0), "duration"),
    (call(action="wait"), Wait(WAIT_SECONDS), "time"),
    (call(action="wait", time="long"), Wait(WAIT_SECONDS), "time"),
    (call(action="key", keys="enter"), Keys(("Return",)), "key-text"),
    (call(action="key", keys=["ctrl+c"]), Keys(("Control_L", "c")), "key-plus"),
    (call(action="key", keys="ctrl+c"), Keys(("Control_L", "c")), "key-text key-plus"),
    (call(action="key", keys=["ctrl + c"]), Keys(("Control_L", "c")), "key-plus"),
    (call(action="key", keys=["ctrl+]"]), Keys(("Control_L", "bracketright")), "key-plus"),
    (call(action="key", keys=[" ctrl", "c"]), Keys(("Control_L", "c")), "key-remnants"),
    (call(action="key", keys=["keys=[ctrl", "c]"]), Keys(("Control_L", "c")), "key-remnants"),
    (call(action="key", keys=["['ctrl'", "'c']"]), Keys(("Control_L", "c")), "key-remnants"),
    (call(action="key", keys=["ctrl+volumeup"]), Keys(("Control_L",)), "key-plus unknown-key"),
    (call(action="key", keys=["page down"]), Observe(), "unknown-key"),
    (call(action="left_click", coordinate=[1, 2], keys=["blue"]), CLICKED, "unknown-key"),
    (call(action="wait", time=1, text="loading"), Wait(1.0), "extra-argument"),
    (
        call(action="left_click_drag", coordinate=[1, 2], duration=1),
        Drag((Point(0.001, 0.002),), duration_seconds=1.0),
        "drag-duration",
    ),
    (call(action="long_press", coordinate=[1, 2]), Click(Point(0.001, 0.002), hold_seconds=1.0), "long-press"),
    (call(action="long_press", coordinate=[1, 2], time=2), Click(Point(0.001, 0.002), hold_seconds=2.0), "long-press"),
    (
        call(action="double_click", coordinate=[1, 2], keys=["ctrl"]),
        Click(Point(0.001, 0.002), count=2, modifiers=("Control_L",)),
        "held-keys",
    ),
]
TABLE = [("ui_tars", *row) for row in UI_TARS] + [("qwen3_vl", *row) for row in QWEN]


UI_TARS_VERBS = {
    "click": Click(at(1, 2)), "left_single": Click(at(1, 2)), "left_double": Click(at(1, 2), count=2),
    "right_single": Click(at(1, 2), "right"), "hover": Move(at(1, 2)), "long_press": Click(at(1, 2), hold_seconds=1.0),
    "scroll": Scroll(at(1, 2), dy=SCROLL_NOTCHES), "drag": Drag((at(1, 2), at(3, 4))),
    "select": Drag((at(1, 2), at(3, 4))),
}  # fmt: skip
STARTS, ENDS = ("start_box", "point", "start_point"), ("end_box", "end_point")
BOXES = ("({},{})", "<|box_start|>({},{})<|box_end|>", "<point>{} {}</point>")


@pytest.mark.parametrize("verb", UI_TARS_VERBS)
def test_every_spelling_of_a_place_is_read_alike_by_every_action_of_ui_tars(verb: str) -> None:
    for start, end, box, quote, extra, close in itertools.product(
        STARTS, ENDS, BOXES, "'\"", ("", ", speed=2", ", speed='fast'"), (")", "", ",)", ") # so")
    ):
        arguments = [f"{start}={quote}{box.format(1, 2)}{quote}"]
        arguments += [f"{end}={quote}{box.format(3, 4)}{quote}"] if isinstance(UI_TARS_VERBS[verb], Drag) else []
        arguments += ["direction='down'"] if verb == "scroll" else []
        text = f"Action: {verb}({', '.join(arguments)}{extra}{close}"
        assert repr(REFERENCE["ui_tars"].read(text, *SCREEN)[0]) == repr(UI_TARS_VERBS[verb]), text


HOTKEY, CLICK_IT = "hotkey(key='shift')", "click(start_box='(1,2)')"
SHIFT, CLICKED_AT = Keys(("Shift_L",)), Click(at(1, 2))
WAIT_CALL = call(action="wait", time=1)
SEVERAL: list[tuple[str, str, Action, str]] = [
    ("ui_tars", f"Action: {HOTKEY}\n\n{CLICK_IT}", Several((SHIFT, CLICKED_AT)), "several-actions"),
    ("ui_tars", f"Thought: a\nAction: {HOTKEY}\n{CLICK_IT}\n{HOTKEY}\nwait()", Several((SHIFT, CLICKED_AT, SHIFT)),
     "several-actions"),
    ("ui_tars", f"Action: keydown(key='ctrl')\n{CLICK_IT}\nrelease(key='ctrl')",
     Several((Keys(("Control_L",), "down"), CLICKED_AT, Keys(("Control_L",), "up"))), "several-actions keydown keyup"),
    ("ui_tars", f"Action: {CLICK_IT}\nfinished(content='ok')", CLICKED_AT, "several-actions"),
    ("ui_tars", f"Action: {CLICK_IT}\n\ntype(content='It's')\n\n{HOTKEY}",
     Several((CLICKED_AT, TypeText("It's"), SHIFT)), "several-actions quotes"),
    ("ui_tars", f"Action: {CLICK_IT}\n{HOTKEY[:-1]}", Several((CLICKED_AT, SHIFT)),
     "several-actions missing-parenthesis"),
    ("ui_tars", f"Thought: a. Action: {HOTKEY}\n\n{CLICK_IT}", Several((SHIFT, CLICKED_AT)),
     "several-actions one-line"),
    ("ui_tars", f"Action: type(content='a\nwait(')\n{HOTKEY} # done", Several((TypeText("a\nwait("), SHIFT)),
     "several-actions comment"),
    ("ui_tars", f"Action: {HOTKEY}\n{CLICK_IT} or so", SHIFT, "several-actions"),
    ("ui_tars", f"Action: finished(content='ok')\n{CLICK_IT}", Finish(answer="ok"), "several-actions"),
    ("qwen3_vl", f"I do both.\n{CLICK}\n{WAIT_CALL}", Several((CLICKED, Wait(1.0))), "several-calls"),
    ("qwen3_vl", f"{CLICK}\n{call(action='wait')}", Several((CLICKED, Wait(WAIT_SECONDS))), "several-calls time"),
    ("qwen3_vl", f"{CLICK}\n{call(action='terminate', status='success')}", CLICKED, "several-calls"),
    ("qwen3_vl", CLICK.replace('{"name"', '{"id": 1, "name"') * 2, Several((CLICKED, CLICKED)),
     "several-calls other-names"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "action", "rules"), SEVERAL)
def test_several_actions_are_taken_where_the_config_allows_it(name: str, text: str, action: Action, rules: str) -> None:
    read, used = TOGETHER[name].read(text, *SCREEN)
    assert (repr(read), used) == (repr(action), tuple(rules.split()))
    first, slugs = REFERENCE[name].read(text, *SCREEN)
    assert not isinstance(first, Several) and {"first-action", "first-call"} & set(slugs)


@pytest.mark.parametrize(
    ("name", "text"), [row[:2] for row in TABLE if not row[3].endswith(("first-action", "first-call"))]
)
def test_a_single_action_is_read_alike_whatever_is_allowed(name: str, text: str) -> None:
    assert TOGETHER[name].read(text, *SCREEN) == REFERENCE[name].read(text, *SCREEN)


@pytest.mark.parametrize(("name", "text", "action", "rules"), TABLE)
def test_a_rule_accepts(name: str, text: str, action: Action, rules: str) -> None:
    read, used = REFERENCE[name].read(text, *SCREEN)
    assert used == tuple(rules.split())
    assert repr(read) == repr(action)
    with pytest.raises(ParseError):
        STRICT[name].read(text, *SCREEN)


@pytest.mark.parametrize("name", ["ui_tars", "qwen3_vl"])
def test_every_rule_has_an_example_that_needs_it_alone_and_a_row_in_the_table(name: str) -> None:
    rules = declared_rules(name)
    assert len({slug for slug, *_ in rules}) == len(rules)
    tested = {slug for grammar, _, _, slugs in TABLE if grammar == name for slug in slugs.split()}
    tested |= {slug for grammar, _, _, slugs in SEVERAL if grammar == name for slug in slugs.split()}
    for slug, accepts, example in rules:
        reader = TOGETHER if slug.startswith("several") else REFERENCE
        assert reader[name].read(example, *SCREEN)[1] == (slug,)
        assert accepts.endswith(".") and slug in tested


def test_the_page_lists_the_rules() -> None:
    page = (Path(__file__).parents[2] / "docs/grammars.md").read_text(encoding="utf-8")
    for name in ("ui_tars", "qwen3_vl"):
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        found = [line for line in section.splitlines() if line.startswith("| `")]
        wanted = [
            f"| `{slug}` | {accepts} | `` {example.replace(chr(10), chr(92) + 'n')} `` |"
            for slug, accepts, example in declared_rules(name)
        ]
        assert found == wanted, "the table should be:\n" + "\n".join(wanted)


def test_the_grid_of_1000_has_its_end_in_it() -> None:
    text = "Action: click(start_box='(1001,1000)')"
    read, used = REFERENCE["thousand"].read(text, *SCREEN)
    assert used == ("screen-edge",) and isinstance(read, Click) and read.at is not None
    assert read.at.x > 0.999 and read.at.y > 0.999
    assert REFERENCE["thousand"].read("Action: click(start_box='(1000,5)')", *SCREEN)[1] == ()
    assert REFERENCE["thousand"].read("Action: click(start_box='500.5,5')", *SCREEN)[0] == Click(Point(0.5005, 0.005))


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("ui_tars", "", "no_action"),
        ("ui_tars", "click(start_box='(1,2)')", "no_action"),
        ("ui_tars", "Action: fly()", "unknown_action"),
        ("ui_tars", "Action: long_press(start_box='(1,2)', time='long')", "bad_arguments"),
        ("ui_tars", "Action: long_press(start_box='(1,2)', time='61')", "out_of_bounds"),
        ("ui_tars", "Action: drag(start_box='(1,2)', end_box='(3,4)', duration='-1')", "out_of_bounds"),
        ("qwen3_vl", call(action="left_click_drag", coordinate=[1, 2], duration="1"), "bad_arguments"),
        ("qwen3_vl", call(action="long_press", coordinate=[1, 2], time=10**400), "bad_arguments"),
        ("qwen3_vl", call(action="long_press", coordinate=[1, 2], time=1e9), "out_of_bounds"),
        ("qwen3_vl", call(action="left_click", keys=7), "bad_arguments"),
        ("ui_tars", "Action: wait", "truncated"),
        ("ui_tars", "Action: wait() and then some", "trailing_text"),
        ("ui_tars", "Action: click(start_box='(1,2)", "truncated"),
        ("ui_tars", "Action: click(start_box='(1,2,3)')", "bad_arguments"),
        ("ui_tars", "Action: click(start_box='(nan,2)')", "bad_arguments"),
        ("ui_tars", "Action: click(start_box='(2500,2)')", "out_of_bounds"),
        ("ui_tars", "Action: hover()", "bad_arguments"),
        ("ui_tars", "Action: press(key='ctrl c')", "bad_arguments"),
        ("ui_tars", "Action: scroll(start_box='(1,2)', direction='sideways')", "bad_arguments"),
        ("ui_tars", r"Action: type(content='\ud800')", "bad_arguments"),
        ("ui_tars", r"Action: open_app(app_name='\ud800')", "bad_arguments"),
        ("qwen3_vl", "I am done.", "no_action"),
        ("qwen3_vl", CLICK[:40], "truncated"),
        ("qwen3_vl", call(action="left_click", coordinate=[1100, 2]), "out_of_bounds"),
        ("qwen3_vl", call(action="left_click", coordinate=[10**400, 1.5]), "bad_arguments"),
        ("qwen3_vl", call(action="screenshot"), "unknown_action"),
        ("qwen3_vl", call(action=["left_click"], coordinate=[1, 2]), "bad_arguments"),
        ("qwen3_vl", call(action={"type": "left_click"}, keys=["ctrl"]), "bad_arguments"),
        ("qwen3_vl", call(coordinate=[1, 2]), "bad_arguments"),
        ("ui_tars", "Action: type(content='<point>1 2</point>", "truncated"),
        ("ui_tars", "Action: click('(1,2)')", "bad_arguments"),
        ("ui_tars", "Action: click(start_box=(1,2))", "bad_arguments"),
        ("qwen3_vl", CLICK.replace('"name"', '"tool"'), "bad_arguments"),
        ("qwen3_vl", "<tool_call>" + "[" * 100_000, "bad_json"),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_what_the_reference_cannot_do_either_stays_an_error(name: str, text: str, kind: str) -> None:
    with pytest.raises(ParseError) as caught:
        REFERENCE[name].read(text, *SCREEN)
    assert caught.value.kind == kind


@BOTH
@settings(deadline=None)  # a busy machine is no error
@given(action=ACTIONS, size=SIZES, thought=st.sampled_from(["", "I see (1,2).", "Ünï 'quoted'"]))
def test_what_strict_reading_accepts_is_read_alike(
    name: str, action: Action, size: tuple[int, int], thought: str
) -> None:
    try:
        text = STRICT[name].format(action, *size, thought)
    except ValueError:
        return  # has no words in this grammar
    assert REFERENCE[name].format(action, *size, thought) == text
    assert REFERENCE[name].read(text, *size) == STRICT[name].read(text, *size)


LOOSE = st.sampled_from(
    [
        "Reflection:", "Action_Summary: ", "\n\n", "hover(", "press(key='", "release", "scroll(direction='Down'", "#",
        "hotkey(hotkey='ctrl+c')", "')", "')\n\nwait()", "1940,", "-3", ".5", "\\x4", "\\", "open_app(app_name='",
        '{"name"', '"duration": 1', '"action": "wait"', '"action": "key", "keys": "', "</tool", "1000.0",
    ]
)  # fmt: skip


@BOTH
@settings(deadline=None)  # a busy machine is no error
@given(text=st.text() | st.lists(PIECES | LOOSE | st.text(max_size=3), max_size=14).map("".join))
def test_any_text_is_an_action_or_a_parse_error(name: str, text: str) -> None:
    check(REFERENCE[name], STRICT[name], text)
    check(TOGETHER[name], STRICT[name], text)


@BOTH
@settings(deadline=None)
@given(data=st.data())
def test_any_damage_to_an_action_leaves_an_action_or_a_parse_error(name: str, data: st.DataObject) -> None:
    texts = [text for grammar, text, *_ in TABLE if grammar == name or (grammar == "ui_tars" and name == "thousand")]
    text = data.draw(st.sampled_from(texts))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 9)))
    damaged = text[:start] + data.draw(st.text(max_size=3) | LOOSE) + text[end:]
    check(REFERENCE[name], STRICT[name], damaged)
    check(TOGETHER[name], STRICT[name], damaged)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "ctrl+c", "\ud800", "success"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMED = ("action", "coordinate", "keys", "text", "pixels", "time", "duration", "status", "other")


@settings(deadline=None)
@given(
    action=st.sampled_from([*CALLS, "long_press"]) | VALUES,
    more=st.dictionaries(st.sampled_from(NAMED), VALUES | st.just([1, 2]), max_size=3),
)
def test_a_call_with_any_values_is_an_action_that_can_be_sent_or_a_parse_error(
    action: object, more: dict[str, object]
) -> None:
    text = call(**{"action": action, **more})
    check(REFERENCE["qwen3_vl"], STRICT["qwen3_vl"], text)
    check(TOGETHER["qwen3_vl"], STRICT["qwen3_vl"], text)


@settings(deadline=None)
@given(
    name=st.sampled_from(sorted(KNOWN)),
    arguments=st.dictionaries(
        st.sampled_from(["start_box", "end_box", "key", "content", "direction", "time", "duration", "app_name"]),
        st.sampled_from(["", "(1,2)", "1.5,-3", "1940,2", "ctrl+c", "Down", "0.5", "999", r"\ud800", r"\x00", "it's"]),
        max_size=3,
    ),
)
def test_a_call_with_any_arguments_is_an_action_that_can_be_sent_or_a_parse_error(
    name: str, arguments: dict[str, str]
) -> None:
    written = ", ".join(f"{key}='{value}'" for key, value in arguments.items())
    text = f"Action: {name}({written})"
    check(REFERENCE["ui_tars"], STRICT["ui_tars"], text)


def check(reference: Grammar, strict: Grammar, text: str) -> None:
    """Nothing but a ParseError is raised, what is read can be sent, and no rule is needed where strict reading needs
    none."""
    try:
        read = reference.read(text, *SCREEN)
    except ParseError as error:
        assert error.kind
        read = None
    else:
        action_to_proto(read[0])
    try:
        strictly = strict.read(text, *SCREEN)
    except ParseError:
        assert read is None or read[1], "read without a rule, though strict reading refuses it"
    else:
        assert read == strictly


def test_boxes_have_their_tokens_again_where_a_server_left_them_out() -> None:
    bare = "Thought: From (1,2).\nAction: drag(start_box='(1,2)', end_box='(30, 4)')"
    boxed = REFERENCE["ui_tars"].as_written(bare)
    assert boxed.endswith("drag(start_box='<|box_start|>(1,2)<|box_end|>', end_box='<|box_start|>(30, 4)<|box_end|>')")
    assert REFERENCE["ui_tars"].as_written(boxed) == boxed
    assert REFERENCE["ui_tars"].read(boxed, *SCREEN) == REFERENCE["ui_tars"].read(bare, *SCREEN)
    assert MINIMAL.as_written(bare) == REFERENCE["qwen3_vl"].as_written(bare) == bare
