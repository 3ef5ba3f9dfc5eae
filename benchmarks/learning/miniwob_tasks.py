"""What each of MiniWoB's 130 tasks is like in dart: `python -m benchmarks.learning.miniwob_tasks`.

Real: the environments of the world `miniwob`, Chromium, input and screenshots; no coordinator. Every task is started on
several seeds, left alone for a while, given a few random actions, and judged. Then those that are known to be difficult
for reasons of their own are attempted by scripts that read the page (`miniwob_attempts`). Writes
results/miniwob_tasks.json, where earlier results of other tasks stay; from it `python -m benchmarks.report` makes the
tables in docs/miniwob.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import string
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvloop
from pydantic import BaseModel

from benchmarks.learning.miniwob_attempts import ATTEMPTS, attempt
from benchmarks.learning.miniwob_pages import RESULT, Results, Row, read
from benchmarks.results import write
from dart.core.action import Action, Click, Drag, Finish, Keys, Point, Scroll, TypeText
from dart.core.types import Task
from dart.workers.env.browser import Browser, EnvironmentFailure
from dart.workers.env.miniwob import SUITE, MiniWobEnv, MiniWobOptions, pages_folder, task_names
from dart.worlds import from_png

SCREEN = (160, 210)
MOST_STEPS = 10
CHANGE_SECONDS, IDLE_SECONDS = 3.0, 0.3
"""How long a page is watched for changes of its own; then how long it is left alone at a time."""
_WATCH = """window.dartChanges = 0;
new MutationObserver(changes => { dartChanges += changes.length; }).observe(
  document.querySelector('#area') ?? document.body,
  { subtree: true, childList: true, attributes: true, characterData: true });"""
_DRAGS = re.compile(r"draggable|sortable|d3\.drag|behavior\.drag|slider\(|resizable|mousemove|jscolor|getSelection")
_FOUND = """(() => {
  const typed = 'input:not([type]), input[type=text], input[type=password], input[type=number], input[type=date],' +
    'input[type=time], input[type=tel], input[type=search], textarea, [contenteditable=true]';
  const scrolls = element => /auto|scroll/.test(getComputedStyle(element).overflowY)
    && element.scrollHeight > element.clientHeight + 2;
  return {
    types: document.querySelector(`#area :is(${typed})`) !== null || document.querySelector('#terminal') !== null,
    chooses: document.querySelector('#area select') !== null,
    scrolls: Array.from(document.querySelectorAll('#area, #area *')).some(scrolls),
  };
})()"""


class Found(BaseModel):
    """Which kinds of controls a page has at the start."""

    types: bool
    chooses: bool
    scrolls: bool


async def examine(env: MiniWobEnv, name: str, seeds: Sequence[int], idle_seconds: float) -> Row:
    """Start, leave alone, act and judge. A failure of the environment is in the row."""
    row = Row(task=name)
    try:
        await env.renew()
        await env.page.navigate((pages_folder() / f"{name}.html").as_uri())
        row.own_limit_seconds = float(await env.page.evaluate("core.EPISODE_MAX_TIME")) / 1000
        lengths, started = [], []
        for seed in seeds:
            began = time.perf_counter()
            observation = await env.reset(Task(SUITE, name, seed))
            started.append(1000 * (time.perf_counter() - began))
            lengths.append(len(observation.instruction))
            if seed == seeds[0]:
                await _alone(env, row, observation.image.sha256, idle_seconds)
                await env.reset(Task(SUITE, name, seed))
            await _random_steps(env, random.Random(seed), row)
    except EnvironmentFailure as failure:
        row.problem = f"{type(failure).__name__}: {failure}"
        return row
    row.starts = min(lengths) > 0
    row.instruction_characters, row.start_ms = (min(lengths), max(lengths)), round(statistics.median(started), 1)
    return row


async def _alone(env: MiniWobEnv, row: Row, first: bytes, idle_seconds: float) -> None:
    """What the page has, and what it does while nobody touches it."""
    found = Found.model_validate(await env.page.evaluate(_FOUND))
    source = await asyncio.to_thread((pages_folder() / f"{row.task}.html").read_text, encoding="utf-8")
    drags = _DRAGS.search(source) is not None
    named = {"type": found.types, "drag": drags, "scroll": found.scrolls, "choose": found.chooses}
    row.actions = [kind for kind, there in named.items() if there]
    began = time.perf_counter()
    await env.page.evaluate(_WATCH)
    await env.page.pass_time(CHANGE_SECONDS)
    changes = int(await env.page.evaluate("dartChanges"))
    row.changes_alone = changes > 0 or from_png(await env.page.screenshot()).sha256 != first
    while not (over := (await env.grade())[0]) and time.perf_counter() < began + idle_seconds:
        await asyncio.sleep(IDLE_SECONDS)
        await env.page.pass_time(0.01)  # draws a frame, which animations wait for
    if over:
        row.ends_alone_seconds = round(time.perf_counter() - began, 1)


async def _random_steps(env: MiniWobEnv, rng: random.Random, row: Row) -> None:
    over = False
    for _ in range(MOST_STEPS):
        if over := (await env.act(_random_action(rng))).done:
            break
    verdict = await env.judge(Finish(), at_limit=not over)
    row.episodes += 1
    row.ended_by_random_steps += over
    raw = verdict.evidence["raw"]
    if over and isinstance(raw, float):
        row.rewards = sorted([*row.rewards, round(raw, 3)])


def _random_action(rng: random.Random) -> Action:
    """Mostly clicks, also below the instruction alone."""
    at = Point(rng.random(), rng.uniform(0.25, 1.0))
    match rng.randrange(8):
        case 0:
            return TypeText("".join(rng.choices(string.ascii_lowercase + string.digits, k=4)))
        case 1:
            return Drag((at, Point(rng.random(), rng.uniform(0.25, 1.0))))
        case 2:
            return Scroll(at, 0, rng.choice((-3, 3)))
        case 3:
            return Keys((rng.choice(("Tab", "Return", "Down", "space")),))
        case _:
            return Click(at)


async def measure(names: Sequence[str], pages: int, seeds: int, idle_seconds: float, repeats: int) -> Results:
    """All tasks, and all attempts, on so many pages of one browser."""
    options = MiniWobOptions(step_timeout_seconds=60.0, max_wait_seconds=600.0)
    results = Results(rows=[], attempts=[])
    async with Browser.launch() as browser:
        envs = [await MiniWobEnv.open(browser, options, SCREEN) for _ in range(pages)]
        tasks, attempts = iter(names), iter([one for one in ATTEMPTS if one.task in names])

        async def work(env: MiniWobEnv) -> None:
            for name in tasks:
                row = await examine(env, name, range(1, seeds + 1), idle_seconds)
                if row.problem:  # a page that is late on a busy machine is no fault of the task's
                    row = await examine(env, name, range(1, seeds + 1), idle_seconds)
                results.rows.append(row)
                print(results.rows[-1], flush=True)

        async def try_out(env: MiniWobEnv) -> None:
            for one in attempts:
                results.attempts.append(await attempt(env, one, range(1, repeats + 1)))
                print(results.attempts[-1], flush=True)

        await asyncio.gather(*(work(env) for env in envs))
        if repeats:
            await asyncio.gather(*(try_out(env) for env in envs[: max(1, pages // 4)]))
    return results


def added(old: Results | None, new: Results) -> Results:
    """The new results, and the old ones of other tasks, in the order of tasks and attempts."""
    known = old or Results(rows=[], attempts=[])
    rows = {row.task: row for row in (*known.rows, *new.rows)}
    attempts = {(one.task, one.how): one for one in (*known.attempts, *new.attempts)}
    order = [(one.task, one.how) for one in ATTEMPTS]
    return Results(
        rows=[rows[name] for name in sorted(rows)], attempts=[attempts[key] for key in order if key in attempts]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=task_names(), help="default: all")
    parser.add_argument("--pages", type=int, default=8, help="pages at once; attempts run on a quarter of them")
    parser.add_argument("--seeds", type=int, default=3, help="of each task")
    parser.add_argument("--repeats", type=int, default=10, help="seeds of each attempt; 0: none")
    parser.add_argument("--idle-seconds", type=float, default=15.0, help="how long a page is left alone")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    measured = uvloop.run(measure(given.tasks, given.pages, given.seeds, given.idle_seconds, given.repeats))
    write(
        given.out,
        "miniwob_tasks",
        "real pages, Chromium, input and screenshots; scripts instead of a policy",
        added(read(given.out), measured).model_dump(),
        load_average=round(psutil.getloadavg()[0], 1),
        seeds=given.seeds,
        repeats=given.repeats,
        idle_seconds=given.idle_seconds,
    )


if __name__ == "__main__":
    main()
