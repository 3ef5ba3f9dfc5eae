"""Every page and every key in real Chromium, as a reader uses them; hostile texts run nothing; axe finds nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from dashboards.made import Shape, evaluate, event, execute, insert, small_run
from dashboards.served import browsing, viewing

from dart.rundir import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser]

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
FIRST = "g000001-1"
PAGES = {
    "runs": "/",
    "run": "/runs/{run}",
    "workers": "/runs/{run}/workers",
    "tasks": "/runs/{run}/tasks",
    "task": "/runs/{run}/tasks/made/task-0000",
    "trajectories": "/runs/{run}/trajectories",
    "trajectory": "/runs/{run}/trajectories/g000001-1?step=2",
    "group": "/runs/{run}/groups/g000001",
    "events": "/runs/{run}/events",
    "compare": "/compare?first={run}&first_evaluation=before-greedy-v0&second={run}&second_evaluation=after-greedy-v9",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    made = small_run(tmp_path_factory.mktemp("made"), Shape(trajectories=120, steps=6, tasks=4, width=160, height=100))
    evaluate(made, "before-greedy-v0", [False] * 10)
    evaluate(made, "after-greedy-v9", [True] * 10, opened=5.0)
    stall = {
        "kind": "update", "waits": "update 4", "waits_for": "the trainer", "since_unix_seconds": 1.0, "seconds": 700.0,
        "culprit": "train", "failure": "no answer since it began",
    }  # fmt: skip
    failed = {"trajectory": "g1-1", "attempt": 1, "why": f"env-0: reset failed: {HOSTILE}"}
    worker = {"worker": HOSTILE, "state": "ready", "slots": 1, "role": "env"}
    for number, (kind, told) in enumerate({"stalled": stall, "attempt_failed": failed, "worker": worker}.items()):
        event(made, 9001 + number, kind, json.dumps(told))
    insert(made, "tasks", {"run_id": made.name, "suite": "made", "name": HOSTILE})
    execute(
        made,
        ("update trajectories set instruction = ?, evidence_json = ? where group_id = 'g000001'",
         (HOSTILE, json.dumps({"page": HOSTILE}))),
        ("update steps set text = ? where trajectory_id like 'g000001-%'", (f"Thought: {HOSTILE}\nAction: x",)),
        ("update trajectories set task_name = ? where id = 'g000002-1'", (HOSTILE,)),
        ("update groups set task_name = ?, plan = ? where id = 'g000002'", (HOSTILE, HOSTILE)),
        ("update runs set state = 'running'", ()),
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def address(run: RunDirectory) -> Iterator[str]:
    with viewing(run.path.parent) as found:
        yield found


@pytest.fixture(scope="module")
def browser(run: RunDirectory) -> Iterator[Browser]:  # the run first: Playwright keeps an event loop running here
    with browsing() as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    clipboard = ["clipboard-read", "clipboard-write"]
    context = browser.new_context(viewport={"width": 1280, "height": 900}, permissions=clipboard)
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    yield opened
    context.close()


def complaints(page: Page) -> list[str]:
    """What the page's console says is wrong, from now on."""
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    return found


