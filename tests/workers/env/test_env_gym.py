"""Gymnasium environments as a world: they conform, their rewards become verdicts, and wrong options are refused."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import math
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dart.errors import UserError
from dart.testing import conform
from dart.workers.env.gym import browser
from dart.workers.env.gym.browser import BrowserGym, goal_text
from dart.workers.env.gym.options import GymOptions
from dart.workers.env.gym.plain import PlainGym
from dart.workers.env.gym.world import Gym
from dart.worlds import Click, Finish, Keys, Observe, Point, System, Task, TypeText, Wait, from_pixels
from dart.worlds.plugs import check, find, read_options
from dart.worlds.scoring import Score, ScoredOptions

LAMPS = {"id": "foreign.gym_samples:Lamps-v0", "cells": [2, 2], "instruction_at": "info.said.words"}
NEEDS_BROWSERGYM = "needs the extra browsergym (130 MB, with Playwright 1.44)"
TASK = Task("gym", "lamps", 3)
CENTRES = [Point(x, y) for y in (0.25, 0.75) for x in (0.25, 0.75)]


def lamps(**options: Any) -> PlainGym:
    import foreign.gym_samples  # noqa: F401  registers the environment

    return PlainGym(GymOptions.model_validate({**LAMPS, **options}), (16, 16))


def lit(env: PlainGym, task: Task = TASK) -> int:
    return int(env.reset(task).instruction.removeprefix("Choose lamp ").removesuffix("."))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cells": None, "keys": {"a": 0, "b": 1}},
        {
            "cells": None,
            "actions": "foreign.gym_samples:choose",
            "instruction_at": "",
            "instruction": "Choose in {task}.",
        },
    ],
)
def test_a_gymnasium_environment_conforms(options: dict[str, Any]) -> None:
    conform("gym", "lamps", options={**LAMPS, **options})


def test_a_click_in_a_cell_is_the_action_of_its_number_and_other_actions_change_nothing() -> None:
    env = lamps()
    right = lit(env)
    for idle in (Observe(), Wait(1.0), Keys(("a",)), Click(None), Click(Point(0.1, 0.1), "right")):
        assert not env.act(idle).done
    assert env.judge(Finish(), False).evidence["steps"] == 0
    wrong = (right + 1) % 4
    assert not env.act(Click(CENTRES[wrong])).done
    assert env.act(Click(CENTRES[right])).done
    verdict = env.judge(Observe(), False)
    assert verdict.evidence == {"reward": 1.0, "steps": 2, "terminated": True, "truncated": False}
    assert env.act(Click(CENTRES[wrong])).done, "an episode that is over stays over"
    assert env.judge(Observe(), False) == verdict
    env.close()


@pytest.mark.parametrize(
    ("options", "reward"),
    [
        ({}, 1.0),  # the sum, 2 - 1, within [0, 1]
        ({"reward_range": [-1, 3]}, 0.5),
        ({"reward": "last", "reward_range": [0, 4]}, 0.5),
        ({"success_at": 1.0}, 1.0),
        ({"success_at": 1.5}, 0.0),
    ],
)
def test_rewards_become_a_verdict(options: dict[str, Any], reward: float) -> None:
    env = lamps(**options)
    right = lit(env)
    env.act(Click(CENTRES[(right + 1) % 4]))
    env.act(Click(CENTRES[right]))
    assert env.judge(Observe(), False).reward == reward
    env.close()


@pytest.mark.parametrize("options", [{}, {"success_at": 1.0}, {"reward": "last"}])
@pytest.mark.parametrize("rewards", [["nan"], ["inf"], ["-inf"], ["inf", "-inf"], ["1e308", "1e308"], ["inf", "0"]])
def test_a_reward_that_is_not_a_finite_number_is_no_verdict(rewards: list[str], options: dict[str, float]) -> None:
    score = Score()
    for reward in rewards:
        score.add(float(reward))
    with pytest.raises(ValueError, match=r"reward is (nan|inf|-inf): a reward is a finite number"):
        score.verdict(ScoredOptions.model_validate(options), "sum", {})


def test_keys_and_functions_translate_actions() -> None:
    env = lamps(cells=None, keys={"Left": 0, "Right": 1, "Up": 2, "Down": 3})
    right = lit(env)
    assert env.act(Keys((("Left", "Right", "Up", "Down")[right],))).done
    env.close()
    env = lamps(cells=None, actions="foreign.gym_samples:choose")
    right = lit(env)
    assert env.act(TypeText(str(right))).done
    env.close()


def test_lists_become_arrays_of_the_spaces_type() -> None:
    env = lamps(cells=None, keys={"Left": [-1, 0]}, arguments={"space": "box"})
    env.reset(TASK)
    env.act(Keys(("Left",)))
    assert env._env is not None
    (taken,) = env._env.unwrapped.taken  # type: ignore[attr-defined]
    assert (taken.tolist(), str(taken.dtype)) == ([-1.0, 0.0], "float32")
    env.close()


def test_an_environment_that_failed_is_made_anew() -> None:
    env = lamps(arguments={"breaks": True})
    env.reset(TASK)
    before = env._env
    with pytest.raises(RuntimeError, match="crashed"):
        env.act(Click(CENTRES[0]))
    with pytest.raises(Exception, match="failed earlier"):
        env.act(Click(CENTRES[0]))
    assert env.renew()
    env.reset(TASK)
    assert env._env is not before
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cells": None}, "nothing says how clicks and keys become the environment's actions"),
        ({"instruction_at": ""}, "has no instruction: give instruction, or instruction_at"),
        ({"actions": "foreign.gym_samples:choose"}, "actions is set, and keys or cells too"),
        ({"reward_range": [1, 0]}, "is not a range"),
        ({"id": "browsergym/miniwob.click-test"}, "leave out actions, keys and cells"),
        ({"cell": [2, 2]}, "environment.options.cell"),
        ({"id": "browsergym/x.y", "cells": None, "arguments": {"viewport": {}}}, "set environment.viewport instead"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check("gym", {**LAMPS, **options}, ["lamps"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "foreign.gym_samples:Lmaps-v0"}, "gymnasium has no environment Lmaps-v0"),
        ({"cells": [3, 3]}, r"takes Discrete\(9\), and the environment has Discrete\(4\)"),
        ({"cells": None, "keys": {"Left": 7}}, "Left is 7, which is not an action of Discrete"),
        ({"instruction_at": "info.told"}, "there is no 'told' of info.told, only: said"),
    ],
)
def test_what_only_the_environment_knows_is_refused_at_the_first_reset(options: dict[str, Any], message: str) -> None:
    env = lamps(**options)
    with pytest.raises(UserError, match=message):
        env.reset(TASK)
    env.close()


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        (
            {"cells": None, "actions": "foreign.gym_samples:nothing"},
            "environment.options.actions",
            "which is not a function",
        ),
        ({"cells": None, "actions": "no_such_module:f"}, "environment.options.actions", "cannot be imported"),
        ({"id": "no_such_module:X-v0"}, "environment.options.id", "module no_such_module cannot be imported"),
    ],
)
def test_doctor_and_the_worker_find_what_cannot_be_imported(options: dict[str, Any], name: str, message: str) -> None:
    read = read_options(find("gym"), {**LAMPS, **options})
    assert message in (Gym.checks(read)[name]() or "")


def test_doctor_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    checks = Gym.checks(GymOptions(id="browsergym/webarena.310"))
    assert checks["gymnasium"]() == "the package gymnasium is not installed: run `pip install 'dart-gui-rl[gym]'`"
    assert "pip install 'dart-gui-rl[browsergym]' browsergym-webarena" in (checks["browsergym"]() or "")


def test_the_module_of_a_benchmark_follows_from_the_id() -> None:
    assert GymOptions(id="browsergym/miniwob.{task}").module == "browsergym.miniwob"
    assert GymOptions(id="browsergym/openended").module == "browsergym.core"
    assert GymOptions(id="mine:browsergym/own.{task}").module == "mine"


def test_a_goal_is_its_texts_with_pictures_named() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert goal_text(({"type": "text", "text": "Find this:"}, picture)) == "Find this:\n[picture]"


# ---- BrowserGym ----


class Page:
    """As much of a Playwright page, its DevTools session and BrowserGym's environment as an episode takes."""

    def __init__(self) -> None:
        self.page = self.context = self
        self.size, self.sent = (1000, 800), list[tuple[str, float, float]]()
        self.fails: Exception | None = None

    def new_cdp_session(self, page: Page) -> Page:
        return self

    def send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        if method == "Page.captureScreenshot":
            return {"data": base64.b64encode(from_pixels(bytes(3 * math.prod(self.size)), *self.size).data)}
        if self.fails is not None:
            raise self.fails
        self.sent.append((parameters["type"], parameters["x"], parameters["y"]))
        return {}

    def goto(self, address: str) -> None:
        assert self.fails is not None
        raise self.fails

    def pre_step(self) -> tuple[dict[str, Any], None, None]:
        return {}, None, None

    def post_step(self, info: dict[str, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        return {"url": "about:blank"}, 0.0, False, False, info


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[BrowserGym, Page]]:
    pytest.importorskip("playwright.sync_api")

    def made(**arguments: Any) -> tuple[BrowserGym, Page]:
        driver = SimpleNamespace(start=lambda executable: SimpleNamespace(connected=True))
        monkeypatch.setattr(browser, "_share_playwright", lambda: driver)
        monkeypatch.setattr(browser, "find_executable", lambda name: "chromium")
        env, page = BrowserGym(GymOptions(id="browsergym/openended", arguments=arguments), (1000, 800)), Page()
        env._env = page  # type: ignore[assignment]
        return env, page

    return made


@pytest.mark.parametrize("scale", [1, 2])
def test_places_are_fractions_of_the_last_screenshot(playing: Callable[..., Any], scale: int) -> None:
    """A popup may have a size of its own; the mouse counts in the page's pixels, which may be several of a screen's."""
    env, page = playing(pw_context_kwargs={"device_scale_factor": scale})
    page.size = (400 * scale, 300 * scale)
    assert env.act(Observe()).image.width == 400 * scale
    env.act(Click(Point(0.5, 0.5)))
    assert page.sent[-1] == ("mouseReleased", 200.0, 150.0)


def test_what_the_page_cannot_carry_out_is_told_to_the_policy(playing: Callable[..., Any]) -> None:
    from playwright.sync_api import Error

    env, page = playing()
    page.fails = Error("net::ERR_NAME_NOT_RESOLVED at http://nowhere/")
    seen = env.act(System("open_url", "http://nowhere/"))
    assert seen.last_action_error == "Error: net::ERR_NAME_NOT_RESOLVED at http://nowhere/"
    assert seen.image.width == 1000 and not seen.done
    assert env.act(Click(None)).last_action_error.startswith("Error: net::")
    assert env.act(Keys(("NoKey",))).last_action_error == "the keyboard has no key NoKey"
    page.fails = None
    assert env.act(Click(None)).last_action_error == ""
    page.fails = Error("Target page, context or browser has been closed")
    env._driver.connected = False
    with pytest.raises(Error, match="has been closed"):
        env.act(Click(None))


@asynccontextmanager
async def browsergym(name: str = "browsergym/miniwob.{task}", **arguments: Any) -> AsyncIterator[tuple[Gym, Any]]:
    """A world of MiniWoB tasks, or of others, and an environment of it on its own thread, as Playwright needs it."""
    pytest.importorskip("browsergym.miniwob", reason=NEEDS_BROWSERGYM)
    world = Gym()
    await world.start(GymOptions(id=name, arguments=arguments), (160, 210))
    try:
        yield world, await world.lease()
    finally:
        await world.close()


async def box(env: Any, element: str) -> tuple[Point, Point]:
    """The element's top left corner, a little inside, and its middle."""
    found = await env._thread.call(lambda: env.env._env.page.locator(element).bounding_box())
    x, y, width, height = (found[name] for name in ("x", "y", "width", "height"))
    return Point((x + 9) / 160, (y + 9) / 210), Point((x + width / 2) / 160, (y + height / 2) / 210)


@pytest.mark.browser
def test_browsergym_conforms() -> None:
    pytest.importorskip("browsergym.miniwob", reason=NEEDS_BROWSERGYM)
    conform("gym", "click-test", "enter-text", options={"id": "browsergym/miniwob.{task}"}, screen=(160, 210))


@pytest.mark.browser
async def test_browsergym_acts_with_a_real_mouse_and_keyboard_and_gives_its_own_reward() -> None:
    async with browsergym() as (_, env):
        seen = await env.reset(Task("gym", "click-test", 1))
        assert (seen.image.width, seen.image.height) == (160, 210)
        assert seen.instruction == "Click the button."
        assert not (await env.act(Click(Point(0.9, 0.95)))).done
        assert (await env.judge(Observe(), True)).reward == 0.0
        _, middle = await box(env, "#subbtn")
        assert (await env.act(Click(middle))).done
        verdict = await env.judge(Observe(), False)
        assert (verdict.reward, verdict.evidence["terminated"]) == (1.0, True)
        assert await env.renew()
        await env.reset(Task("gym", "enter-text", 1))
        corner, _ = await box(env, "#tt")
        await env.act(Click(corner))
        await env.act(TypeText("it's é"))
        assert await env._thread.call(lambda: env.env._env.page.input_value("#tt")) == "it's é"
        with pytest.raises(UserError, match=r"BrowserGym has no browsergym/miniwob.enter-tetx"):
            await env.reset(Task("gym", "enter-tetx", 1))


@pytest.mark.browser
async def test_browsergym_places_in_a_popup_are_those_of_its_screenshot() -> None:
    start = {"start_url": "about:blank", "goal": "Look."}
    async with browsergym("browsergym/openended", task_kwargs=start) as (_, env):
        await env.reset(Task("gym", "look", 1))
        opened = "window.open('about:blank', '', 'width=320,height=120,popup')"
        await env._thread.call(lambda: env.env._env.page.evaluate(opened) and None)
        seen = await env.act(Wait(0.1))
        assert (seen.image.width, seen.image.height) == (320, 120)
        heard = "window.heard = []; addEventListener('mousedown', e => heard.push(e.clientX, e.clientY))"
        await env._thread.call(lambda: env.env._env.page.evaluate(heard))
        seen = await env.act(Click(Point(0.5, 0.5)))
        assert await env._thread.call(lambda: env.env._env.page.evaluate("heard")) == [160, 60]
        seen = await env.act(System("open_url", "http://127.0.0.1:1/"))
        assert seen.last_action_error.startswith("Error: ") and seen.image.width


@pytest.mark.browser
async def test_browsergym_is_told_an_answer_and_that_a_task_is_infeasible() -> None:
    async with browsergym() as (_, env):
        for last, role, words in (
            (Finish(answer="42"), "assistant", "42"),
            (Finish("infeasible"), "infeasible", "The task is infeasible."),
        ):
            await env.reset(Task("gym", "click-test", 1))
            verdict = await env.judge(last, False)
            said = env.env._env.chat.messages[-1]
            assert (said["role"], said["message"], verdict.reward) == (role, words, 0.0)
            assert verdict.evidence["terminated"] is (role == "infeasible")


@pytest.mark.browser
async def test_a_browsergym_page_in_an_endless_loop_is_disposed_of_with_its_thread_and_processes() -> None:
    threads = set(threading.enumerate())
    async with browsergym() as (world, env):
        await env.reset(Task("gym", "click-test", 1))
        assert await env.probe()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await env._thread.call(lambda: env.env._env.page.evaluate("while (true) {}"))
        assert not await env.renew()
        drivers = set(env.env._driver._process)
        assert drivers and all(Path(f"/proc/{pid}").exists() for pid in drivers)
        await world.dispose(env)
        async with asyncio.timeout(60):
            while (
                any(Path(f"/proc/{pid}").exists() for pid in drivers)
                or {thread for thread in threading.enumerate() if thread.name.startswith("BrowserGym")} - threads
            ):
                await asyncio.sleep(0.05)
        again = await world.lease()
        assert (await again.reset(Task("gym", "click-test", 1))).instruction


@pytest.mark.browser
async def test_browsergym_without_its_playwright_is_replaced() -> None:
    async with browsergym() as (_, env):
        await env.reset(Task("gym", "click-test", 1))
        env.env.kill()
        assert not await env.probe()
        assert not await env.renew()
