"""Every page and every key in real Chromium, as a reader uses them; hostile texts run nothing; axe finds nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from dashboards.made import Shape, evaluate, event, execute, insert, small_run
from dashboards.served import browsing, viewing
from dashboards.tour import Tour, complaints, every_page, keys_everywhere, keys_of_the_player

from dart.rundir import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser]

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
FIRST = "g000001-1"


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


@pytest.fixture(scope="module")
def tour(run: RunDirectory, address: str) -> Tour:
    return Tour(
        address, f"{address}/", run.name, "made/task-0000", "g000001", FIRST, ("before-greedy-v0", "after-greedy-v9")
    )


@pytest.fixture
def page(tour: Tour, browser: Browser) -> Iterator[Page]:
    with tour.opened(browser) as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_is_drawn_without_a_complaint(tour: Tour, browser: Browser, scheme: Any, width: int) -> None:
    with tour.opened(browser, scheme, width) as page:
        every_page(tour, page)
        background = set()
        for name in tour.pages:
            tour.visit(page, name)
            assert page.title() != "hacked", name
            assert page.locator("img[src='x']").count() == 0, name
            background.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    (colour,) = background
    bright = sum(int(part) for part in colour.strip("rgb()").split(",")) > 3 * 128
    assert bright == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, tour: Tour, scheme: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.set_default_timeout(60_000)
    found = {}
    for name in tour.pages:
        tour.visit(page, name)
        wrong = [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
            for one in axe.run(page).response["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        if wrong:
            found[name] = wrong
    context.close()
    assert found == {}


def test_the_run_page_says_first_why_it_waits(page: Page, tour: Tour) -> None:
    tour.visit(page, "run")
    problem = page.get_by_role("region", name="Why it ended")
    problem.wait_for()
    assert "no answer since it began" in problem.inner_text()
    assert "reset failed" in problem.inner_text()
    height = problem.bounding_box()
    assert height is not None
    assert height["y"] < 300


def test_keys_of_the_player(page: Page, run: RunDirectory, address: str) -> None:
    keys_of_the_player(Tour.of(run.path, f"{address}/"), page)


def test_keys_everywhere(page: Page, tour: Tour) -> None:
    keys_everywhere(tour, page, "reset failed")


def test_a_table_of_thousands_is_sorted_and_searched(page: Page, tour: Tour) -> None:
    tour.visit(page, "tasks")
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


def test_an_episode_on_the_timeline_opens_its_trajectory(page: Page, tour: Tour) -> None:
    tour.visit(page, "workers")
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


def test_every_step_can_be_linked_to(page: Page, tour: Tour) -> None:
    tour.visit(page, "trajectory")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_url("**step=3")
    linked = page.url
    page.goto("about:blank")
    page.goto(linked)
    page.get_by_text("Step 4 of").wait_for()


def test_the_evidence_of_the_verdict_is_beside_the_last_screenshot(page: Page, tour: Tour) -> None:
    tour.visit(page, "trajectory")
    assert page.get_by_text('"page":').count() == 0, "the first step shows what came of it"
    page.keyboard.press("End")
    page.get_by_text('"page":').wait_for()
    page.get_by_role("heading", name="The verdict").wait_for()
    page.get_by_text(re.compile("the screen after it is not kept|this is the last screen")).wait_for()


def test_the_screen_after_the_last_action_comes_last(page: Page, tour: Tour, run: RunDirectory) -> None:
    first_screen = "select json_extract(images_json, '$[0]') from steps where trajectory_id = 'g000003-1' limit 1"
    last = f"json_object('last_image', json(({first_screen})))"
    execute(run, (f"update trajectories set more_json = {last} where id = 'g000003-1'", ()))
    page.goto(f"{tour.address}/runs/{run.name}/trajectories/g000003-1")
    page.get_by_text("Step 1 of").wait_for()
    page.keyboard.press("End")
    page.get_by_role("img", name="Screenshot after the last action").wait_for()
    page.get_by_role("heading", name="The verdict").wait_for()
    page.get_by_text("This is the screen after the last action.").wait_for()
    assert page.get_by_role("heading", name="Action").count() == 0
    page.keyboard.press("ArrowLeft")
    page.get_by_role("heading", name="Action").wait_for()
    assert page.get_by_role("heading", name="The verdict").count() == 0, "the screen that it is about comes next"


def test_a_row_of_trajectories_shows_the_last_screen(page: Page, tour: Tour) -> None:
    tour.visit(page, "trajectories")
    picture = page.locator("tbody tr[data-row='0'] td:nth-child(2) img")
    picture.wait_for()
    page.wait_for_function("image => image.naturalWidth > 0", arg=picture.element_handle())


def test_trajectories_that_train_come_first_and_evaluations_are_chosen(page: Page, tour: Tour) -> None:
    tour.visit(page, "trajectories")
    first = page.locator("tbody tr[data-row='0']")
    first.get_by_text(re.compile(r"^g\d+-\d+$")).wait_for()
    assert page.locator("thead th").first.inner_text() == "Outcome"
    assert page.locator("thead th").last.inner_text() == "Trajectory"
    page.get_by_label("Kind").select_option("evaluation")
    first.get_by_text("evaluated").wait_for()
    assert first.get_by_title("eval-").inner_text().startswith("…")


def test_an_exported_page_opens_from_a_file(page: Page, tour: Tour, tmp_path: Any) -> None:
    answer = page.request.get(f"{tour.address}/api/runs/{tour.run}/trajectories/{FIRST}/export.html")
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

    def test_pictures(browser: Browser, tour: Tour) -> None:
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
            for name in tour.pages:
                tour.visit(page, name)
                page.wait_for_timeout(500)
                page.screenshot(path=f"{pictures}/{name}-{scheme}.png")
