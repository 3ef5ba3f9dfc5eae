"""MiniWoB++: 130 small web tasks in a real browser, seen as pixels, acted on with real input events.

Every episode loads the task's page anew with its random numbers seeded, so that a Task determines the start state.
Page functions are called to start the episode and to read the verdict, never to act. Once the task has given its
verdict, the episode is frozen: later actions change nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel

from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env import miniwob_oracle
from dart.workers.env.oracle import Plan
from dart.workers.env.web import WebEnv, WebOptions, WebWorld
from dart.worlds import Verdict
from dart.worlds.missing import problem
from dart.worlds.tasks import no_task

SUITE = "miniwob"

# At the end of an episode MiniWoB covers the page with START and shows the next problem; disabling startEpisode leaves
# the page as it is. The display beside the task, which shows the reward and a clock and makes the page scrollable, is
# hidden. Pictures of the problem, and those that its style sheet uses later, are loaded first, and what the problem
# draws in its next frames is drawn: else they appear late.
_START = """(async () => {
  document.head.insertAdjacentHTML('beforeend', '<style>#reward-display, #click-canvas { display: none }</style>');
  core.EPISODE_MAX_TIME = 2147483647;
  Math.seedrandom(%s);
  core.startEpisodeReal();
  core.startEpisode = () => {};
  while (!WOB_TASK_READY) await new Promise(resolve => setTimeout(resolve, 5));
  const pictures = new Set(Array.from(document.images, image => image.src));
  const collect = css => { for (const match of css.matchAll(/url\\(["']?([^"')]+)["']?\\)/g)) pictures.add(match[1]); };
  for (const sheet of document.querySelectorAll('style')) collect(sheet.textContent);
  for (const element of document.body.querySelectorAll('*')) {
    const style = getComputedStyle(element);
    if (style.backgroundImage !== 'none') collect(style.backgroundImage);
    if (style.listStyleImage !== 'none') collect(style.listStyleImage);
  }
  await Promise.all(Array.from(pictures, source => {
    const image = new Image();
    image.src = source;
    return image.decode().catch(() => {});
  }));
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const said = core.getUtterance();
  return typeof said === 'string' ? said : said.utterance;
})()"""
# A page that has navigated elsewhere will never give a verdict: the episode is over, with reward 0.
_VERDICT = "typeof WOB_DONE_GLOBAL === 'undefined' ? [true, 0] : [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"


@dataclass(frozen=True, slots=True)
class Caution:
    """Why one should know these tasks before training on them."""

    tasks: tuple[str, ...]
    why: str


CAUTIONS = (
    Caution(("hover-shape",), "never gives a verdict, so its reward is always 0"),
    Caution(
        ("chase-circle", "moving-items"),
        "end by themselves after 10 s, and pay for what is hit meanwhile: a policy that thinks for seconds has lost",
    ),
    Caution(("simon-says",), "shows what to push once, in the first seconds, whether or not a screenshot is taken"),
    Caution(("stock-market",), "changes its price ten times a second, and after 10 s nothing can be bought any more"),
    Caution(
        ("button-delay",),
        "measures 1 to 3 s between two clicks, the policy's own time included, and needs "
        "environment.options.max_wait_seconds of 3 or more",
    ),
    Caution(
        ("bisect-angle", "circle-center", "find-midpoint", "right-angle"),
        "pay by how close a click is, and a full 1 is often out of reach of any pixel: set curation.success_threshold "
        "below 1",
    ),
    Caution(
        ("use-colorwheel", "use-colorwheel-2"),
        "pay by how close a colour is, even a wrong one, and a full 1 needs it exact, typed as a number: set "
        "curation.success_threshold to what you call close",
    ),
    Caution(
        ("draw-circle",),
        "cannot be done as meant, because no grammar writes a drag along a curve; a straight stroke beside the dot is "
        "paid like a circle",
    ),
)
"""The tasks of which `dart doctor` warns. docs/miniwob.md has this table, with what was measured."""


@functools.cache
def pages_folder() -> Path:
    """Where the task pages are. Raises UserError if the package is missing."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the package miniwob is not installed: run `pip install 'dart-gui-rl[env-browser]'`")
    return Path(spec.submodule_search_locations[0]) / "html" / "miniwob"


@functools.cache
def task_names() -> tuple[str, ...]:
    """Every task's name, sorted."""
    return tuple(sorted(path.stem for path in pages_folder().glob("*.html")))


def check_task(name: str) -> None:
    """Raises UserError with the closest names if there is no such task."""
    if name not in task_names():
        raise no_task(SUITE, name, task_names())


class MiniWobOptions(WebOptions):
    """`environment.options` where `environment.kind` is miniwob."""


class MiniWobEnv(WebEnv):
    """One page with one task at a time. Its verdict is the task's own reward."""

    @classmethod
    def check_task(cls, name: str) -> None:
        check_task(name)

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        return miniwob_oracle.TASKS

    @classmethod
    def plan(cls, name: str) -> Plan:
        return miniwob_oracle.plan(name)

    async def begin(self, task: Task) -> str:
        await self.page.navigate((pages_folder() / f"{task.name}.html").as_uri())
        return str(await self.page.evaluate(_START % json.dumps(task.seed), wait=True))

    async def grade(self) -> tuple[bool, Verdict]:
        """The page's own verdict; 0 if it has given none, however the episode ended."""
        done, given = await self.page.evaluate(_VERDICT)
        raw = float(given or 0) if done else None
        reward = max(0.0, min(1.0, raw or 0.0))
        return bool(done), Verdict(reward, {"page_gave_a_verdict": bool(done), "raw": raw})


class MiniWob(WebWorld):
    """One Chromium for all environments of the worker."""

    Options = MiniWobOptions
    environment = MiniWobEnv

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        return {"miniwob tasks": lambda: problem(pages_folder), **super().checks(options)}

    @classmethod
    def warnings(cls, options: BaseModel, names: Collection[str]) -> list[str]:
        """One for each caution that concerns any of the names."""
        concerned = [(caution, [name for name in caution.tasks if name in names]) for caution in CAUTIONS]
        return [f"{', '.join(some)}: {caution.why} (docs/miniwob.md)" for caution, some in concerned if some]

    @property
    def versions(self) -> dict[str, str]:
        return {"miniwob": metadata.version("miniwob"), **super().versions}
