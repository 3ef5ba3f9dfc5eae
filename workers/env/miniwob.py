"""MiniWoB++: 130 small web tasks in a real browser, seen as pixels, acted on with real input events.

Every episode loads the task's page anew with its random numbers seeded, so that a Task determines the start state.
Page functions are called to start the episode and to read the verdict, never to act. Once the task has given its
verdict, the episode is frozen: later actions change nothing.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import json
from collections.abc import Callable, Collection
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, Field

from dart.core.action import Action, Wait
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.workers.env.browser import Browser, EnvironmentFailure, Page
from dart.workers.env.devtools import find_executable
from dart.workers.env.inputs import InputDevices
from dart.workers.env.oracle import TASKS as ORACLE_TASKS
from dart.workers.env.oracle import Oracle
from dart.worlds import Env, Verdict, World, WorldOptions, from_png

SUITE = "miniwob"

# At the end of an episode MiniWoB covers the page with START and shows the next problem; disabling startEpisode leaves
# the page as it is. The display beside the task, which shows the reward and a clock and makes the page scrollable, is
# hidden. Pictures of the problem, and those that its style sheet uses later, are loaded first: else they appear late.
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
  const said = core.getUtterance();
  return typeof said === 'string' ? said : said.utterance;
})()"""
# A page that has navigated elsewhere will never give a verdict: the episode is over, with reward 0.
_VERDICT = "typeof WOB_DONE_GLOBAL === 'undefined' ? [true, 0] : [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"


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
    if name in task_names():
        return
    close = difflib.get_close_matches(name, task_names(), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else "for example click-test, enter-text or login-user"
    raise UserError(f"environment.tasks.names: {SUITE} has no task {name!r}: {hint}")


class MiniWobOptions(WorldOptions):
    """`environment.options` where `environment.kind` is miniwob."""

    step_timeout_seconds: float = Field(10.0, gt=0.0, description="A page that takes longer is replaced.")
    settle_seconds: float = Field(0.0, ge=0.0, description="Waited after each action before the screenshot.")
    max_wait_seconds: float = Field(2.0, ge=0.0, description="The longest `wait` action that is carried out.")
    browser: str | None = Field(None, description="Chromium's executable; none: searched for on the PATH.")


class MiniWob(World):
    """One Chromium for all environments of the worker."""

    Options = MiniWobOptions
    actions = frozenset({"move", "click", "button", "drag", "scroll", "keys", "type_text", "wait", "observe"})

    def __init__(self) -> None:
        self._resources = contextlib.AsyncExitStack()
        self._browser: Browser | None = None
        self._options, self._screen = MiniWobOptions(), (0, 0)

    @classmethod
    def check_task(cls, name: str) -> None:
        check_task(name)

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        named = options.browser if isinstance(options, MiniWobOptions) else None
        return {
            "miniwob tasks": lambda: _problem(pages_folder),
            "chromium": lambda: _problem(lambda: find_executable(named)),
        }

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        return ORACLE_TASKS

    @property
    def versions(self) -> dict[str, str]:
        return {"miniwob": metadata.version("miniwob"), "chromium": self._browser.version if self._browser else ""}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, MiniWobOptions)
        self._options, self._screen = options, screen
        self._browser = await self._resources.enter_async_context(Browser.launch(options.browser))

    async def lease(self) -> MiniWobEnv:
        assert self._browser is not None
        return await MiniWobEnv.open(self._browser, self._options, self._screen)

    async def close(self) -> None:
        await self._resources.aclose()


def _problem(check: Callable[[], object]) -> str | None:
    try:
        check()
    except UserError as error:
        return str(error)
    return None


