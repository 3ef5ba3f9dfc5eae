"""How long the dashboard's pages take with a large run: `python -m benchmarks.dashboard.pages`.

Real: `dart view` in a process of its own, its database, its pages in Chromium, drawn without a graphics card.
Simulated: the run, which is made in bulk (`benchmarks.dashboard.made_run`): 100,000 trajectories, two million steps.

First paint is the browser's own First Contentful Paint, from an empty cache. A page is complete when no part of it says
that it is still being fetched. A step of the player is from the key until the next screenshot is decoded. A search is
from the request until its answer is there, without the pause in which the page waits for another letter. Memory is that
of the page's renderer process after all of this.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.dashboard.made_run import Shape, made_run
from benchmarks.dashboard.served import Served, browsing, serving
from benchmarks.results import write
from dart.rundir import RunDirectory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RESULT = Path(__file__).parents[1] / "results" / "dashboard_pages.json"
CONFIG = Path(__file__).parents[2] / "configs" / "ladder_demo.yaml"
PAGES = {
    "runs": "/",
    "overview": "/runs/{run}",
    "workers": "/runs/{run}/workers",
    "tasks": "/runs/{run}/tasks",
    "task": "/runs/{run}/tasks/made/task-0000",
    "trajectories": "/runs/{run}/trajectories",
    "trajectory": "/runs/{run}/trajectories/g000001-1",
    "group": "/runs/{run}/groups/g000001",
    "events": "/runs/{run}/events",
}
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
STEPS = """async (steps) => {
  const shown = () => document.querySelector('[aria-live=polite]').innerText
  const times = []
  for (let step = 0; step < steps; step++) {
    const before = shown(), began = performance.now()
    document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }))
    while (shown() === before) await new Promise(requestAnimationFrame)
    for (const image of document.querySelectorAll('main img')) if (image.src) await image.decode()
    times.push(performance.now() - began)
  }
  return times
}"""
SEARCHED = ("reset failed", "update", "no such word", "env-3", "checkpoint")


def complete(page: Page) -> None:
    page.wait_for_selector("main :is(h1, h2)")
    page.locator("[aria-busy=true]").wait_for(state="detached")


def milliseconds(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 1), "most": round(max(times), 1), "n": len(times)}


def opened(browser: Browser, address: str, repeats: int) -> dict[str, dict[str, float]]:
    """First paint and completion of a page, each time in a fresh context, so that nothing is cached."""
    paints, whole = [], []
    for _ in range(repeats):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        began = time.perf_counter()
        page.goto(address, wait_until="commit")
        complete(page)
        whole.append(1000 * (time.perf_counter() - began))
        while (painted := page.evaluate(FIRST_PAINT)) is None:
            page.wait_for_timeout(10)
        paints.append(float(painted))
        context.close()
    return {"first_paint_ms": milliseconds(paints), "complete_ms": milliseconds(whole)}


def player(page: Page, address: str, run: str, steps: int) -> dict[str, float]:
    page.goto(f"{address}{PAGES['trajectory'].format(run=run)}")
    complete(page)
    last = int(page.locator("[aria-live=polite]").inner_text().split()[3])
    return milliseconds(page.evaluate(STEPS, min(steps, last - 1)))


def answered(page: Page, path: str, act: Callable[[], None]) -> float:
    """Milliseconds from the request to the end of its answer, which `act` leads to."""
    with page.expect_response(lambda response: path in response.url) as caught:
        act()
    caught.value.finished()
    timing = caught.value.request.timing
    return float(timing["responseEnd"])


def searches(page: Page, address: str, run: str) -> dict[str, float]:
    page.goto(f"{address}{PAGES['events'].format(run=run)}")
    complete(page)
    box, times = page.get_by_role("searchbox").first, []
    for words in SEARCHED:
        times.append(answered(page, "/events?", lambda words=words: box.fill(words)))  # type: ignore[misc]
        complete(page)
    return milliseconds(times)


def table(page: Page, address: str, run: str, repeats: int) -> dict[str, float]:
    def look() -> None:
        page.goto(f"{address}{PAGES['tasks'].format(run=run)}", wait_until="commit")

    return milliseconds([answered(page, f"/api/runs/{run}/tasks", look) for _ in range(repeats)])


def renderers(pid: int) -> dict[int, float]:
    """Resident megabytes of the browser's renderer processes, which no other process shares."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--type=renderer" in child.cmdline():
                found[child.pid] = child.memory_full_info().uss / 1e6
    return found


def memory(page: Page, address: str, run: str) -> dict[str, float]:
    """After every page has been visited twice, and all that can be collected is."""
    for _ in range(2):
        for path in PAGES.values():
            page.goto(address + path.format(run=run))
            complete(page)
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    heap = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
    largest = max(renderers(psutil.Process().pid).values())
    return {"heap_mb": round(heap, 1), "renderer_mb": round(largest, 1)}


def measure(run: RunDirectory, served: Served, repeats: int) -> dict[str, Any]:
    address, name = served.address, run.name
    with browsing() as browser:
        opened(browser, f"{address}{PAGES['overview'].format(run=name)}", 1)  # the server reads the run
        pages = {page: opened(browser, address + path.format(run=name), repeats) for page, path in PAGES.items()}
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(120_000)
        return {
            "pages": pages,
            "task_table_ms": table(page, address, name, repeats),
            "event_search_ms": searches(page, address, name),
            "player_step_ms": player(page, address, name, 18),
            "page_memory": memory(page, address, name),
            "server_mb": round(psutil.Process(served.pid).memory_full_info().uss / 1e6, 1),
        }


def size(run: RunDirectory) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as connection:
        counted = {
            name: int(connection.execute(f"select count(*) from {name}").fetchone()[0])
            for name in ("trajectories", "steps", "tasks", "events")
        }
    return {**counted, "database_mb": round(run.database.stat().st_size / 1e6)}


@contextlib.contextmanager
def the_run(given: Path | None, shape: Shape) -> Iterator[RunDirectory]:
    if given is not None:
        yield RunDirectory.existing(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield made_run(Path(folder), shape, CONFIG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=Shape().trajectories, help="of the run that is made")
    parser.add_argument("--run", type=Path, help="a run directory to look at instead")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with the_run(options.run, Shape(trajectories=options.trajectories)) as run, serving(run.path.parent) as served:
        results = {**size(run), **measure(run, served, options.repeats)}
    write(
        options.out,
        "dashboard_pages",
        "the real server, database, pages and Chromium, on the same machine; the run was made",
        results,
    )
    for page, times in results["pages"].items():
        print(f"{page:14s} first paint {times['first_paint_ms']}, complete {times['complete_ms']}")
    print({name: value for name, value in results.items() if name != "pages"})
    print(options.out)


if __name__ == "__main__":
    main()
