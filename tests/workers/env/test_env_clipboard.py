"""Each page of a Chromium has a clipboard of its own, with real keys: nothing comes from another page or episode."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dart.core import action as a
from dart.core.types import Task
from dart.workers.env.browser import Browser, Page
from dart.workers.env.inputs import InputDevices
from dart.workers.env.miniwob import MiniWobEnv, MiniWobOptions

pytestmark = pytest.mark.browser
SCREEN = (160, 210)
ALL, COPY, CUT, PASTE = (a.Keys(("Control_L", key)) for key in "acxv")
BODY = """<style>* { position: fixed; left: 0; width: 150px; height: 20px; margin: 0; padding: 0 }</style>
<input id=from style='top:0'><input id=to style='top:40px'>
<textarea id=lines style='top:80px;height:40px'></textarea><p style='top:140px'>plain words</p>"""
FROM, TO, LINES, WORDS = (a.Point(0.1, y / 210) for y in (10, 50, 100, 150))


class Hands:
    """Real mouse and keyboard events on a page with two lines, a field of several, and some text."""

    def __init__(self, page: Page) -> None:
        self.page, self._devices = page, InputDevices(SCREEN)

    @classmethod
    async def on(cls, page: Page, body: str = BODY) -> Hands:
        await page.evaluate(f"document.body.innerHTML = {body!r}")
        return cls(page)

    async def do(self, *actions: a.Action) -> None:
        for action in actions:
            await self.page.input(self._devices.calls(action))
            await asyncio.sleep(0)

    async def value(self, field: str) -> str:
        return str(await self.page.evaluate(f"document.getElementById('{field}').value"))

    async def copy(self, text: str) -> None:
        await self.do(a.Click(FROM), ALL, a.TypeText(text), ALL, COPY)

    async def pasted(self, place: a.Point = TO, field: str = "to") -> str:
        """What replaces all that is in a field."""
        await self.do(a.Click(place), ALL, a.Keys(("BackSpace",)), PASTE)
        return await self.value(field)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with Browser.launch() as running:
        yield running


@pytest.fixture
async def hands(browser: Browser) -> Hands:
    return await Hands.on(await browser.new_page(SCREEN, 30.0))


async def test_two_pages_that_copy_at_the_same_time_paste_their_own(browser: Browser) -> None:
    pages = [await Hands.on(await browser.new_page(SCREEN, 30.0)) for _ in range(2)]
    for turn in range(50):
        rng = random.Random(turn)

        async def work(place: int, rng: random.Random, turn: int) -> str:
            hands = pages[place]
            await hands.copy(f"p{place}t{turn}")
            for _ in range(rng.randrange(3)):
                await hands.do(a.Click(WORDS))
                await asyncio.sleep(rng.random() / 100)
            return await hands.pasted()

        found = await asyncio.gather(work(0, rng, turn), work(1, rng, turn))
        assert found == [f"p0t{turn}", f"p1t{turn}"]


async def test_cut_takes_the_text_away_and_undo_brings_it_back(hands: Hands) -> None:
    await hands.do(a.Click(FROM), a.TypeText("cut me"), ALL, CUT)
    assert await hands.value("from") == ""
    await hands.do(a.Keys(("Control_L", "z")))
    assert await hands.value("from") == "cut me"
    assert await hands.pasted() == "cut me"


async def test_text_of_the_page_is_copied_and_so_is_part_of_a_field(hands: Hands) -> None:
    await hands.do(a.Click(WORDS, count=2), COPY)
    assert (await hands.pasted()).strip() == "plain"
    await hands.do(a.Click(FROM), a.TypeText("first second"), a.Click(FROM, count=2), COPY)
    assert (await hands.pasted()).strip() == "first"
    await hands.do(a.Click(WORDS), COPY)
    assert (await hands.pasted()).strip() == "first", "with nothing selected a copy changes nothing"


async def test_all_of_a_page_s_text(browser: Browser) -> None:
    hands = await Hands.on(await browser.new_page(SCREEN, 30.0), "<p>one<p>two<p><textarea id=to></textarea>")
    await hands.do(ALL, COPY, a.Click(await middle(hands.page, "to")), PASTE)
    assert (await hands.value("to")).split() == ["one", "two"]


async def test_a_field_keeps_its_lines_or_has_one(hands: Hands) -> None:
    await hands.do(a.Click(LINES), a.TypeText("above\nbelow"), ALL, COPY)
    assert await hands.pasted() == "above below"
    assert await hands.pasted(LINES, "lines") == "above\nbelow"


async def test_the_older_keys_and_a_field_that_is_full(hands: Hands) -> None:
    await hands.page.evaluate("document.getElementById('to').maxLength = 4")
    await hands.do(a.Click(FROM), a.TypeText("letters"), ALL, a.Keys(("Control_L", "Insert")))
    await hands.do(a.Click(TO), a.Keys(("Shift_L", "Insert")))
    assert await hands.value("to") == "lett"
    await hands.do(a.Click(FROM), ALL, a.Keys(("Shift_L", "Delete")))
    assert await hands.value("from") == ""


async def test_a_password_is_not_copied(hands: Hands) -> None:
    await hands.copy("before")
    await hands.page.evaluate("document.getElementById('from').type = 'password'")
    await hands.do(a.Click(FROM), ALL, a.TypeText("secret"), ALL, COPY)
    assert await hands.pasted() == "before"


async def test_a_page_that_handles_the_events_itself_is_asked(hands: Hands) -> None:
    await hands.page.evaluate(
        """addEventListener('copy', event => {
          event.clipboardData.setData('text/plain', 'mine'); event.clipboardData.setData('x/own', 'too');
          event.preventDefault();
        });
        addEventListener('paste', event => {
          window.got = ['text/plain', 'x/own'].map(type => event.clipboardData.getData(type));
        });"""
    )
    await hands.copy("not this")
    assert await hands.pasted() == "mine"
    assert await hands.page.evaluate("got") == ["mine", "too"]
    await hands.page.evaluate("addEventListener('paste', event => event.preventDefault())")
    assert await hands.pasted() == ""


async def test_a_button_that_copies_or_cuts(browser: Browser) -> None:
    pages = [await Hands.on(await browser.new_page(SCREEN, 30.0)) for _ in range(2)]
    for place, hands in enumerate(pages):
        await hands.do(a.Click(FROM), a.TypeText(f"text {place}"))
    for command, left in (("copy", "text {}"), ("cut", "")):
        button = f"onclick = () => {{ document.getElementById('from').select(); document.execCommand('{command}'); }}"
        for hands in pages:
            await hands.page.evaluate(f"document.querySelector('p').{button}; 0")
        await asyncio.gather(*(hands.do(a.Click(WORDS)) for hands in pages))
        assert [await hands.pasted() for hands in pages] == ["text 0", "text 1"]
        assert [await hands.value("from") for hands in pages] == [left.format(place) for place in range(2)]


async def test_a_middle_click_brings_nothing_from_elsewhere(browser: Browser) -> None:
    mine, other = [await Hands.on(await browser.new_page(SCREEN, 30.0)) for _ in range(2)]
    await other.do(a.Click(FROM), a.TypeText("selected elsewhere"), ALL)
    await mine.do(a.Click(TO, "middle"))
    assert await mine.value("to") == ""


async def test_what_was_copied_is_there_after_a_page_load_and_in_a_frame(browser: Browser, tmp_path: Path) -> None:
    second = tmp_path / "second.html"
    second.write_text("<!doctype html><body></body>")
    hands = await Hands.on(await browser.new_page(SCREEN, 30.0))
    await hands.copy("carried over")
    await hands.page.navigate(second.as_uri())
    hands = await Hands.on(hands.page)
    assert await hands.pasted() == "carried over"
    await hands.page.evaluate(
        """new Promise(done => {
          const frame = document.createElement('iframe');
          frame.style = 'position: fixed; top: 80px; left: 0; width: 150px; height: 60px; border: 0';
          frame.srcdoc = '<body style="margin: 0"><input id=inner style="width: 140px; height: 50px">';
          frame.onload = () => { window.inner = frame.contentDocument.getElementById('inner'); done(); };
          document.body.append(frame);
        })""",
        wait=True,
    )
    await hands.do(a.Click(a.Point(0.2, 100 / 210)), PASTE)
    assert await hands.page.evaluate("inner.value") == "carried over"
    await hands.do(a.TypeText(" and back"), ALL, COPY)
    assert await hands.pasted() == "carried over and back"


async def test_an_episode_begins_with_an_empty_clipboard(browser: Browser) -> None:
    env = await MiniWobEnv.open(browser, MiniWobOptions(), SCREEN)
    fields = "[document.querySelector('#tt'), document.querySelector('textarea')]"
    for seed in range(3):
        await env.reset(Task("miniwob", "enter-text", seed))
        place = a.Click(await middle(env.page, "tt"))
        await env.act(place)
        await env.act(PASTE)
        assert await env.page.evaluate(f"{fields}[0].value") == ""
        await env.act(a.TypeText(f"of episode {seed}"))
        await env.act(ALL)
        await env.act(CUT)
        await env.act(PASTE)
        assert await env.page.evaluate(f"{fields}[0].value") == f"of episode {seed}"


@pytest.mark.parametrize("name", ["copy-paste", "copy-paste-2"])
async def test_the_tasks_that_copy_are_done_side_by_side(browser: Browser, name: str) -> None:
    envs = [await MiniWobEnv.open(browser, MiniWobOptions(), SCREEN) for _ in range(3)]

    async def work(env: MiniWobEnv, seed: int) -> float:
        said = (await env.reset(Task("miniwob", name, seed))).instruction
        ordinal = next((n for n, word in enumerate(("1st", "2nd", "3rd")) if word in said), 0)
        source = f"document.querySelectorAll('#area textarea')[{ordinal}]"
        for place in (source, "document.querySelector('#answer-input')"):
            await env.act(a.Click(await middle_of(env.page, place)))
            for action in (ALL, COPY) if place == source else (PASTE,):
                await env.act(action)
        return (await env.act(a.Click(await middle(env.page, "subbtn")))).reward

    for seed in range(4):
        assert await asyncio.gather(*(work(env, 10 * seed + place) for place, env in enumerate(envs))) == [1.0] * 3


async def middle(page: Page, field: str) -> a.Point:
    return await middle_of(page, f"document.getElementById('{field}')")


async def middle_of(page: Page, element: str) -> a.Point:
    box = f"{element}.getBoundingClientRect()"
    x, y = await page.evaluate(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({box})")
    return a.Point(x / SCREEN[0], y / SCREEN[1])
