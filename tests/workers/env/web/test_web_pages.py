"""Whatever a page does, the driver gives a screenshot in time and does what a person's hands would have done."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from PIL import Image

from dart.core import action as a
from dart.workers.env import browser as browser_module
from dart.workers.env.browser import Browser, EnvironmentFailure, Page, PageTimeout
from dart.workers.env.inputs import InputDevices
from tests.support.web.pages import CASES, CLICK, GREEN, SCREEN, Case, serving

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
AT_ONCE = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8", "LANGUAGE": "de"}.items():
            patched.setenv(name, value)
        async with Browser.launch() as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[str]:
    async with serving() as address:
        yield address


async def do(page: Page, *actions: a.Action) -> tuple[int, ...]:
    """Carry the actions out, with a screenshot after each; the colour near the last one's lower edge."""
    devices, seen = InputDevices(SCREEN), await page.screenshot()
    for action in actions:
        if calls := devices.calls(action):
            await page.input(calls)
        await page.pass_time(action.seconds if isinstance(action, a.Wait) else 0.0)
        seen = await page.screenshot()
    with Image.open(io.BytesIO(seen)) as picture:
        assert picture.size == SCREEN
        colour: tuple[int, ...] = picture.convert("RGB").getpixel((150, 200))  # type: ignore[assignment]
    return colour


async def outcome(browser: Browser, url: str, case: Case) -> tuple[tuple[int, ...] | None, object]:
    """The colour and the value, as far as they are known, once the case's actions are done."""
    page = await browser.new_page(SCREEN, 30.0)
    try:
        await page.navigate(url)
        colour = await do(page, *case.actions)
        value = case.value and (case.value[0], await page.evaluate(case.value[0]))
        assert not page.broken
        return case.colour and colour, value
    finally:
        await page.close()


async def test_pages_do_what_they_do_for_a_person(
    browser: Browser, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("INPUT_SECONDS", "REST_SECONDS", "REQUEST_SECONDS"):
        monkeypatch.setattr(browser_module, bound, 3.0)  # a busy machine answers late
    few = asyncio.Semaphore(AT_ONCE)

    async def wrong(number: int, case: Case) -> str | None:
        async with few:
            try:
                seen = await outcome(browser, f"{server}/?{number}", case)
            except EnvironmentFailure as failure:
                return f"{case.name}: {failure!r}"
        return None if seen == (case.colour, case.value) else f"{case.name}: {seen}, not {case.colour, case.value}"

    said = await asyncio.gather(*(wrong(number, case) for number, case in enumerate(CASES)))
    assert [why for why in said if why] == []


async def test_work_without_end_ends_the_page_s_own_attempt_alone(browser: Browser) -> None:
    endless, other = await browser.new_page(SCREEN, 2.0), await browser.new_page(SCREEN, 30.0)
    await endless.evaluate("onclick = () => { while (true); }; 0")

    async def hang() -> None:
        with pytest.raises(PageTimeout):
            await do(endless, CLICK)

    async with asyncio.TaskGroup() as tasks:
        hanging, pictures = tasks.create_task(hang()), 0
        while not hanging.done():
            await other.screenshot()
            pictures += 1
    assert pictures > 3 and endless.broken and not other.broken
    await endless.close()
    await other.close()


@pytest.mark.parametrize(("first", "left"), [("", (255, 255, 255)), ("open('ADDRESS/done');", GREEN)])
async def test_when_the_first_tab_closes_itself_what_is_left_is_shown(
    browser: Browser, server: str, first: str, left: tuple[int, ...]
) -> None:
    page = await browser.new_page(SCREEN, 30.0)
    await page.evaluate(f"onclick = () => {{ {first.replace('ADDRESS', server)} close() }}; 0")
    assert await do(page, CLICK, CLICK) == left
    await page.navigate(f"{server}/done")
    assert await do(page, CLICK) == GREEN
    await page.close()


@pytest.mark.parametrize("script", ["fetch('/done?60')", "location = '/picture?60'"])
async def test_what_is_never_answered_is_not_waited_for_as_long_as_a_new_document(
    browser: Browser, server: str, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(browser_module, "REST_SECONDS", 60.0)
    page = await browser.new_page(SCREEN, 30.0)
    await page.navigate(f"{server}/done")
    await page.evaluate(f"onclick = () => {{ {script} }}; 0")
    async with asyncio.timeout(30.0):
        assert await do(page, CLICK) == GREEN
    await page.close()


async def test_a_page_that_never_draws_is_shown_once_its_loading_is_stopped(browser: Browser, server: str) -> None:
    page = await browser.new_page(SCREEN, 4.0)
    began = time.monotonic()
    await page.navigate(f"{server}/style?60")
    assert await do(page) == GREEN
    assert time.monotonic() - began < 40.0, "a hang guard: the style sheet itself takes 60 s"
    await page.close()
