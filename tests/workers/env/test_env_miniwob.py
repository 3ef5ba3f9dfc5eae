"""MiniWoB++ in a real Chromium: the same seed is the same start, only real input acts, a verdict is final."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from PIL import Image

from dart.core import action as a
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.browser import Browser, EnvironmentFailure, PageCrashed, PageTimeout
from dart.workers.env.miniwob import CAUTIONS, MiniWobEnv, MiniWobOptions, check_task, task_names

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
OPTIONS, SCREEN = MiniWobOptions(), (160, 210)

# By the clock, from the start.
MOVING = ("chase-circle", "drag-cube", "hover-shape", "moving-items", "simon-says", "stock-market")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with Browser.launch() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def env(browser: Browser) -> AsyncIterator[MiniWobEnv]:
    made = await MiniWobEnv.open(browser, OPTIONS, SCREEN)
    yield made
    await made.close()


async def centre(env: MiniWobEnv, selector: str) -> a.Point:
    box = f"document.querySelector({selector!r}).getBoundingClientRect()"
    x, y = await env.page.evaluate(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({box})")
    return a.Point(x / 160, y / 210)


async def test_an_unknown_task_names_close_ones() -> None:
    assert len(task_names()) == 130
    with pytest.raises(UserError, match=r"no task 'click-colour'.*did you mean click-color"):
        check_task("click-colour")


async def test_the_same_seed_is_the_same_picture_and_another_is_not(env: MiniWobEnv) -> None:
    first = await env.reset(Task("miniwob", "click-test-2", 7))
    await env.act(a.Click(a.Point(0.5, 0.05)))
    other = await env.reset(Task("miniwob", "click-test-2", 8))
    again = await env.reset(Task("miniwob", "click-test-2", 7))
    assert first.instruction == "Click button ONE."
    assert first.image.sha256 == again.image.sha256 != other.image.sha256
    with Image.open(io.BytesIO(first.image.data)) as picture:
        assert (picture.size, picture.format) == ((160, 210), "PNG")


async def test_a_click_where_it_should_be_is_the_reward_and_freezes_the_episode(env: MiniWobEnv) -> None:
    start = await env.reset(Task("miniwob", "click-test", 1))
    beside = await env.act(a.Click(a.Point(0.5, 0.05)))
    assert (beside.done, beside.reward) == (False, 0.0)
    done = await env.act(a.Click(await centre(env, "#subbtn")))
    assert (done.done, done.reward) == (True, 1.0)
    assert await env.act(a.TypeText("more")) is done
    fresh = await env.reset(Task("miniwob", "click-test", 1))
    assert (fresh.done, fresh.image.sha256) == (False, start.image.sha256)


async def test_a_wrong_click_is_done_without_reward(env: MiniWobEnv) -> None:
    await env.reset(Task("miniwob", "click-test-2", 3))
    done = await env.act(a.Click(await centre(env, "#subbtn2")))
    assert (done.done, done.reward, done.image.data) == (True, 0.0, b"")


async def test_typing_and_editing_with_real_keys(env: MiniWobEnv) -> None:
    await env.reset(Task("miniwob", "enter-text", 3))
    await env.act(a.Click(await centre(env, "#tt")))

    async def value() -> object:
        return await env.page.evaluate("document.querySelector('#tt').value")

    await env.act(a.TypeText('Ab{"~9é ü!'))
    assert await value() == 'Ab{"~9é ü!'
    await env.act(a.Keys(("BackSpace",)))
    await env.act(a.Keys(("Home",)))
    await env.act(a.Keys(("Delete",)))
    assert await value() == 'b{"~9é ü'
    await env.act(a.Keys(("Control_L", "a")))
    await env.act(a.TypeText("x"))
    assert await value() == "x"
    await env.act(a.Click(await centre(env, "#tt"), count=2))
    await env.act(a.TypeText("double"))
    assert await value() == "double"


async def test_a_drag_and_a_scroll_do_what_a_hand_would(env: MiniWobEnv) -> None:
    await env.reset(Task("miniwob", "drag-box", 2))
    small = "[...document.querySelectorAll('#area div')].sort((p, q) => p.offsetWidth - q.offsetWidth)[0]"
    where = f"(r => [r.left + r.width / 2, r.top + r.height / 2])({small}.getBoundingClientRect())"
    before = await env.page.evaluate(where)
    start = a.Point(before[0] / 160, before[1] / 210)
    await env.act(a.Drag((start, a.Point(start.x, start.y + 0.1 if start.y < 0.6 else start.y - 0.1))))
    assert await env.page.evaluate(where) != before
    await env.reset(Task("miniwob", "scroll-text", 1))
    await env.act(a.Scroll(await centre(env, "#text-area"), 0, 2))
    assert await env.page.evaluate("document.querySelector('#text-area').scrollTop") > 0


@pytest.mark.parametrize(
    ("name", "field"), [("choose-list", "select"), ("enter-date", "input"), ("enter-time", "input")]
)
async def test_a_popup_does_not_stop_the_frames_and_the_keyboard_works_without_it(
    env: MiniWobEnv, name: str, field: str
) -> None:
    await env.reset(Task("miniwob", name, 1))
    value = f"document.querySelector('#area {field}').value"
    before = await env.page.evaluate(value)
    await env.act(a.Click(await centre(env, f"#area {field}")))
    if field == "input":
        await env.act(a.Keys(("space",)))
        await env.act(a.TypeText("10112021"))
    assert (await env.act(a.Keys(("Down",)))).image.data
    assert field == "input" or await env.page.evaluate(value) != before


async def test_a_scroll_that_moves_what_is_under_the_pointer(env: MiniWobEnv) -> None:
    """It once stopped the frames in two of three episodes."""
    for seed in range(4):
        await env.reset(Task("miniwob", "email-inbox", seed))
        await env.act(a.Move(a.Point(0.5, 0.6)))
        assert (await env.act(a.Scroll(a.Point(0.5, 0.6), 0, 1))).image.data


@pytest.mark.parametrize(
    "action",
    [
        a.System("open_url", "http://example.com"),
        a.Code("js", "core.endEpisode(1)"),
        a.Observe(),
        a.Finish(),
        a.Wait(0.0),
    ],
)
async def test_what_is_no_input_changes_nothing(env: MiniWobEnv, action: a.Action) -> None:
    start = await env.reset(Task("miniwob", "click-color", 1))
    after = await env.act(action)
    assert (after.done, after.reward, after.image.sha256) == (False, 0.0, start.image.sha256)


async def test_a_wait_is_bounded_and_lets_the_page_run(browser: Browser) -> None:
    env = await MiniWobEnv.open(browser, MiniWobOptions(max_wait_seconds=0.2), SCREEN)
    await env.reset(Task("miniwob", "click-test", 1))
    await env.page.evaluate("setTimeout(() => core.endEpisode(1), 50)")
    began = time.monotonic()
    assert (await env.act(a.Wait(60.0))).done
    assert time.monotonic() - began < 30.0


async def test_a_page_that_was_left_has_lost(env: MiniWobEnv) -> None:
    await env.reset(Task("miniwob", "click-test", 1))
    await env.page.navigate("about:blank")
    left = await env.act(a.Observe())
    assert (left.done, left.reward) == (True, 0.0)


@pytest.mark.parametrize(("end", "failure"), [("crash", PageCrashed), ("hang", PageTimeout)])
async def test_a_broken_page_is_replaced_and_the_others_go_on(
    browser: Browser, end: str, failure: type[EnvironmentFailure]
) -> None:
    broken, healthy = await MiniWobEnv.open(browser, OPTIONS, SCREEN), await MiniWobEnv.open(browser, OPTIONS, SCREEN)
    task = Task("miniwob", "click-test-2", 5)
    start = await healthy.reset(task)
    await broken.reset(task)
    pages = broken.page, healthy.page
    broken.page.timeout = 1.0
    if end == "crash":
        broken.page._send("Page.crash", {}, await broken.page._tab(0))
    else:
        broken.page._send("Runtime.evaluate", {"expression": "while (true);"}, await broken.page._tab(0))
    acting = asyncio.ensure_future(broken.act(a.Click(a.Point(0.5, 0.5))))
    assert not (await healthy.act(a.Observe())).done
    with pytest.raises(failure):
        await acting
    again = await broken.reset(task)
    assert again.image.sha256 == start.image.sha256
    assert broken.page is not pages[0] and healthy.page is pages[1]
    assert not (await healthy.act(a.Observe())).done


async def test_all_tasks_start_with_an_instruction_and_a_picture(
    browser: Browser, record_property: pytest.RecordProperty
) -> None:
    """And the same twice. Prints how long it took."""
    names = list(task_names())
    envs = [await MiniWobEnv.open(browser, OPTIONS, SCREEN) for _ in range(4)]
    wrong: list[str] = []
    began = time.monotonic()

    async def work(env: MiniWobEnv) -> None:
        while names:
            task = Task("miniwob", names.pop(), 7)
            first, second = await env.reset(task), await env.reset(task)
            with Image.open(io.BytesIO(first.image.data)) as picture:
                blank = len(picture.convert("RGB").getcolors(160 * 210) or []) < 3
            same = first.image.sha256 == second.image.sha256 or task.name in MOVING
            if blank or not same or not first.instruction or first.done:
                wrong.append(f"{task.id}: blank={blank} same={same} done={first.done} {first.instruction!r}")

    async with asyncio.TaskGroup() as tasks:
        for env in envs:
            tasks.create_task(work(env))
    seconds = time.monotonic() - began
    record_property("seconds", seconds)
    print(f"260 resets of 130 tasks in {seconds:.1f} s")
    assert wrong == []


async def test_every_caution_is_about_tasks_that_exist_and_none_is_in_two() -> None:
    named = [name for caution in CAUTIONS for name in caution.tasks]
    assert set(named) <= set(task_names())
    assert len(named) == len(set(named)) == 13, "docs/worlds.md and docs/miniwob.md say how many"
