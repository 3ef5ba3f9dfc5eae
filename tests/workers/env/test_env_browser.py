"""A real Chromium: pages crash, hang and die alone; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dart.errors import UserError
from dart.workers.env import browser as browser_module
from dart.workers.env import devtools
from dart.workers.env.browser import Browser, EnvironmentFailure, Page, PageCrashed, PageTimeout
from dart.workers.env.devtools import Profile

pytestmark = pytest.mark.browser
VIEWPORT = (160, 210)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with Browser.launch() as running:
        yield running


async def show(page: Page, html: str) -> None:
    await page.navigate("about:blank")
    await page.evaluate(f"document.body.innerHTML = {html!r}")


async def test_no_chromium_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devtools, "EXECUTABLES", ("no-such-browser",))
    with pytest.raises(UserError, match="apt-get install chromium-headless-shell"):
        async with Browser.launch():
            pass
    with pytest.raises(UserError, match=r"environment\.options\.browser is '/no/chromium'"):
        async with Browser.launch("/no/chromium"):
            pass


async def test_a_program_that_is_no_browser_is_reported(tmp_path: Path) -> None:
    impostor = tmp_path / "chromium"
    impostor.write_text("#!/bin/sh\necho 'I am no browser' >&2\nexit 3\n")
    impostor.chmod(0o755)
    with pytest.raises(UserError, match=r"did not start.*I am no browser"):
        async with Browser.launch(str(impostor)):
            pass


async def test_a_browser_that_the_machine_has_no_room_for_is_not_said_to_be_missing(tmp_path: Path) -> None:
    short = tmp_path / "chromium"
    short.write_text("#!/bin/sh\necho 'pipe: Too many open files (24)' >&2\nexit 3\n")
    short.chmod(0o755)
    with pytest.raises(UserError, match="too many open files: the limit of this process is") as refused:
        async with Browser.launch(str(short)):
            pass
    assert "apt-get" not in str(refused.value)
    assert refused.value.exit_code == 1, "the worker is started again"


async def test_pages_draw_and_take_input(browser: Browser) -> None:
    page = await browser.new_page(VIEWPORT, 10.0)
    await show(page, "<div style='position:fixed;inset:0;background:lime' onmousemove='window.moved=event.x'>")
    before = await page.screenshot()
    move = {"type": "mouseMoved", "x": 33, "y": 44, "button": "none", "buttons": 0, "modifiers": 0}
    await page.input([("Input.dispatchMouseEvent", move)])
    assert await page.evaluate("window.moved") == 33
    await page.evaluate("document.querySelector('div').style.background = 'red'")
    after = await page.screenshot()
    assert before[:8] == after[:8] == b"\x89PNG\r\n\x1a\n"
    assert before != after


async def test_the_wheel_scrolls_and_time_runs_animations(browser: Browser) -> None:
    page = await browser.new_page(VIEWPORT, 10.0)
    await show(page, "<div id='box' style='height:100px;overflow:auto'><div style='height:900px'></div></div>")
    wheel = {"type": "mouseWheel", "x": 50, "y": 50, "deltaX": 0, "deltaY": 106, "buttons": 0, "modifiers": 0}
    await page.input([("Input.dispatchMouseEvent", wheel)])
    assert await page.evaluate("document.getElementById('box').scrollTop") == 106
    await page.evaluate(
        "window.frames_seen = 0; (f => f(f))(f => { frames_seen++; requestAnimationFrame(() => f(f)); })"
    )
    before = await page.evaluate("frames_seen")
    await page.pass_time(0.3)
    assert await page.evaluate("frames_seen") > before + 1


async def test_a_crash_ends_one_page_and_the_others_go_on(browser: Browser) -> None:
    doomed, healthy = await browser.new_page(VIEWPORT, 10.0), await browser.new_page(VIEWPORT, 10.0)
    waiting = asyncio.ensure_future(doomed.evaluate("new Promise(() => {})", wait=True))
    await asyncio.sleep(0)
    with pytest.raises(PageCrashed):
        await doomed.call("Page.crash")
    with pytest.raises(PageCrashed):
        await waiting
    with pytest.raises(PageCrashed):
        await doomed.evaluate("1")
    await doomed.close()
    assert await healthy.evaluate("6 * 7") == 42
    assert await healthy.screenshot()


@pytest.mark.parametrize("hang", ["while (true);", "requestAnimationFrame(() => { while (true); }); 0"])
async def test_a_hang_ends_one_page_and_the_others_go_on(browser: Browser, hang: str) -> None:
    hanging, healthy = await browser.new_page(VIEWPORT, 10.0), await browser.new_page(VIEWPORT, 10.0)
    hanging.timeout = 1.0

    async def go_on() -> int:
        count = 0
        while await healthy.screenshot() and not hanging.broken:
            count += 1
        return count

    async def stop() -> None:
        with pytest.raises(PageTimeout):
            await hanging.evaluate(hang)
            await hanging.screenshot()
        assert hanging.broken
        await hanging.close()

    async with asyncio.TaskGroup() as tasks:
        pictures = tasks.create_task(go_on())
        tasks.create_task(stop())
    assert pictures.result() > 0, "taken while the other page hung"
    assert await healthy.screenshot()


async def test_cancelling_a_screenshot_leaves_the_others_their_frames(browser: Browser) -> None:
    first, second = await browser.new_page(VIEWPORT, 5.0), await browser.new_page(VIEWPORT, 5.0)
    for _ in range(10):
        shot = asyncio.ensure_future(first.screenshot())
        await asyncio.sleep(0.0005)
        shot.cancel()
        assert await second.screenshot()
    assert await first.screenshot()


async def test_a_dialog_box_does_not_stop_the_page(browser: Browser) -> None:
    page = await browser.new_page(VIEWPORT, 5.0)
    assert await page.evaluate("alert('hello'); 'went on'") == "went on"


async def test_chromium_is_started_again(browser: Browser) -> None:
    page = await browser.new_page(VIEWPORT, 10.0)
    pid = browser.pid
    os.killpg(pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailure):
        await page.evaluate("new Promise(() => {})", wait=True)
    await page.close()
    again = await browser.new_page(VIEWPORT, 10.0)
    assert browser.pid != pid
    assert await again.screenshot()


async def test_chromium_that_hangs_is_started_again(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_module, "SIGN_OF_LIFE_SECONDS", 0.5)
    page = await browser.new_page(VIEWPORT, 10.0)
    pid = browser.pid
    os.killpg(pid, signal.SIGSTOP)
    with pytest.raises(PageTimeout):
        await browser.new_page(VIEWPORT, 0.5)
    assert page.broken
    again = await browser.new_page(VIEWPORT, 10.0)
    assert browser.pid != pid
    assert await again.screenshot()


async def test_nothing_is_left_when_it_ends() -> None:
    async with Browser.launch() as browser:
        await browser.new_page(VIEWPORT, 10.0)
        profile = _profile(browser.pid)
        assert len(_using(profile)) > 1 and Path(profile).is_dir()
    assert not _using(profile)
    assert not Path(profile).exists()


_PARENT = """
import asyncio
from dart.workers.env.browser import Browser
async def main():
    async with Browser.launch() as browser:
        page = await browser.new_page((160, 210), 10.0)
        print(browser.pid, flush=True)
        await page.evaluate("while (true);") if HANG else await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("hang", [False, True])
def test_nothing_is_left_when_the_parent_is_killed(hang: bool) -> None:
    code = _PARENT.replace("HANG", str(hang))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        profile = _profile(pid)
        chromium = [psutil.Process(number) for number in _using(profile)]
        assert len(chromium) > 1
        time.sleep(0.3 if hang else 0)
        parent.kill()
    _, alive = psutil.wait_procs(chromium, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert Path(profile).exists()
    another, last = Profile(), Profile()
    assert not Path(profile).exists(), "the next one clears away what nobody owns"
    assert another.folder.exists(), "and leaves alone what somebody does"
    another.remove()
    last.remove()


def _profile(pid: int) -> str:
    return next(
        argument.removeprefix("--user-data-dir=")
        for argument in psutil.Process(pid).cmdline()
        if argument.startswith("--user-data-dir=")
    )


def _using(profile: str) -> list[int]:
    """Processes of the Chromium with this profile: they and their descendants name it."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(profile in argument for argument in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
