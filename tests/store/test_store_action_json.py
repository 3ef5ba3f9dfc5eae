"""Canonical actions as JSON."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dart.core import action as a
from dart.core.action_json import action_from_json, action_to_json

fractions = st.floats(0, 1, exclude_max=True)
points = st.builds(a.Point, fractions, fractions)
buttons = st.sampled_from(get_args(a.MouseButton))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.lists(texts, max_size=3).map(tuple)
counts = st.integers(-5, 5)

singles: st.SearchStrategy[a.Single] = st.one_of(
    st.builds(a.Move, points),
    st.builds(a.Click, st.none() | points, buttons, counts, names, st.floats(0, 60)),
    st.builds(a.Button, st.none() | points, buttons, st.sampled_from(["down", "up"])),
    st.builds(a.Drag, st.lists(points, max_size=4).map(tuple), buttons, st.floats(0, 60)),
    st.builds(a.Scroll, st.none() | points, counts, counts),
    st.builds(a.Keys, names, st.sampled_from(get_args(a.PressMode))),
    st.builds(a.TypeText, texts),
    st.builds(a.Wait, st.floats(0, 1e6)),
    st.just(a.Observe()),
    st.builds(a.Finish, st.sampled_from(get_args(a.FinishStatus)), texts),
    st.builds(a.System, st.sampled_from(get_args(a.SystemKind)), texts),
    st.builds(a.Code, texts, texts),
)
together = st.lists(singles.filter(lambda one: not isinstance(one, a.Finish)), min_size=1, max_size=4)
actions: st.SearchStrategy[a.Action] = singles | st.builds(a.Several, together.map(tuple))


@given(actions)
def test_an_action_comes_back_equal(action: a.Action) -> None:
    assert action_from_json(json.loads(json.dumps(action_to_json(action)))) == action


def test_every_kind_of_action_is_covered() -> None:
    kinds = {
        type(action)
        for action in [a.Move(a.Point(0, 0)), a.Click(None), a.Button(None), a.Drag(()), a.Scroll(None), a.Keys(()),
                       a.TypeText(""), a.Wait(0), a.Observe(), a.Finish(), a.System("home"), a.Code("sh", ""),
                       a.Several((a.Observe(),))]
        if action_from_json(action_to_json(action)) == action
    }  # fmt: skip
    assert kinds == set(get_args(a.Action))


def test_what_is_written() -> None:
    assert action_to_json(a.Click(a.Point(0.25, 0.5), "right", 2, ("Control_L",))) == {
        "kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "right", "count": 2, "modifiers": ["Control_L"],
    }  # fmt: skip
    assert action_to_json(a.Several((a.Click(None, hold_seconds=1.5), a.Wait(2.0)))) == {
        "kind": "several", "actions": [
            {"kind": "click", "at": None, "button": "left", "count": 1, "modifiers": [], "hold_seconds": 1.5},
            {"kind": "wait", "seconds": 2.0},
        ],
    }  # fmt: skip
    assert action_to_json(a.System("open_url", "x")) == {"kind": "system", "system": "open_url", "argument": "x"}


def test_defaults_may_be_left_out() -> None:
    assert action_from_json({"kind": "finish"}) == a.Finish()
    assert action_from_json({"kind": "click", "at": None}) == a.Click(None)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, "kind None"),
        ({"kind": "tap"}, "'tap' is unknown"),
        ({"kind": ["click"]}, "is unknown"),
        ({"kind": "click", "at": None, "colour": "red"}, "no field colour"),
        ({"kind": "click"}, "lacks at"),
        ({"kind": "move", "at": None}, "at None"),
        ({"kind": "move", "at": {"x": 1.0, "y": 0.5}}, "outside the observation"),
        ({"kind": "click", "at": None, "button": "fourth"}, "one of left, middle, right"),
        ({"kind": "click", "at": None, "button": ["left"]}, "one of left, middle, right"),
        ({"kind": "click", "at": None, "count": True}, "whole number"),
        ({"kind": "wait", "seconds": float("inf")}, "finite"),
        ({"kind": "wait", "seconds": float("nan")}, "finite"),
        ({"kind": "wait", "seconds": 10**400}, "finite"),
        ({"kind": "keys", "keysyms": "Return"}, "list of strings"),
        ({"kind": "system", "kind ": "home"}, "no field"),
    ],
)
def test_what_is_no_action_is_refused(data: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        action_from_json(data)
