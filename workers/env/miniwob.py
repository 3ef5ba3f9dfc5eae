"""MiniWoB++: 130 small web tasks in a real browser, seen as pixels, acted on with real input events.

Every episode is a fresh load of the task's page with its random numbers seeded, so that a Task names one start
state. Page functions are called to start the episode and to read the verdict, never to act. Once the task has given
its verdict the episode is frozen: later actions change nothing.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import json
import struct
from pathlib import Path

from dart.config import BUILTIN_SUITE, Environment
from dart.core.action import Action, Wait
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.workers.env.browser import Browser, EnvironmentFailure, Page
from dart.workers.env.inputs import InputDevices

# The end of an episode covers the page with START and shows the next problem: without startEpisode it stays as it
# is. The display beside the task shows the reward and a clock, and lets the page be scrolled. Pictures that the
# problem brings, or that its style sheet holds for later, are loaded first: else they appear some time after.
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
# A page that has gone elsewhere has no verdict and never will have.
_VERDICT = "typeof WOB_DONE_GLOBAL === 'undefined' ? [true, 0] : [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"


@functools.cache
def pages_folder() -> Path:
    """Where the task pages are. UserError when the package is missing."""
    spec = importlib.util.find_spec("miniwob")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the package miniwob is not installed: run `pip install 'dart-gui-rl[env-browser]'`")
    return Path(spec.submodule_search_locations[0]) / "html" / "miniwob"


@functools.cache
def task_names() -> tuple[str, ...]:
    """Every task's name, sorted."""
    return tuple(sorted(path.stem for path in pages_folder().glob("*.html")))


def check_task(name: str) -> None:
    """UserError, with the closest names, when there is no such task."""
    if name in task_names():
        return
    close = difflib.get_close_matches(name, task_names(), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}?" if close else "for example click-test, enter-text or login-user"
    raise UserError(f"environment.tasks.names: {BUILTIN_SUITE} has no task {name!r}: {hint}")


class MiniWobEnv:
    """One environment: one page of the browser, one episode at a time. Make one with `open`.

    `reset` and `act` raise EnvironmentFailure when the page crashed or hung; the next `reset` replaces the page.
    """

    def __init__(self, browser: Browser, config: Environment, page: Page) -> None:
        self._browser = browser
        self._config = config
        self._page = page
        self._devices = InputDevices(config.viewport)
        self._final: Observation | None = None
        self.pages_replaced = 0

    @classmethod
    async def open(cls, browser: Browser, config: Environment) -> MiniWobEnv:
        return cls(browser, config, await browser.new_page(config.viewport, config.step_timeout_seconds))

    @property
    def page(self) -> Page:
        """For an oracle, which may read the page."""
        return self._page

    async def reset(self, task: Task) -> Observation:
        """Start the task's episode: its first screenshot and its instruction."""
        if task.suite != BUILTIN_SUITE:
            raise UserError(
                f"task {task.id} is of suite {task.suite!r}, this environment runs {BUILTIN_SUITE!r}: use another"
            )
        check_task(task.name)
        self._devices = InputDevices(self._config.viewport)
        self._final = None
        if not self._page.broken:
            try:
                return await self._start(task)
            except EnvironmentFailure:
                pass  # as a page that broke after its last episode would: a new one gets the same chance
        await self._replace_page()
        return await self._start(task)

    async def act(self, action: Action, image: bool = True) -> Observation:
        """Carry the action out and look again. Without `image`, or once done, only the verdict is looked at.

        An action that a page does not offer (system, code) changes nothing: that it was chosen is the policy's doing.
        """
        if self._final is not None:
            return self._final
        calls = self._devices.calls(action)
        if calls:
            await self._page.input(calls)
        pause = max(0.0, min(action.seconds, self._config.max_wait_seconds)) if isinstance(action, Wait) else 0.0
        await self._page.pass_time(pause + self._config.settle_seconds)
        done, raw = await self._page.evaluate(_VERDICT)
        look = await self._look() if image and not done else _NO_IMAGE  # nobody acts on a page that is done
        observation = Observation(look, "", bool(done), max(0.0, min(1.0, float(raw or 0))) if done else 0.0)
        if done:
            self._final = observation
        return observation

    async def close(self) -> None:
        await self._page.close()

    async def _start(self, task: Task) -> Observation:
        await self._page.navigate((pages_folder() / f"{task.name}.html").as_uri())
        instruction = await self._page.evaluate(_START % json.dumps(task.seed), wait=True)
        return Observation(await self._look(), str(instruction))

    async def _look(self) -> Image:
        data = await self._page.screenshot()
        width, height = struct.unpack(">II", data[16:24])
        return Image.of(data, "image/png", width, height)

    async def _replace_page(self) -> None:
        await self._page.close()
        self._page = await self._browser.new_page(self._config.viewport, self._config.step_timeout_seconds)
        self.pages_replaced += 1


_NO_IMAGE = Image(b"", "", 0, 0)
