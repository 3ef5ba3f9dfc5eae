"""Whatever a page does, the driver gives a screenshot in time and does what a person's hands would have done."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from PIL import Image

from dart.core import action as a
from dart.workers.env.browser import Browser, Page, PageTimeout
from dart.workers.env.inputs import InputDevices

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
SCREEN = (160, 210)
RED, GREEN = (255, 0, 0), (0, 255, 0)
MIDDLE = a.Point(0.5, 0.5)
CLICK, DOWN, RETURN = a.Click(MIDDLE), a.Keys(("Down",)), a.Keys(("Return",))
DRAG = a.Drag((a.Point(0.1, 0.1), a.Point(0.8, 0.8)))
DONE = "<body style='background:rgb(0,255,0)'>"
FULL = "position:fixed;inset:0;width:160px;height:210px"
SELECT = f"<select id=s style='{FULL};display:block!important'><option>a<option>b</select>"
DRAGGED = """<div draggable=true style='width:50px;height:50px'>d</div>
<div style='position:fixed;left:80px;top:100px;width:80px;height:110px'>e</div><script>seen = [];
for (const type of ['dragstart', 'dragover', 'drop', 'dragend', 'mouseup']) addEventListener(type, event => {
  if (type === 'CANCELS') event.preventDefault();
  if (seen.at(-1) !== type) seen.push(type);
})</script>"""


def clicked(script: str) -> str:
    return (
        f"<body style='background:rgb(255,0,0);margin:0;height:100vh'><script>onclick = event => {{{script}}}</script>"
    )


def red(body: str) -> str:
    return clicked("") + body


@dataclass(frozen=True)
class Case:
    """A page, what is done on it, and then: a value, and the colour of what is shown, if they are known."""

    name: str
    page: str
    actions: tuple[a.Action, ...] = (CLICK,)
    value: tuple[str, object] | None = None
    colour: tuple[int, int, int] | None = None


def goes(name: str, script: str, colour: tuple[int, int, int] | None = GREEN, *more: a.Action) -> Case:
    return Case(name, clicked(script), (CLICK, *more), None, colour)


LATER = "document.body.style.background = 'rgb(0,255,0)'"
CASES = (
    goes("a link", "location = '/done'"),
    goes("a link to a server that takes 0.3 s", "location = '/done?0.3'"),
    goes("a link to a server that takes 20 s", "location = '/done?20'", RED),
    goes("a link to a page whose style sheet takes 0.3 s", "location = '/style?0.3'"),
    goes("a link to a page whose style sheet never comes", "location = '/style?60'", RED),
    goes("a link to a page whose first script never comes", "location = '/script?60'", RED),
    goes("a link to a page whose picture never comes", "location = '/picture?60'"),
    goes("a link followed a moment later", "setTimeout(() => location = '/done?0.2')"),
    goes("a link to a page that goes on to another", "location = '/hop'"),
    goes("a request for what is shown", f"fetch('/done?0.2').then(() => {LATER})"),
    goes("two requests, one after the other", f"fetch('/done?0.1').then(() => fetch('/done?0.1')).then(() => {LATER})"),
    goes("a request that is never answered", "fetch('/done?60')", RED),
    goes("an XMLHttpRequest", f"x = new XMLHttpRequest(); x.open('GET', '/done'); x.onload = () => {LATER}; x.send()"),
    goes("leaving is not confirmed by the page", "onbeforeunload = e => e.preventDefault(); location = '/done'"),
    goes("an error page of the browser", "location = 'http://127.0.0.1:1/'", None),
    goes("a new window", "open('/done')"),
    goes("a new window that the page writes", "open('').document.write(`<body style='background:rgb(0,255,0)'>`)"),
    goes("a new window closed by Ctrl+W", "open('/done')", RED, a.Keys(("Control_L", "w"))),
    goes("a new window closed by the page", "w = open('/done'); setTimeout(() => w.close(), 200)", RED, a.Wait(0.6)),
    goes("thirty new windows", "for (let i = 0; i < 30; i++) open('/done')", None),
    goes("a view transition", f"document.startViewTransition(() => {LATER})", GREEN, a.Wait(0.6)),
    goes("full screen", "document.body.requestFullscreen()", None, a.Observe()),
    goes("the pointer locked", "document.body.requestPointerLock()", RED, CLICK, DRAG),
    goes("printing", "print()", RED),
    goes("frames without end", f"(f = () => {{ {LATER}; requestAnimationFrame(f) }})()"),
    goes("a document that grows without end", "(f = () => { document.body.append('x'); setTimeout(f) })()", None),
    Case("a form", red(f"<form method=post action='/done?0.2'><button style='{FULL}'>"), colour=GREEN),
    Case("a download", red(f"<a href='/file' style='{FULL}'>d</a>"), value=("location.pathname", "/"), colour=RED),
    Case("a link in a new tab", red(f"<a target=_blank href='/done' style='{FULL}'>t</a>"), colour=GREEN),
    Case("a file chooser", red(f"<input type=file style='{FULL}'>"), (CLICK, CLICK)),
    Case("a select", red(SELECT), (CLICK, DOWN, RETURN), ("s.value", "b")),
    Case(
        "a select in a frame",
        red(f"<iframe id=f style='{FULL};border:0' srcdoc=\"{SELECT}\"></iframe>"),
        (CLICK, DOWN, RETURN),
        ("f.contentDocument.getElementById('s').value", "b"),
    ),
    *(
        Case(
            f"a select in a shadow root that is {mode}",
            red(f"<div id=h></div><script>r = h.attachShadow({{mode: '{mode}'}}); r.innerHTML = `{SELECT}`</script>"),
            (CLICK, DOWN, RETURN),
            ("r.querySelector('select').value", "b"),
        )
        for mode in ("open", "closed")
    ),
    Case("a date", red(f"<input id=s type=date style='{FULL}'>"), (a.Click(a.Point(0.95, 0.5)), DOWN, RETURN)),
    Case("a drop", red(DRAGGED.replace("CANCELS", "dragover")), (DRAG,),
         ("seen", ["dragstart", "dragover", "drop", "dragend"])),
    Case("a drop where nothing may be dropped", red(DRAGGED), (DRAG, CLICK),
         ("seen", ["dragstart", "dragover", "dragend", "mouseup"])),
    Case("a drag that the page cancels", red(DRAGGED.replace("CANCELS", "dragstart")), (DRAG,),
         ("seen", ["dragstart", "mouseup"])),
    Case("dialogs", clicked("said = [prompt('name', 'Ada'), confirm('sure?'), alert('!') ?? 0]"),
         value=("said", ["Ada", True, 0])),
    Case("functions of the browser that the page has replaced", clicked("done = 1") + """<script>
         for (const name of ['setTimeout', 'requestAnimationFrame', 'Promise', 'JSON', 'Array']) window[name] = null;
         document.querySelectorAll = addEventListener = null</script>""", value=("done", 1)),
    Case("the run's language and time zone", red(""), value=(
         "[Intl.DateTimeFormat().resolvedOptions().timeZone, new Date(0).getHours(), navigator.language]",
         ["UTC", 0, "en-US"])),
)  # fmt: skip
ANSWERS = {
    "/done": DONE,
    "/style": f"<link rel=stylesheet href='/x.css?DELAY'>{DONE}",
    "/script": f"<head><script src='/x.js?DELAY'></script></head>{DONE}",
    "/picture": f"{DONE}<img src='/x.png?DELAY'>",
    "/hop": "<script>location = '/done?0.2'</script>",
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        target = (await reader.readline()).decode().split()[1]
        while (await reader.readline()).strip():
            pass
        path, _, delay = target.partition("?")
        page = CASES[int(delay)].page if path == "/" else ANSWERS.get(path, "").replace("DELAY", delay)
        if path not in ("/", "/style", "/script", "/picture"):
            await asyncio.sleep(float(delay or 0))
        kind = "text/css" if path == "/x.css" else "text/html"
        more = "Content-Disposition: attachment\r\n" if path == "/file" else ""
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
        )
        writer.write((head + page).encode())
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"TZ": "Asia/Tokyo", "LANG": "de_DE.UTF-8", "LANGUAGE": "de"}.items():
            patched.setenv(name, value)
        async with Browser.launch() as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[str]:
    made = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
    made.close()


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


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
async def test_a_page_does_what_it_does_for_a_person(browser: Browser, server: str, number: int) -> None:
    case = CASES[number]
    page = await browser.new_page(SCREEN, 30.0)
    try:
        await page.navigate(f"{server}/?{number}")
        colour = await do(page, *case.actions)
        assert case.colour in (None, colour)
        if case.value is not None:
            expression, value = case.value
            assert await page.evaluate(expression) == value
        assert not page.broken
    finally:
        await page.close()


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


async def test_a_page_that_never_draws_is_shown_once_its_loading_is_stopped(browser: Browser, server: str) -> None:
    page = await browser.new_page(SCREEN, 4.0)
    began = time.monotonic()
    await page.navigate(f"{server}/style?60")
    assert await do(page) == GREEN
    assert time.monotonic() - began < 40.0, "a hang guard: the style sheet itself takes 60 s"
    await page.close()
