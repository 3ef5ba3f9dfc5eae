"""The ladder in a real Chromium: the oracle does every task, a wrong choice is a dead end without an end, and only
clicks act."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from PIL import Image

from dart.core import action as a
from dart.core.types import Task
from dart.errors import UserError
from dart.testing import conform
from dart.workers.env import web
from dart.workers.env.browser import Browser
from dart.workers.env.ladder import LadderEnv, LadderOptions
from dart.workers.env.ladder_layout import MIDDLE, ConfirmPage, NextPage, Page, SymbolPage, layout, level_of, task_names
from dart.workers.env.oracle import demonstrate

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
OPTIONS, SCREEN = LadderOptions(), (96, 96)
STEP_LIMIT = 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with Browser.launch() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def env(browser: Browser) -> AsyncIterator[LadderEnv]:
    made = await LadderEnv.open(browser, OPTIONS, SCREEN)
    yield made
    await made.close()


def middle(cell: int) -> a.Point:
    return a.Point((cell % 3 + 0.5) / 3, (cell // 3 + 0.5) / 3)


def right(page: Page) -> a.Point:
    match page:
        case NextPage(cell):
            return middle(cell)
        case ConfirmPage():
            return middle(MIDDLE)
    return middle(page.cells[page.symbols.index(page.right[0])])


def wrong(page: SymbolPage, rng: random.Random) -> a.Point:
    return middle(
        rng.choice([cell for cell, one in zip(page.cells, page.symbols, strict=True) if one not in page.right])
    )


async def test_the_oracle_does_every_task(browser: Browser) -> None:
    tasks = [Task("ladder", name, seed) for name in task_names() for seed in range(4)]
    failed: list[str] = []

    async def work(env: LadderEnv) -> None:
        while tasks:
            task = tasks.pop()
            level = level_of(task.name)
            done = await demonstrate(env, task, random.Random(task.seed) if task.seed % 2 else None)
            if (done.reward, len(done.steps)) != (1.0, level.pages):
                failed.append(f"{task.id}: {done.instruction}: {done.reward} after {len(done.steps)}")
            for step in done.steps:
                with Image.open(io.BytesIO(step.observation.image.data)) as picture:
                    assert (picture.size, picture.format) == (SCREEN, "PNG")

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(work(await LadderEnv.open(browser, OPTIONS, SCREEN)))
    assert failed == []


@pytest.mark.parametrize("name", ["ladder-easy-03", "ladder-medium-02", "ladder-hard-01"])
async def test_a_wrong_choice_is_a_dead_end_that_costs_the_whole_step_limit(env: LadderEnv, name: str) -> None:
    level, rng = level_of(name), random.Random(name)
    for fatal in range(level.decisions):
        task = Task("ladder", name, 10 + fatal)
        made = layout(name, task.seed)
        await env.reset(task)
        for page in made.pages[: level.next_pages + fatal]:
            assert not (await env.act(a.Click(right(page)))).done
        page = made.pages[level.next_pages + fatal]
        assert isinstance(page, SymbolPage)
        seen = await env.act(a.Click(wrong(page, rng)))
        assert not seen.done and seen.image.data
        assert await env.suggest() is None, "the oracle sees that it is lost"
        for _ in range(STEP_LIMIT):  # all places, and so all buttons and symbols too
            seen = await env.act(a.Click(middle(rng.randrange(9))))
            assert (seen.done, seen.reward) == (False, 0.0)
        verdict = await env.judge(a.Observe(), at_limit=True)
        assert verdict.reward == 0.0
        assert (verdict.evidence["done"], verdict.evidence["at"]) == (False, level.next_pages + fatal)
        assert isinstance(verdict.evidence["dead"], int) and verdict.evidence["dead"] > 1


async def test_dead_pages_are_drawn_like_the_others(env: LadderEnv) -> None:
    """Each has its six symbols, which lead on; what a press changes is seen."""
    name = "ladder-hard-02"
    made = layout(name, 4)
    await env.reset(Task("ladder", name, 4))
    for page in made.pages[:2]:
        await env.act(a.Click(right(page)))
    page = made.pages[2]
    assert isinstance(page, SymbolPage)
    seen = await env.act(a.Click(wrong(page, random.Random(1))))
    for number, dead in enumerate([*made.dead, made.dead[0]], start=1):
        assert (await env.judge(a.Observe(), False)).evidence["dead"] == number
        drawn = await env.page.evaluate("document.querySelectorAll('#page [data-name]').length")
        assert isinstance(dead, SymbolPage) and drawn == 6
        after = await env.act(a.Click(middle(dead.cells[0])))
        assert after.image.sha256 != seen.image.sha256
        seen = after


async def test_next_is_wrong_beside_ok(env: LadderEnv) -> None:
    task = Task("ladder", "ladder-hard-02", 6)
    *pages, last = layout(task.name, task.seed).pages
    await env.reset(task)
    for page in pages:
        seen = await env.act(a.Click(right(page)))
    assert not seen.done and isinstance(last, ConfirmPage)
    assert not (await env.act(a.Click(middle(last.next)))).done
    verdict = await env.judge(a.Observe(), True)
    assert (verdict.reward, verdict.evidence["dead"], verdict.evidence["at"]) == (0.0, 1, len(pages))


@pytest.mark.parametrize("name", ["ladder-medium-01", "ladder-hard-01"])
async def test_success_is_final(env: LadderEnv, name: str) -> None:
    made = layout(name, 2)
    await env.reset(Task("ladder", name, 2))
    for page in made.pages:
        seen = await env.act(a.Click(right(page)))
    assert (seen.done, seen.reward, seen.image.data) == (True, 1.0, b"")
    assert await env.act(a.Click(middle(4))) is seen
    verdict = await env.judge(a.Observe(), False)
    assert verdict.reward == 1.0
    assert verdict.evidence["chosen"] == [symbol.name for symbol in made.wanted]


async def test_the_right_choices_in_another_order_are_wrong(env: LadderEnv) -> None:
    name = "ladder-hard-03"
    made = layout(name, 1)
    await env.reset(Task("ladder", name, 1))
    for page in made.pages[:2]:
        await env.act(a.Click(right(page)))
    first, second = made.wanted[:2]
    page = made.pages[2]
    assert isinstance(page, SymbolPage) and page.right == (first,)
    await env.act(a.Click(middle(page.cells[page.symbols.index(second)])))
    assert (await env.judge(a.Observe(), False)).evidence["dead"] == 1


@pytest.mark.parametrize(
    "action",
    [
        a.Click(middle(4), "right"), a.Keys(("Return",)), a.TypeText("next"), a.Scroll(middle(4), 0, 3), a.Wait(9.0),
        a.Code("js", "ladder.state().done = true"), a.System("back"), a.Drag((middle(0), middle(8))), a.Move(middle(4)),
    ],
)  # fmt: skip
async def test_only_clicks_on_what_is_there_do_anything(env: LadderEnv, action: a.Action) -> None:
    name = "ladder-easy-01"
    seed = next(seed for seed in range(100) if right(layout(name, seed).pages[0]) == middle(4))
    start = await env.reset(Task("ladder", name, seed))
    after = await env.act(action)
    assert (after.done, after.image.sha256) == (False, start.image.sha256)
    assert (await env.act(a.Click(middle(0)))).image.sha256 == start.image.sha256, "nothing is there"
    assert (await env.act(a.Click(middle(4)))).image.sha256 != start.image.sha256


async def test_the_same_seed_is_the_same_picture_and_another_is_not(browser: Browser, env: LadderEnv) -> None:
    other = await LadderEnv.open(browser, OPTIONS, SCREEN)
    for name in ("ladder-easy-02", "ladder-medium-03", "ladder-hard-02"):
        task = Task("ladder", name, 7)
        made = layout(name, 7)
        one, two = await env.reset(task), await other.reset(task)
        pictures = {one.image.sha256}
        assert one.image.sha256 == two.image.sha256
        for page in made.pages[:-1]:
            one, two = await env.act(a.Click(right(page))), await other.act(a.Click(right(page)))
            assert one.image.sha256 == two.image.sha256
            pictures.add(one.image.sha256)
        assert len(pictures) == len(made.pages), "no two pages look alike"
        fresh = await env.reset(Task("ladder", name, 8))
        for page in layout(name, 8).pages[: level_of(name).next_pages]:
            fresh = await env.act(a.Click(right(page)))
        assert fresh.image.sha256 not in pictures, "its symbols are elsewhere"


async def test_nothing_of_an_episode_is_left_in_the_next(browser: Browser) -> None:
    """The page is not loaded anew: whatever was held down, or half done, a new page would look and act the same."""
    name = "ladder-medium-01"
    task, made = Task("ladder", name, 3), layout(name, 3)
    here = right(made.pages[0])
    leavings: list[list[a.Action]] = [
        [], [a.Button(here, mode="down")], [a.Keys(("Shift_L", "Control_L"), mode="down")], [a.Click(here, "right")],
        [a.Click(here, count=3)], [a.Drag((here, middle(8))), a.Button(None, mode="down")], [a.Scroll(here, 0, 9)],
        [a.Click(middle(cell)) for cell in range(9)],
    ]  # fmt: skip
    env, expected = await LadderEnv.open(browser, OPTIONS, SCREEN), None
    for actions in leavings:
        await env.reset(Task("ladder", "ladder-hard-01", 1))
        for action in actions:
            await env.act(action)
        seen = [(await env.reset(task)).image.sha256]
        for page in made.pages[:-1]:
            seen.append((await env.act(a.Click(right(page)))).image.sha256)
        assert (await env.act(a.Click(right(made.pages[-1])))).reward == 1.0
        expected = expected or seen
        assert seen == expected, actions


async def test_a_page_that_was_left_has_lost(env: LadderEnv) -> None:
    task = Task("ladder", "ladder-easy-01", 1)
    start = await env.reset(task)
    await env.page.navigate("about:blank")
    left = await env.act(a.Observe())
    assert (left.done, left.reward) == (True, 0.0)
    assert (await env.reset(task)).image.sha256 == start.image.sha256


async def test_another_name(env: LadderEnv) -> None:
    with pytest.raises(UserError, match="no task 'ladder-easy-16'"):
        await env.reset(Task("ladder", "ladder-easy-16", 1))


async def test_it_conforms() -> None:
    await asyncio.to_thread(conform, "ladder", "ladder-easy-01", "ladder-medium-01", "ladder-hard-01", screen=SCREEN)
    await asyncio.to_thread(conform, "ladder", "ladder-hard-02")


async def test_a_page_collects_its_garbage_now_and_then(env: LadderEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "EPISODES_PER_COLLECTION", 3)
    alive = []
    for seed in range(3):
        await env.reset(Task("ladder", "ladder-easy-01", seed))
        if seed == 0:
            await env.page.evaluate("globalThis.garbage = new WeakRef(new Array(100).fill('some')), 0")
        alive.append(await env.page.evaluate("garbage.deref() !== undefined"))
    assert alive == [True, True, False]
