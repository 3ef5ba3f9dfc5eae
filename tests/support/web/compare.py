"""Compares the driver with Playwright in the same Chromium, on the pages of web/pages.py. By hand, and nothing else:

    python -m tests.support.web.compare [ROUNDS]

Each page is opened by both in turn, once a round. Printed for each: whether what came out was right, the median seconds
of both from the first screenshot to the last, and their ratio. Then: how long another page's steps take while a page
does not end its work, and while it does nothing. It needs Playwright, of the extra dev.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from PIL import Image
from playwright.async_api import Browser as Theirs
from playwright.async_api import BrowserContext, Error, async_playwright

from dart.core import action as a
from dart.workers.env.browser import Browser
from dart.workers.env.devtools import FLAGS, LANGUAGE, SURROUNDINGS, find_executable
from dart.workers.env.inputs import DRAG_STEPS, NOTCH_PIXELS, InputDevices
from dart.worlds.contract import EnvironmentFailure
from tests.support.web.pages import CASES, CLICK, SCREEN, Case, serving

KEYS = {"Control_L": "Control", "Return": "Enter", "Down": "ArrowDown"}
ENDLESS = "onclick = () => { while (true); }; 0"
STEPS = 20


def colour(png: bytes) -> object:
    with Image.open(io.BytesIO(png)) as picture:
        return picture.convert("RGB").getpixel((150, 200))


def right(case: Case, shown: object, value: object) -> bool:
    return case.colour in (None, shown) and (case.value is None or case.value[1] == value)


async def ours(browser: Browser, case: Case, url: str) -> tuple[bool, float]:
    page, devices = await browser.new_page(SCREEN, 10.0), InputDevices(SCREEN)
    try:
        await page.navigate(url)
        await page.screenshot()
        began = time.monotonic()
        for action in case.actions:
            if calls := devices.calls(action):
                await page.input(calls)
            await page.pass_time(action.seconds if isinstance(action, a.Wait) else 0.0)
            seen = await page.screenshot()
        took = time.monotonic() - began
        return right(case, colour(seen), await page.evaluate(case.value[0]) if case.value else None), took
    finally:
        await page.close()


async def act(context: BrowserContext, action: a.Action) -> None:
    page = context.pages[-1]
    match action:
        case a.Click(at, button, count):
            await page.mouse.click(*at.pixels(*SCREEN), button=button, click_count=count)
        case a.Move(at):
            await page.mouse.move(*at.pixels(*SCREEN))
        case a.Drag((start, end)):
            await page.mouse.move(*start.pixels(*SCREEN))
            await page.mouse.down()
            await page.mouse.move(*end.pixels(*SCREEN), steps=DRAG_STEPS)
            await page.mouse.up()
        case a.Scroll(at, dx, dy):
            await page.mouse.move(*at.pixels(*SCREEN))
            await page.mouse.wheel(dx * NOTCH_PIXELS, dy * NOTCH_PIXELS)
        case a.Keys(names):
            await page.keyboard.press("+".join(KEYS.get(name, name) for name in names))
        case a.TypeText(text):
            await page.keyboard.type(text)
        case a.Wait(seconds):
            await asyncio.sleep(seconds)


async def theirs(browser: Theirs, case: Case, url: str) -> tuple[bool, float]:
    context = await browser.new_context(viewport={"width": SCREEN[0], "height": SCREEN[1]})
    context.set_default_timeout(10_000)
    context.on("dialog", lambda dialog: dialog.accept(dialog.default_value))
    page, began = await context.new_page(), 0.0
    try:
        await page.goto(url)
        await page.screenshot()
        began = time.monotonic()
        for action in case.actions:
            await act(context, action)
            seen = await context.pages[-1].screenshot()
        took = time.monotonic() - began
        return right(case, colour(seen), await page.evaluate(case.value[0]) if case.value else None), took
    finally:
        with contextlib.suppress(TimeoutError, Error):
            await asyncio.wait_for(context.close(), 10)


async def tried(attempt: Awaitable[tuple[bool, float]]) -> tuple[bool, float]:
    """One that has not ended in 30 s has failed; all that fail count with the time that it took to know it."""
    began = time.monotonic()
    try:
        return await asyncio.wait_for(attempt, 30)
    except (TimeoutError, Error, EnvironmentFailure):
        return False, time.monotonic() - began


async def steps(step: Callable[[], Awaitable[object]]) -> float:
    took = []
    for _ in range(STEPS):
        began = time.monotonic()
        await step()
        took.append(time.monotonic() - began)
    return statistics.median(took)


async def beside_endless(browser: Browser, chromium: Theirs) -> None:
    """The step is a click and a screenshot of another page; the endless page's own click is not waited for."""
    endless, other = [await browser.new_page(SCREEN, 60.0) for _ in range(2)]
    devices = InputDevices(SCREEN)

    async def our_step() -> None:
        await other.input(devices.calls(CLICK))
        await other.screenshot()

    contexts = [await chromium.new_context(viewport={"width": SCREEN[0], "height": SCREEN[1]}) for _ in range(2)]
    their_endless, their_other = [await context.new_page() for context in contexts]

    async def their_step() -> None:
        await their_other.mouse.click(80, 105)
        await their_other.screenshot()

    for name, step, page in (("ours", our_step, endless), ("Playwright", their_step, their_endless)):
        free = await steps(step)
        await page.evaluate(ENDLESS)
        click = endless.input(devices.calls(CLICK)) if page is endless else their_endless.mouse.click(80, 105)
        hanging = asyncio.ensure_future(click)
        await asyncio.sleep(0.5)
        beside = await steps(step)
        print(f"{name}: a step {free * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms beside an endless page, "
              f"hanging then: {not hanging.done()}")  # fmt: skip
        hanging.cancel()
        await asyncio.wait([hanging])
        if page is endless:
            await endless.close()


async def main(rounds: int) -> None:
    flags = [flag for flag in (*FLAGS, *LANGUAGE) if flag not in ("--headless", "--remote-debugging-pipe")]
    ratios: list[tuple[float, str]] = []
    async with serving() as server, Browser.launch() as browser, async_playwright() as driver:
        executable = find_executable(None)
        chromium = await driver.chromium.launch(executable_path=executable, args=flags, env=SURROUNDINGS)
        for number, case in enumerate(CASES):
            url, got = f"{server}/?{number}", ([], [])  # type: tuple[str, tuple[list[tuple[bool, float]], ...]]
            for _ in range(rounds):
                got[0].append(await tried(ours(browser, case, url)))
                got[1].append(await tried(theirs(chromium, case, url)))
            (us, we), (them, they) = ((all(ok for ok, _ in g), statistics.median(t for _, t in g)) for g in got)
            marks = f"{'right' if us else 'WRONG'} {'right' if them else 'WRONG'}"
            print(f"{marks} {we:7.3f} {they:7.3f} {we / they:6.2f}  {case.name}", flush=True)
            if us and them:
                ratios.append((we / they, case.name))
        print(f"where both are right ({len(ratios)} of {len(CASES)}): median ratio "
              f"{statistics.median(r for r, _ in ratios):.2f}, worst {max(ratios)}")  # fmt: skip
        await beside_endless(browser, chromium)
        await chromium.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
