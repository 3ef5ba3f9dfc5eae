"""Actions that take time, and keys: what a real page sees of them, and when."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypedDict

import pytest

from dart.core import action as a
from dart.core.types import Task
from dart.workers.env.browser import Browser
from dart.workers.env.oracle import Plan
from dart.workers.env.web import WebEnv, WebOptions
from dart.worlds import Verdict

pytestmark = pytest.mark.browser
SCREEN = (200, 200)
PAGE = """
document.body.innerHTML = '<div style="position:fixed;inset:0;background:#eee"></div>';
window.seen = [];
for (const type of ['mousedown', 'mouseup', 'mousemove', 'click', 'keydown', 'keyup'])
  addEventListener(type, event => window.seen.push({
    type, at: event.timeStamp, x: event.clientX || 0, y: event.clientY || 0, buttons: event.buttons || 0,
    key: event.key || '', control: event.ctrlKey, trusted: event.isTrusted}), true);
0
"""


class Seen(TypedDict):
    """An event of the page; `at` in milliseconds."""

    type: str
    at: float
    x: int
    y: int
    buttons: int
    key: str
    control: bool
    trusted: bool


class Recorder(WebEnv):
    """A page that writes down what it sees."""

    async def begin(self, task: Task) -> str:
        await self.page.navigate("about:blank")
        await self.page.evaluate(PAGE)
        return "do it"

    async def grade(self) -> tuple[bool, Verdict]:
        return False, Verdict(0.0)

    @classmethod
    def plan(cls, name: str) -> Plan:
        raise NotImplementedError

    async def seen(self, *types: str) -> list[Seen]:
        events: list[Seen] = await self.page.evaluate("window.seen")
        assert all(event["trusted"] for event in events), "a device made them, no script"
        return [event for event in events if event["type"] in types]


@pytest.fixture
async def env() -> AsyncIterator[Recorder]:
    async with Browser.launch() as browser:
        made = await Recorder.open(browser, WebOptions(max_wait_seconds=1.0), SCREEN)
        await made.reset(Task("recorder", "a"))
        yield made
        await made.close()


async def test_a_long_press_keeps_the_button_down(env: Recorder) -> None:
    await env.act(a.Click(a.Point(0.25, 0.5), hold_seconds=0.6))
    down, up, click = await env.seen("mousedown", "mouseup", "click")
    assert [down["type"], up["type"], click["type"]] == ["mousedown", "mouseup", "click"]
    assert (down["x"], down["y"]) == (up["x"], up["y"]) == (50, 100)
    assert up["at"] - down["at"] >= 590


async def test_no_longer_than_the_world_allows(env: Recorder) -> None:
    await env.act(a.Click(a.Point(0.25, 0.5), hold_seconds=60.0))
    down, up = await env.seen("mousedown", "mouseup")
    assert up["at"] - down["at"] >= 990


async def test_an_ordinary_click_is_not_held(env: Recorder) -> None:
    await env.act(a.Click(a.Point(0.25, 0.5), count=2))
    assert [event["type"] for event in await env.seen("mousedown", "mouseup", "click")] == [
        "mousedown", "mouseup", "click", "mousedown", "mouseup", "click",
    ]  # fmt: skip


async def test_a_drag_passes_its_way_points_in_the_time_that_it_takes(env: Recorder) -> None:
    corners = [(20, 20), (180, 20), (180, 180)]
    path = tuple(a.Point(x / 200, y / 200) for x, y in corners)
    await env.act(a.Drag(path, duration_seconds=0.8))
    (down,), (up,) = await env.seen("mousedown"), await env.seen("mouseup")
    held = [event for event in await env.seen("mousemove") if event["buttons"] == 1]
    assert up["at"] - down["at"] >= 780
    assert ((down["x"], down["y"]), (up["x"], up["y"])) == (corners[0], corners[-1])
    places = [(event["x"], event["y"]) for event in held]
    assert len(places) >= 8 and places.index(corners[1]) < places.index(corners[2]) == len(places) - 1
    times = [event["at"] for event in held]
    assert times == sorted(times) and times[0] - down["at"] >= 40, "it does not jump there and then wait"


async def test_keys_are_held_during_a_click(env: Recorder) -> None:
    await env.act(a.Click(a.Point(0.5, 0.5), modifiers=("Control_L",), hold_seconds=0.1))
    assert [event["type"] for event in await env.seen("keydown", "mousedown", "mouseup", "keyup")] == [
        "keydown", "mousedown", "mouseup", "keyup",
    ]  # fmt: skip
    assert all(event["control"] for event in await env.seen("mousedown", "mouseup"))


@pytest.mark.parametrize("keysym", ["F13", "F24", "Num_Lock", "Scroll_Lock"])
async def test_keys_that_were_dropped_are_pressed(env: Recorder, keysym: str) -> None:
    observation = await env.act(a.Keys((keysym,)))
    events = await env.seen("keydown", "keyup")
    assert [(event["type"], event["key"]) for event in events] == [
        ("keydown", keysym.replace("_", "")), ("keyup", keysym.replace("_", "")),
    ]  # fmt: skip
    assert observation.last_action_error == ""


async def test_a_key_that_is_not_there_is_refused_whole(env: Recorder) -> None:
    observation = await env.act(a.Keys(("Control_L", "XF86Copy")))
    assert observation.last_action_error == "the keyboard has no key XF86Copy"
    assert await env.seen("keydown", "keyup") == []
    assert (await env.act(a.Keys(("Control_L", "c")))).last_action_error == ""
