"""Pages of runs that are not as usual, in real Chromium: copies of a run, one picture twice, names of any
kind; and where the focus goes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from dashboards.made import Shape, evaluate, event, execute, small_run
from dashboards.served import browsing, viewing

from dart.rundir import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser]
STRANGE = "web/größe 表 100%#1?"
FIRST = "g000001-1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    parent = tmp_path_factory.mktemp("made")
    made = small_run(parent, Shape(trajectories=40, steps=3, tasks=2, width=160, height=100))
    evaluate(made, "before-greedy-v0", [False] * 3)
    evaluate(made, "after-greedy-v9", [True] * 3, opened=5.0)
    execute(
        made,
        ("update trajectories set id = replace(id, 'task-0000', ?), group_id = replace(group_id, 'task-0000', ?), "
         "task_name = ? where id like 'eval-%'", (STRANGE, STRANGE, STRANGE)),
        ("update groups set id = replace(id, 'task-0000', ?), task_name = ? where id like 'eval-%'",
         (STRANGE, STRANGE)),
        ("update trajectories set more_json = ? where id = ?", (json.dumps({"goal_images": 2}), FIRST)),
        ("update steps set images_json = replace('[[?],[?],[?]]', '?', trim(images_json, '[]')) "
         "where trajectory_id = ? and \"index\" = 0", (FIRST,)),
    )  # fmt: skip
    shutil.copytree(made.path, parent / "copies" / made.name)
    return made


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    made = small_run(
        tmp_path_factory.mktemp("interrupted"), Shape(trajectories=4, steps=2, tasks=2, width=160, height=100)
    )
    finding = {"kind": "learning", "waits": "nothing is learnt", "waits_for": "198 of 200 texts are no action",
               "culprit": "unparsable", "failure": "Sure!"}  # fmt: skip
    event(made, 9001, "stalled", json.dumps(finding))
    execute(made, ("update runs set state = 'interrupted', finished = started + 60", ()))
    return made


@pytest.fixture(scope="module")
def address(run: RunDirectory) -> Iterator[str]:
    with viewing(run.path.parent, run.path.parent / "copies") as found:
        yield found


@pytest.fixture(scope="module")
def browser(run: RunDirectory, interrupted: RunDirectory) -> Iterator[Browser]:  # after them: Playwright keeps a loop
    with browsing() as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.set_default_timeout(60_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    opened.close()
    assert wrong == []


def test_copies_of_a_run_can_be_compared_with(page: Page, run: RunDirectory, address: str) -> None:
    page.goto(f"{address}/compare")
    sides = page.get_by_label("First run")
    sides.get_by_text(f"{run.name} (copies)").wait_for(state="attached")
    assert sides.locator("option").count() == 3
    sides.select_option(run.name)
    page.get_by_label("First evaluation").select_option("before-greedy-v0")
    page.get_by_label("Second run").select_option(f"{run.name} (copies)")
    page.get_by_label("Second evaluation").select_option("after-greedy-v9")
    page.get_by_text("+100.0 percentage points").wait_for()


def test_a_picture_may_belong_to_an_instruction_twice(page: Page, run: RunDirectory, address: str) -> None:
    page.goto(f"{address}/runs/{run.name}/trajectories/{FIRST}")
    page.get_by_text("Pictures of the instruction").wait_for()
    assert page.get_by_role("img", name="of the instruction").count() == 2


def test_a_name_of_any_kind_is_found_by_its_address(page: Page, run: RunDirectory, address: str) -> None:
    page.goto(f"{address}/runs/{run.name}/groups/{quote(f'eval-before-greedy-v0-{STRANGE}', safe='')}")
    page.get_by_text("3 of 3 roll-outs").wait_for()
    page.get_by_role("link", name=f"{STRANGE}-1").click()
    page.get_by_text("Why: the group’s verdict").wait_for()
    page.get_by_role("link", name=f"made/{STRANGE}").click()
    page.get_by_role("heading", name=STRANGE).wait_for()
    page.go_back()
    page.get_by_text("Why: the group’s verdict").wait_for()


def test_the_focus_goes_to_the_new_page(page: Page, run: RunDirectory, address: str) -> None:
    page.goto(f"{address}/runs/{run.name}/trajectories?fate=dropped:+equal")
    assert page.evaluate("document.activeElement.tagName") == "BODY"  # the first Tab skips to the page
    assert page.get_by_label("Fate").input_value() == "dropped: equal"
    page.get_by_role("button", name="Show all").click()
    page.locator("tbody tr[data-row='0']").focus()
    page.keyboard.press("Enter")
    page.get_by_text("Why: the group’s verdict").wait_for()
    assert page.evaluate("document.activeElement.id") == "main"


def test_an_interrupted_run_that_learned_nothing_is_calm_and_says_how_to_go_on_first(
    interrupted: RunDirectory, page: Page
) -> None:
    with viewing(interrupted.path.parent) as address:
        page.goto(f"{address}/runs/{interrupted.name}")
        told = page.get_by_role("region", name="Somebody stopped it")
        told.wait_for()
        said = told.inner_text()
        assert "calm" in str(told.get_attribute("class"))
        assert "interrupted" in said and said.index("continue with this command") < said.index("198 of 200 texts")
