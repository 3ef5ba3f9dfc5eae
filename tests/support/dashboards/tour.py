"""Every page and every key of the dashboard, as a reader uses them, on any run that has trajectories and tasks."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 60_000
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WITH_NEIGHBOURS = """
select id, group_id, suite, task_name from trajectories as it
where fate != 'evaluated'
  and exists (select 1 from trajectories where group_id = it.group_id and attempt > 0 and id > it.id)
  and exists (select 1 from trajectories where suite = it.suite and task_name = it.task_name
              and fate != 'evaluated' and finished < it.finished)
order by steps desc, id limit 1
"""
PLACES = {"gw": "/workers", "gt": "/tasks", "gj": "/trajectories", "ge": "/events"}


@dataclass(frozen=True, slots=True)
class Tour:
    """Where to look. `entry`: what the terminal printed, which lets the browser in; `address`: without a slash at its
    end. `trajectory`: one with a next one in its group and an older one of its task. `evaluations`: two, to compare."""

    address: str
    entry: str
    run: str
    task: str
    group: str
    trajectory: str
    evaluations: tuple[str, ...] = ()

    @classmethod
    def of(cls, directory: Path, entry: str, evaluations: tuple[str, ...] = ()) -> Tour:
        """Through the longest of the trajectories that have neighbours."""
        with closing(sqlite3.connect(f"file:{directory / 'run.db'}?mode=ro", uri=True)) as database:
            found = database.execute(WITH_NEIGHBOURS).fetchone()
        assert found is not None, "no trajectory of the run has neighbours yet"
        name, group, suite, task = found
        address = "/".join(entry.split("/")[:3])
        return cls(address, entry, directory.name, f"{suite}/{task}", group, name, evaluations)

    @property
    def pages(self) -> dict[str, str]:
        run = f"/runs/{self.run}"
        pages = {
            "runs": "/", "run": run, "workers": f"{run}/workers", "tasks": f"{run}/tasks",
            "task": f"{run}/tasks/{quote(self.task)}", "trajectories": f"{run}/trajectories",
            "trajectory": f"{run}/trajectories/{self.trajectory}", "group": f"{run}/groups/{self.group}",
            "events": f"{run}/events",
        }  # fmt: skip
        if self.evaluations:
            first, second = self.evaluations
            sides = {"first": self.run, "first_evaluation": first, "second": self.run, "second_evaluation": second}
            pages["compare"] = f"/compare?{urlencode(sides)}"
        return pages

    def visit(self, page: Page, name: str) -> None:
        page.goto(self.address + self.pages[name])
        page.wait_for_selector("main :is(h1, h2)")
        page.locator("[aria-busy=true]").wait_for(state="detached")

    @contextmanager
    def opened(self, browser: Browser, scheme: Scheme = "light", width: int = 1280) -> Iterator[Page]:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme,
            permissions=["clipboard-read", "clipboard-write"],
        )  # fmt: skip
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(self.entry)
        yield page
        context.close()


def complaints(page: Page) -> list[str]:
    """What the page's console says is wrong, from now on."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on(
        "console",
        lambda message: found.append(f"{message.text} ({message.location})") if message.type == "error" else None,
    )
    return found


def every_page(tour: Tour, page: Page) -> None:
    said = complaints(page)
    for name in tour.pages:
        tour.visit(page, name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the screen"
    assert said == [], said


def keys_of_the_player(tour: Tour, page: Page) -> None:
    tour.visit(page, "trajectory")
    where = page.locator("[aria-live=polite]")

    def step() -> int:
        word, number, *_ = where.inner_text().split()
        return int(number) if word == "Step" else count + 1  # the screen after the last action

    page.keyboard.press("Home")
    count = int(where.inner_text().split()[3])
    page.keyboard.press("End")
    end = step()
    assert end in (count, count + 1)
    for key, expected in (
        ("Home", 1), ("ArrowRight", min(2, end)), ("ArrowLeft", 1), ("End", end), ("ArrowRight", end),
        ("Home", 1), ("ArrowLeft", 1),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert step() == expected, key
    for key, speed in (("+", "2×"), ("+", "4×"), ("-", "2×"), ("-", "1×"), ("+", "2×"), ("+", "4×"), ("+", "8×")):
        page.keyboard.press(key)
        page.get_by_text(speed, exact=True).wait_for()
    page.keyboard.press("Space")
    page.get_by_text(f"Step {count} of" if end == count else "After the last action").first.wait_for()
    page.keyboard.press("Home")
    page.keyboard.press("z")
    page.locator("[title='Fit the page (z)']").wait_for()
    page.keyboard.press("z")
    page.locator("[title='Full size (z)']").wait_for()
    page.keyboard.press("t")
    page.get_by_role("button", name="As a table").wait_for()
    page.keyboard.press("t")
    page.keyboard.press("c")
    assert tour.trajectory in page.evaluate("navigator.clipboard.readText()")
    there = f"**/trajectories/{tour.trajectory}**"
    for away, back in ("jk", "pn"):
        page.keyboard.press(away)
        page.wait_for_url(lambda url: tour.trajectory not in url)
        page.get_by_text("Step 1 of").wait_for()
        page.keyboard.press(back)
        page.wait_for_url(there)
        page.get_by_text("Step 1 of").wait_for()


def keys_everywhere(tour: Tour, page: Page, word: str) -> None:
    """word: in the events."""
    tour.visit(page, "run")
    for keys, end in (*PLACES.items(), ("go", tour.run)):
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_url(f"**{end}")
    page.keyboard.press("?")
    listed = page.get_by_role("dialog")
    listed.wait_for()
    assert "Tasks" in listed.inner_text()
    page.keyboard.press("?")
    listed.wait_for(state="hidden")
    tour.visit(page, "events")
    page.keyboard.press("/")
    with page.expect_response(lambda answer: urlencode({"text": word}) in answer.url) as searched:
        page.keyboard.type(word)
    assert searched.value.json()["rows"], "the words that are seen are found"
    page.get_by_text(word).first.wait_for()
    page.keyboard.press("Escape")
    tour.visit(page, "group")
    for key in ("ArrowDown", "ArrowUp", "ArrowRight", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url(f"**/trajectories/{tour.group}-**")
    for key in "gr":
        page.keyboard.press(key)
    page.wait_for_url(f"{tour.address}/")
