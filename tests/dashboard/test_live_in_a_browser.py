"""A live run in real Chromium: its page moves by itself, and says what is wrong within the watchdog's bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from dashboards.live import Live, PacedEnv, live_run
from dashboards.scripted import ScriptedTrainer
from dashboards.served import browsing
from dashboards.tour import SCHEMES, Tour, every_page, keys_everywhere, keys_of_the_player

from dart.v1 import session_pb2 as pb
from dart.wire.role import Command, CommandError, Reply, WorkerRole
from dart.workers.env.devtools import find_executable

if TYPE_CHECKING:
    from playwright.async_api import Page

pytestmark = [pytest.mark.browser]
BOUND_SECONDS = 3.0
HANG_SECONDS = 120.0
GONE = "the display :99 is gone"


class HungTrainer(ScriptedTrainer):
    """Its session lives, and it never answers a batch."""

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.TrainBatch):
            await asyncio.Event().wait()
        return await super().handle(command)


class FailingEnv(PacedEnv):
    """Every reset fails."""

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Reset):
            raise CommandError(pb.FAILURE_CODE_ENVIRONMENT, GONE)
        return await super().handle(command)


def live(folder: Path, env: WorkerRole, trainer: WorkerRole | None = None) -> AbstractAsyncContextManager[Live]:
    """A run with these workers, whose every bound is short."""
    bounds = {"update_seconds": BOUND_SECONDS, "sampling_seconds": BOUND_SECONDS, "factor": 1.0}
    return live_run(folder, env, trainer, watchdog=bounds, trainer={"trajectories_per_update": 16})


@contextlib.asynccontextmanager
async def opened(address: str) -> AsyncIterator[Page]:
    playwright = pytest.importorskip("playwright.async_api")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=find_executable(None), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * HANG_SECONDS)
        await page.goto(address)
        yield page
        if pictures := os.environ.get("DART_PICTURES"):
            name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split()[0]
            await page.screenshot(path=f"{pictures}/{name}.png")
        await browser.close()


async def test_a_live_page_moves_by_itself(tmp_path: Path) -> None:
    async with live(tmp_path, PacedEnv(8, 0.05, 2_000)) as run, opened(run.page) as page:
        await page.get_by_text("running", exact=True).wait_for()

        async def updates() -> int:
            told = page.get_by_text("Updates", exact=True).first.locator("xpath=following::*[1]")
            return int((await told.inner_text()).split()[0])

        async with asyncio.timeout(HANG_SECONDS):
            while (first := await updates()) < 1:
                await asyncio.sleep(0.1)
            while await updates() <= first:
                await asyncio.sleep(0.1)
        for name in ("Workers", "Tasks", "Trajectories", "Events"):
            await page.get_by_role("link", name=name, exact=True).first.click()
            await page.locator("main :is(h1, h2)").first.wait_for()
        await page.get_by_text("made version").first.wait_for()


@pytest.mark.parametrize("page_of", ["trajectory", "group"])
async def test_a_page_that_is_open_says_what_became_of_its_trajectory(tmp_path: Path, page_of: str) -> None:
    async with live(tmp_path, PacedEnv(8, 0.05, 2_000)) as run, opened(run.page) as page:
        waits = page.get_by_text("pending", exact=True)
        while True:  # the trainer may be quicker than the reader
            await page.goto(f"{run.page}/trajectories?fate=pending")
            rows = page.locator("main tr.link")
            await rows.or_(page.get_by_text("No trajectory")).first.wait_for()
            if not await rows.count():
                continue
            await rows.first.click()
            if page_of == "group":
                await page.get_by_role("link", name="Why: the group’s verdict").click()
                await page.locator("h1", has_text="Group").wait_for()
            else:
                await page.get_by_text("Why: the group’s verdict").wait_for()
            if await waits.count():
                break
        await page.evaluate("window.same = true")
        async with asyncio.timeout(HANG_SECONDS):
            while await waits.count():
                await asyncio.sleep(0.1)
        assert await page.evaluate("window.same"), "without being loaded again"
        became = page.get_by_text(re.compile("^(trained|dropped: .*)$")).first
        await became.wait_for()


async def test_every_page_and_every_key_while_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api")

    def looked_at(entry: str) -> None:
        (directory,) = (tmp_path / "runs").iterdir()
        tour = Tour.of(directory, entry)
        with browsing() as browser:
            for scheme in SCHEMES:
                with tour.opened(browser, scheme) as page:
                    every_page(tour, page)
            with tour.opened(browser) as page:
                keys_of_the_player(tour, page)
                keys_everywhere(tour, page, "made version")
                page.get_by_text("running", exact=True).first.wait_for()

    async with live(tmp_path, PacedEnv(8, 0.05, 2_000)) as run, opened(run.page) as page:
        await page.get_by_role("link", name="Events", exact=True).first.click()
        await page.get_by_text("made version 2").first.wait_for()
        await asyncio.to_thread(looked_at, run.page)


async def test_a_hung_trainer_is_named_on_the_page(tmp_path: Path) -> None:
    async with live(tmp_path, PacedEnv(8, 0.05, 2_000), HungTrainer()) as run, opened(run.page) as page:
        wrong = page.get_by_role("region", name="Something is wrong")
        await wrong.wait_for()
        told = await wrong.inner_text()
        assert "update 1 waits for train-0 (rank 0)" in told, told
        place = await wrong.bounding_box()
        assert place is not None and place["y"] < 300, "it is the first thing on the page"


async def test_a_world_whose_every_reset_fails_is_named_on_the_page(tmp_path: Path) -> None:
    async with live(tmp_path, FailingEnv(8, 0.05, 2_000)) as run, opened(run.page) as page:
        wrong = page.get_by_role("region", name="Something is wrong")
        await wrong.wait_for()
        told = await wrong.inner_text()
        assert "env-0" in told and GONE in told, told