def visit(page: Page, address: str, run: RunDirectory, name: str) -> None:
    page.goto(address + PAGES[name].replace("{run}", run.name))
    page.wait_for_selector("main :is(h1, h2)")
    page.locator("[aria-busy=true]").wait_for(state="detached")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_is_drawn_without_a_complaint(
    browser: Browser, address: str, run: RunDirectory, scheme: Any, width: int
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    said = complaints(page)
    background = set()
    for name in PAGES:
        visit(page, address, run, name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the screen"
        assert page.title() != "hacked", name
        assert page.locator("img[src='x']").count() == 0, name
        background.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert said == []
    (colour,) = background
    bright = sum(int(part) for part in colour.strip("rgb()").split(",")) > 3 * 128
    assert bright == (scheme == "light")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, address: str, run: RunDirectory, scheme: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    found = {}
    for name in PAGES:
        visit(page, address, run, name)
        wrong = [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
            for one in axe.run(page).response["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        if wrong:
            found[name] = wrong
    context.close()
    assert found == {}


def test_the_run_page_says_first_why_it_waits(page: Page, address: str, run: RunDirectory) -> None:
    visit(page, address, run, "run")
    problem = page.get_by_role("region", name="Why it ended")
    problem.wait_for()
    assert "no answer since it began" in problem.inner_text()
    assert "reset failed" in problem.inner_text()
    height = problem.bounding_box()
    assert height is not None
    assert height["y"] < 300


def test_keys_of_the_player(page: Page, address: str, run: RunDirectory) -> None:
    visit(page, address, run, "trajectory")
    where = page.locator("[aria-live=polite]")

    def step() -> int:
        return int(where.inner_text().split()[1])

    count = int(where.inner_text().split()[3])
    assert step() == 3
    moves = {"ArrowRight": 4, "ArrowLeft": 3, "End": count, "ArrowRight ": count, "Home": 1, "ArrowLeft ": 1}
    for key, expected in moves.items():
        page.keyboard.press(key.strip())
        assert step() == expected, key
    for key, speed in (("+", "2×"), ("+", "4×"), ("-", "2×"), ("-", "1×"), ("+", "2×"), ("+", "4×"), ("+", "8×")):
        page.keyboard.press(key)
        page.get_by_text(speed, exact=True).wait_for()
    page.keyboard.press("Space")
    page.get_by_text(f"Step {count} of").wait_for()
    page.keyboard.press("z")
    page.locator("[title='Fit the page (z)']").wait_for()
    page.keyboard.press("z")
    page.locator("[title='Full size (z)']").wait_for()
    page.keyboard.press("t")
    page.get_by_role("button", name="As a table").wait_for()
    page.keyboard.press("t")
    page.keyboard.press("c")
    assert "step=" in page.evaluate("navigator.clipboard.readText()")
    before = page.url
    page.keyboard.press("j")
    page.wait_for_url("**/trajectories/g000001-2**")
    page.locator("main").get_by_text("g000001-2", exact=True).wait_for()
    page.keyboard.press("k")
    page.wait_for_url("**/trajectories/g000001-1**")
    assert page.url.split("?")[0] == before.split("?")[0]


def test_keys_everywhere(page: Page, address: str, run: RunDirectory) -> None:
    visit(page, address, run, "run")
    for keys, end in (
        ("gw", "/workers"),
        ("gt", "/tasks"),
        ("gj", "/trajectories"),
        ("ge", "/events"),
        ("go", run.name),
    ):
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_url(f"**{end}")
    page.keyboard.press("?")
    listed = page.get_by_role("dialog")
    listed.wait_for()
    assert "Tasks" in listed.inner_text()
    page.keyboard.press("?")
    listed.wait_for(state="hidden")
    visit(page, address, run, "events")
    page.keyboard.press("/")
    page.keyboard.type("reset failed")
    page.get_by_text("reset failed").first.wait_for()
    page.keyboard.press("Escape")
    visit(page, address, run, "group")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**/trajectories/g000001-**")
    for key in "gr":
        page.keyboard.press(key)
    page.wait_for_url(f"{address}/")


def test_a_table_of_thousands_is_sorted_and_searched(page: Page, address: str, run: RunDirectory) -> None:
    visit(page, address, run, "tasks")
    rows = page.locator("main tbody tr")
    page.get_by_role("button", name="Trajectories").click()
    page.locator("th[aria-sort=descending]").wait_for()
    counts = [int(row.split("\t")[3].replace(",", "")) for row in rows.all_inner_texts() if "\t" in row]
    assert len(counts) == 5
    assert counts == sorted(counts, reverse=True)
    page.get_by_placeholder("Search").fill("task-0002")
    page.wait_for_function(
        "document.body.innerText.includes('task-0002') && !document.body.innerText.includes('task-0001')"
    )


def test_an_episode_on_the_timeline_opens_its_trajectory(page: Page, address: str, run: RunDirectory) -> None:
    visit(page, address, run, "workers")
    timeline = page.get_by_role("group", name="Timeline of")
    timeline.get_by_text("Episodes", exact=True).wait_for()
    plot = page.locator("canvas")
    box = plot.bounding_box()
    assert box is not None
    heading = timeline.get_by_text("Episodes", exact=True).bounding_box()
    assert heading is not None
    row = heading["y"] + 1.5 * heading["height"] + 4
    for share in (0.2, 0.35, 0.5, 0.65, 0.8):  # an episode is somewhere along its lane
        page.mouse.move(box["x"] + share * box["width"], row)
        if page.get_by_text("Click to open the trajectory").count():
            page.mouse.click(box["x"] + share * box["width"], row)
            break
    page.wait_for_url("**/trajectories/g*")


def test_every_step_can_be_linked_to(page: Page, address: str, run: RunDirectory) -> None:
    visit(page, address, run, "trajectory")
    page.keyboard.press("ArrowRight")
    linked = page.url
    page.goto("about:blank")
    page.goto(linked)
    page.get_by_text("Step 4 of").wait_for()


def test_an_exported_page_opens_from_a_file(page: Page, address: str, run: RunDirectory, tmp_path: Any) -> None:
    answer = page.request.get(f"{address}/api/runs/{run.name}/trajectories/{FIRST}/export.html")
    file = tmp_path / "exported.html"
    file.write_bytes(answer.body())
    said = complaints(page)
    page.goto(file.as_uri())
    page.get_by_text("Step 1 of").wait_for()
    page.keyboard.press("ArrowRight")
    page.get_by_text("Step 2 of").wait_for()
    assert page.title() != "hacked"
    assert said == []


if pictures := os.environ.get("DART_PICTURES"):

    def test_pictures(browser: Browser, address: str, run: RunDirectory) -> None:
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            for name in PAGES:
                visit(page, address, run, name)
                page.wait_for_timeout(500)
                page.screenshot(path=f"{pictures}/{name}-{scheme}.png")