class MiniWobEnv(Env):
    """One environment: one page of the browser, one episode at a time. Make one with `open`.

    `reset` and `act` raise EnvironmentFailure when the page crashed or hung; `renew` and the next `reset` replace it.
    """

    def __init__(self, browser: Browser, options: MiniWobOptions, screen: tuple[int, int], page: Page) -> None:
        super().__init__(options, screen)
        self._browser, self._settings = browser, options
        self._page = page
        self._devices = InputDevices(screen)
        self._final: Observation | None = None
        self._raw: float | None = None
        self._oracle: Oracle | None = None
        self.pages_replaced = 0

    @classmethod
    async def open(cls, browser: Browser, options: MiniWobOptions, screen: tuple[int, int]) -> MiniWobEnv:
        return cls(browser, options, screen, await browser.new_page(screen, options.step_timeout_seconds))

    @property
    def page(self) -> Page:
        """For an oracle, which may read the page."""
        return self._page

    async def reset(self, task: Task) -> Observation:
        """Start the task's episode: its first screenshot and its instruction."""
        if task.suite != SUITE:
            raise UserError(f"task {task.id} is of suite {task.suite!r}, this environment runs {SUITE!r}: use another")
        check_task(task.name)
        self._devices = InputDevices(self.screen)
        self._final = self._oracle = self._raw = None
        observation = await self._start_twice(task)
        self._oracle = Oracle(task, observation.instruction)
        return observation

    async def _start_twice(self, task: Task) -> Observation:
        """On the current page, or on a new one if that is broken or breaks now."""
        if not self._page.broken:
            try:
                return await self._start(task)
            except EnvironmentFailure:
                pass  # the page may have broken after its last episode: try once more on a new one
        await self._replace_page()
        return await self._start(task)

    async def act(self, action: Action) -> Observation:
        """Carry out the action and take a screenshot; once the task has given its verdict, no more are taken.

        An action that a page does not offer (system, code) changes nothing: choosing it is the policy's mistake.
        """
        if self._final is not None:
            return self._final
        await self.conclude(action)
        if (final := await self._verdict()) is not None:
            return final
        return Observation(await self._look())

    async def conclude(self, action: Action) -> None:
        if self._final is not None:
            return
        if calls := self._devices.calls(action):
            await self._page.input(calls)
        pause = max(0.0, min(action.seconds, self._settings.max_wait_seconds)) if isinstance(action, Wait) else 0.0
        await self._page.pass_time(pause + self._settings.settle_seconds)

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The page's own verdict; 0 if it has given none, however the episode ended."""
        final = self._final or await self._verdict()
        return Verdict(final.reward if final else 0.0, {"page_gave_a_verdict": final is not None, "raw": self._raw})

    async def probe(self) -> bool:
        return not self._page.broken

    async def renew(self) -> bool:
        """Every reset loads its page anew, so only a broken page has to be replaced."""
        if self._page.broken:
            await self._replace_page()
        return True

    async def suggest(self) -> Action | None:
        assert self._oracle is not None, "the env worker asks after a reset"
        suggested = await self._oracle.next(self._page)
        return suggested[0] if suggested else None

    async def _verdict(self) -> Observation | None:
        """The task's verdict, which is final; None if it has given none yet."""
        done, raw = await self._page.evaluate(_VERDICT)
        if done:
            self._raw = float(raw or 0)
            self._final = Observation(_NO_IMAGE, "", True, max(0.0, min(1.0, self._raw)))
        return self._final

    async def close(self) -> None:
        await self._page.close()

    async def _start(self, task: Task) -> Observation:
        await self._page.navigate((pages_folder() / f"{task.name}.html").as_uri())
        instruction = await self._page.evaluate(_START % json.dumps(task.seed), wait=True)
        return Observation(await self._look(), str(instruction))

    async def _look(self) -> Image:
        return from_png(await self._page.screenshot())

    async def _replace_page(self) -> None:
        await self._page.close()
        self._page = await self._browser.new_page(self.screen, self._settings.step_timeout_seconds)
        self.pages_replaced += 1


_NO_IMAGE = Image(b"", "", 0, 0)
