"""Worlds of web pages: one Chromium for all environments of a worker, one page for each, real input, screenshots.

A world subclasses `WebEnv`, which says how a task begins on its page and how the page is graded, and names it in a
`WebWorld`. Page functions are called to start an episode and to read the verdict, never to act. Once the page says that
the episode is over, it is frozen: later actions change nothing.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import ClassVar, Self

from pydantic import BaseModel, Field

from dart.core.action import Action, Wait
from dart.core.types import Image, Observation, Task
from dart.workers.env.browser import Browser, EnvironmentFailure, Page
from dart.workers.env.devtools import find_executable
from dart.workers.env.inputs import PAUSE, Call, InputDevices
from dart.workers.env.oracle import Oracle, Plan
from dart.worlds import Env, Verdict, World, WorldOptions, from_png
from dart.worlds.missing import problem
from dart.worlds.pictures import NO_IMAGE

EPISODES_PER_COLLECTION = 50
"""A page collects its garbage this often, which takes 1 to 2 % of the time of short episodes and a third off Chromium's
memory."""


class WebOptions(WorldOptions):
    """The options of every world of web pages."""

    step_timeout_seconds: float = Field(10.0, gt=0.0, description="A page that takes longer is replaced.")
    settle_seconds: float = Field(0.0, ge=0.0, description="Waited after each action before the screenshot.")
    max_wait_seconds: float = Field(
        2.0, ge=0.0, description="The longest `wait`, hold of a button or drag that is carried out."
    )
    browser: str | None = Field(None, description="Chromium's executable; none: searched for on the PATH.")


class WebEnv(Env):
    """One environment: one page of the browser, one episode at a time. Make one with `open`.

    `reset` and `act` raise EnvironmentFailure when the page crashed or hung; `renew` and the next `reset` replace it.
    """

    def __init__(self, browser: Browser, options: WebOptions, screen: tuple[int, int], page: Page) -> None:
        super().__init__(options, screen)
        self._browser, self._settings = browser, options
        self._page = page
        self._devices = InputDevices(screen, options.max_wait_seconds)
        self._task: Task | None = None
        self._instruction = ""
        self._oracle: Oracle | None = None
        self._verdict: Verdict | None = None
        """Set, with `_final`, when the page has said that the episode is over."""
        self._final: Observation | None = None
        self._episodes = 0

    @classmethod
    async def open(cls, browser: Browser, options: WebOptions, screen: tuple[int, int]) -> Self:
        return cls(browser, options, screen, await browser.new_page(screen, options.step_timeout_seconds))

    @property
    def page(self) -> Page:
        """The page in use now; an oracle may read it."""
        return self._page

    # ---- what a world says ----

    @abstractmethod
    async def begin(self, task: Task) -> str:
        """Load the task on `page`, which may hold an earlier episode's; return the instruction."""

    @abstractmethod
    async def grade(self) -> tuple[bool, Verdict]:
        """Whether the page says that the episode is over, and the verdict if it were over now."""

    @classmethod
    @abstractmethod
    def plan(cls, name: str) -> Plan:
        """How the oracle does the task. Raises UserError for a task that it does not know."""

    # ---- an episode ----

    async def reset(self, task: Task) -> Observation:
        """Start the task's episode: its first screenshot and its instruction."""
        self.check_task(task.name)
        self._devices = InputDevices(self.screen, self._settings.max_wait_seconds)
        self._task = self._oracle = self._verdict = self._final = None
        observation = await self._start_twice(task)
        self._task, self._instruction = task, observation.instruction
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

    async def _start(self, task: Task) -> Observation:
        await self._page.clear_clipboard()
        self._episodes += 1
        if not self._episodes % EPISODES_PER_COLLECTION:
            await self._page.collect_garbage()
        instruction = await self.begin(task)
        return Observation(await self._look(), instruction)

    async def act(self, action: Action) -> Observation:
        """Carry out the action and take a screenshot; once the episode is over, no more are taken.

        An action that a page does not offer (system, code) changes nothing: choosing it is the policy's mistake.
        """
        image: Image | None = await self.conclude(action)
        if self._final is not None:
            return self._final
        if image is None:  # a subclass's own `conclude` may return nothing
            image = await self._look()
        return Observation(image, last_action_error=self._devices.refused(action))

    async def conclude(self, action: Action) -> Image:
        """What `act` does, also after the last step; the page is graded before the screenshot."""
        if self._final is not None:
            return NO_IMAGE
        if not self._devices.refused(action):
            await self._input(self._devices.calls(action))
        pause = max(0.0, min(action.seconds, self._settings.max_wait_seconds)) if isinstance(action, Wait) else 0.0
        await self._page.pass_time(pause + self._settings.settle_seconds)
        over, verdict = await self.grade()
        if over:
            self._verdict, self._final = verdict, Observation(NO_IMAGE, "", True, verdict.reward)
            return NO_IMAGE
        return await self._look()

    async def _input(self, calls: Iterable[Call]) -> None:
        """Carry the commands out, and let the page go on during their pauses."""
        for is_pause, some in groupby(calls, lambda call: call[0] == PAUSE):
            batch = list(some)
            if not is_pause:
                await self._page.input(batch)
                continue
            for _, parameters in batch:
                await self._page.pass_time(float(str(parameters["seconds"])))

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The page's own verdict, also at the step limit and when the policy finished."""
        return self._verdict or (await self.grade())[1]

    async def suggest(self) -> Action | None:
        assert self._task is not None, "the env worker asks after a reset"
        if self._oracle is None:
            self._oracle = Oracle(self.plan(self._task.name), self._instruction)
        suggested = await self._oracle.next(self._page)
        return suggested[0] if suggested else None

    # ---- the page ----

    async def probe(self) -> bool:
        return not self._page.broken

    async def renew(self) -> bool:
        """Every reset makes its own start, so only a broken page has to be replaced."""
        if self._page.broken:
            await self._replace_page()
        return True

    async def close(self) -> None:
        await self._page.close()

    async def _look(self) -> Image:
        return from_png(await self._page.screenshot())

    async def _replace_page(self) -> None:
        await self._page.close()
        self._page = await self._new_page()

    async def _new_page(self) -> Page:
        return await self._browser.new_page(self.screen, self._settings.step_timeout_seconds)


class WebWorld(World):
    """One Chromium for all environments of the worker, each a page of class `environment`."""

    Options: ClassVar[type[BaseModel]] = WebOptions
    actions = frozenset({"move", "click", "button", "drag", "scroll", "keys", "type_text", "wait", "observe"})
    environment: ClassVar[type[WebEnv]]

    def __init__(self) -> None:
        self._resources = contextlib.AsyncExitStack()
        self._browser: Browser | None = None
        self._options, self._screen = WebOptions(), (0, 0)

    @classmethod
    def check_task(cls, name: str) -> None:
        cls.environment.check_task(name)

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        return cls.environment.oracle_tasks()

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        named = options.browser if isinstance(options, WebOptions) else None
        return {"chromium": lambda: problem(lambda: find_executable(named))}

    @property
    def versions(self) -> dict[str, str]:
        return {"chromium": self._browser.version if self._browser else ""}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, WebOptions)
        self._options, self._screen = options, screen
        self._browser = await self._resources.enter_async_context(Browser.launch(options.browser))

    async def lease(self) -> WebEnv:
        assert self._browser is not None
        return await self.environment.open(self._browser, self._options, self._screen)

    async def close(self) -> None:
        await self._resources.aclose()
