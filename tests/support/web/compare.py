"""The driver and Playwright in the same Chromium on the pages of web/pages.py, by hand:

    python -m tests.support.web.compare [ROUNDS]

For each page: whether both did what is right, and the median seconds that its actions and screenshots took. Then the
same for another page's clicks beside one whose work does not end. It needs Playwright, of the extra dev.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from PIL import Image
from playwright.async_api import Browser as Chromium
from playwright.async_api import Error, async_playwright

from dart.core import action as a
from dart.workers.env.browser import Browser
from dart.workers.env.devtools import FLAGS, LANGUAGE, SURROUNDINGS, find_executable
from dart.workers.env.inputs import DRAG_STEPS, NOTCH_PIXELS, InputDevices
from dart.worlds.contract import EnvironmentFailure
from tests.support.web.pages import CASES, CLICK, SCREEN, Case, serving

KEYS = {"Control_L": "Control", "Return": "Enter", "Down": "ArrowDown"}
MOST_SECONDS = 15.0
Step = Callable[[a.Action], Awaitable[bytes]]
Opened = tuple[Callable[[str], Awaitable[object]], Callable[[str], Awaitable[object]], Step]


@contextlib.asynccontextmanager
async def ours(browser: Browser) -> AsyncIterator[Opened]:
    page, devices = await browser.new_page(SCREEN, MOST_SECONDS), InputDevices(SCREEN)

    async def step(action: a.Action) -> bytes:
        if calls := devices.calls(action):
            await page.input(calls)
        await page.pass_time(action.seconds if isinstance(action, a.Wait) else 0.0)
        return await page.screenshot()

    try:
        yield page.navigate, page.evaluate, step
    finally:
        await page.close()


@contextlib.asynccontextmanager
async def theirs(browser: Chromium) -> AsyncIterator[Opened]:
    context = await browser.new_context(viewport={"width": SCREEN[0], "height": SCREEN[1]})
    context.set_default_timeout(3_000)
    context.on("dialog", lambda dialog: dialog.accept(dialog.default_value))
    page = await context.new_page()

    async def step(action: a.Action) -> bytes:
        mouse, keyboard = context.pages[-1].mouse, context.pages[-1].keyboard
        match action:
            case a.Click(at, button, count):
                await mouse.click(*at.pixels(*SCREEN), button=button, click_count=count)
            case a.Move(at) | a.Scroll(at):
                await mouse.move(*at.pixels(*SCREEN))
                if isinstance(action, a.Scroll):
                    await mouse.wheel(action.dx * NOTCH_PIXELS, action.dy * NOTCH_PIXELS)
            case a.Drag((start, end)):
                await mouse.move(*start.pixels(*SCREEN))
                await mouse.down()
                await mouse.move(*end.pixels(*SCREEN), steps=DRAG_STEPS)
                await mouse.up()
            case a.Keys(names):
                await keyboard.press("+".join(KEYS.get(name, name) for name in names))
            case a.TypeText(text):
                await keyboard.type(text)
            case a.Wait(seconds):
                await asyncio.sleep(seconds)
        return await context.pages[-1].screenshot()

    try:
        yield page.goto, page.evaluate, step
    finally:
        with contextlib.suppress(TimeoutError, Error):
            await asyncio.wait_for(context.close(), 3)


async def attempt(opening: contextlib.AbstractAsyncContextManager[Opened], case: Case, url: str) -> tuple[bool, float]:
    began = time.monotonic()
    with contextlib.suppress(TimeoutError, Error, EnvironmentFailure):
        async with opening as (navigate, evaluate, step), asyncio.timeout(MOST_SECONDS):
            await navigate(url)
            await step(a.Observe())
            began = time.monotonic()
            for action in case.actions:
                seen = await step(action)
            took = time.monotonic() - began
            colour = Image.open(io.BytesIO(seen)).convert("RGB").getpixel((150, 200))
            value = case.value is None or await evaluate(case.value[0]) == case.value[1]
            return value and case.colour in (None, colour), took
    return False, time.monotonic() - began


async def beside_endless(name: str, endless: Opened, other: Opened) -> None:
    async def median() -> float:
        took = [time.monotonic()]
        for _ in range(20):
            await other[2](CLICK)
            took.append(time.monotonic())
        return statistics.median(after - before for before, after in itertools.pairwise(took))

    free = await median()
    await endless[1]("onclick = () => { while (true); }; 0")
    hanging = asyncio.ensure_future(endless[2](CLICK))
    await asyncio.sleep(0.5)
    beside = await median()
    print(f"{name}: a step takes {free:.3f} s, and {beside:.3f} s while a page hangs ({not hanging.done()})")
    hanging.cancel()
    await asyncio.wait([hanging])


async def main(rounds: int) -> None:
    flags, ratios = [flag for flag in (*FLAGS, *LANGUAGE) if flag != "--remote-debugging-pipe"], []
    async with serving() as server, Browser.launch() as browser, async_playwright() as driver:
        path = find_executable(None)
        chromium = await driver.chromium.launch(executable_path=path, args=flags, env={**SURROUNDINGS})
        for number, case in enumerate(CASES):
            pairs = [
                [await attempt(way, case, f"{server}/?{number}") for way in (ours(browser), theirs(chromium))]
                for _ in range(rounds)
            ]
            right = [all(pair[who][0] for pair in pairs) for who in (0, 1)]
            took = [statistics.median(pair[who][1] for pair in pairs) for who in (0, 1)]
            print(*right, *(f"{seconds:.3f}" for seconds in took), f"{took[0] / took[1]:.2f}", case.name, flush=True)
            ratios += [(took[0] / took[1], case.name)] if all(right) else []
        median = statistics.median(ratio for ratio, _ in ratios)
        print(f"{len(ratios)} right in both: median ratio {median:.2f}, worst {max(ratios)}")
        for name, opening, it in (("ours", ours, browser), ("Playwright", theirs, chromium)):
            async with opening(it) as endless, opening(it) as other:  # type: ignore[operator]
                await beside_endless(name, endless, other)
        await chromium.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
