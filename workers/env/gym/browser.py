"""BrowserGym: its tasks, goals and validation, with real input to its page and screenshots in pixels.

`BrowserEnv` does everything but act and look: the browser's context, the task's set-up, which page is active, the chat,
validation. Actions go to the page as input events, as on dart's own web pages, instead of through BrowserGym's text
actions; and only the screen is read, because its reading of the page's structure costs more than all the rest.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from dart.core.action import Action, Finish, System, Wait
from dart.core.types import Image, Observation, Task
from dart.errors import UserError
from dart.workers.env.devtools import LANGUAGE, SURROUNDINGS, find_executable
from dart.workers.env.gym.options import GymOptions
from dart.workers.env.inputs import PAUSE, InputDevices
from dart.workers.env.miniwob import pages_folder
from dart.worlds import EnvironmentFailure, SyncEnv, Verdict, from_png
from dart.worlds.pictures import NO_IMAGE
from dart.worlds.scoring import Score

if TYPE_CHECKING:
    from browsergym.core.env import BrowserEnv
    from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, Playwright

MINIWOB_URL = "MINIWOB_URL"
"""Where BrowserGym looks for MiniWoB's pages; the folder of the package miniwob if it is not set."""


class BrowserGym(SyncEnv):
    """One environment with a Playwright and a Chromium of its own, both kept from episode to episode."""

    def __init__(self, options: BaseModel, screen: tuple[int, int]) -> None:
        super().__init__(options, screen)
        assert isinstance(options, GymOptions)
        self._settings = options
        self._driver = _share_playwright().start(find_executable(options.browser))
        self._env: BrowserEnv | None = None
        self._name = ""
        self._devices = InputDevices(screen, options.max_wait_seconds)
        self._scale = _scale(options)
        self._input: tuple[Page, CDPSession] | None = None
        self._score = Score()
        self._final: Observation | None = None
        self._evidence: dict[str, object] = {}

    # ---- an episode ----

    def reset(self, task: Task) -> Observation:
        env = self._made_for(task)
        self._devices = InputDevices(self.screen, self._settings.max_wait_seconds)
        self._score, self._final, self._evidence = Score(), None, {}
        seen, _ = env.reset(seed=task.seed)
        goal = self._settings.instruction.replace("{task}", task.name) or goal_text(seen["goal_object"])
        return Observation(self._look(env), goal)

    def act(self, action: Action) -> Observation:
        """Once the task says that it is over, later actions change nothing."""
        if self._final is not None:
            return self._final
        env = self._running()
        info, _, _ = env.pre_step()
        error = self._carry_out(env, action)
        if self._validate(env, info):
            self._final = Observation(NO_IMAGE, done=True)
            return self._final
        return Observation(self._look(env), last_action_error=error)

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        """The task's own reward; it first gets the answer, or that the task is infeasible, as a chat message."""
        if self._final is None and isinstance(last, Finish):
            env = self._running()
            info, tell, report_infeasible = env.pre_step()
            if last.refuses:
                report_infeasible(last.answer or "The task is infeasible.")
            elif last.answer:
                tell(last.answer)
            self._validate(env, info)
        return self._score.verdict(self._settings, "last", self._evidence)

    def probe(self) -> bool:
        """Whether its browser runs and the page that is shown answers."""
        if not self._driver.connected:
            return False
        if self._env is not None and self._env.context is not None:
            with contextlib.suppress(Exception):  # Playwright raises Exception itself for a lost connection
                return bool(self._env.page.evaluate("1") == 1)
            return False
        return True

    def renew(self) -> bool:
        """End the task and close its pages; the browser stays."""
        self._input = None
        if not self._driver.connected:
            return False
        if self._env is not None:
            self._env.close()
        return True

    def close(self) -> None:
        if not self._driver.alive:  # Playwright waits for good for a process that has died
            return
        with contextlib.suppress(Exception):  # the task's own clean-up, and Playwright of a browser that has died
            if self._env is not None:
                self._env.close()
        with contextlib.suppress(Exception):  # as above; every exception here means that it is gone
            self._driver.stop()

    def kill(self) -> None:
        """From another thread: end Playwright's process and the browser, so that a call that hangs fails."""
        self._driver.kill()

    # ---- the page ----

    def _made_for(self, task: Task) -> BrowserEnv:
        """BrowserGym's environment for the task, without its sleeps and without its reading of the page."""
        import gymnasium

        name = self._settings.name(task.name)
        if self._env is not None and name == self._name:
            return self._env
        if self._env is not None:
            self._env.close()
        width, height = self.screen
        arguments: dict[str, object] = {
            "viewport": {"width": width, "height": height},
            "timeout": 1000 * self._settings.page_timeout_seconds,
            "slow_mo": 0,
            "pre_observation_delay": self._settings.settle_seconds,
            "use_raw_page_output": True,
            "action_mapping": None,
        } | dict(self._settings.arguments)
        if name.startswith("browsergym/miniwob.") and not os.environ.get(MINIWOB_URL):
            given = arguments.get("task_kwargs")
            arguments["task_kwargs"] = {"base_url": f"{pages_folder().as_uri()}/"} | (
                given if isinstance(given, dict) else {}
            )
        try:
            made = gymnasium.make(name, disable_env_checker=True, **arguments)  # type: ignore[arg-type]
        except gymnasium.error.UnregisteredEnv as error:
            raise UserError(f"environment.tasks.names: BrowserGym has no {name} ({error}): correct the name") from None
        env: BrowserEnv = made.unwrapped
        self._env, self._name, self._input = env, name, None
        return env

    def _running(self) -> BrowserEnv:
        if self._env is None or self._env.context is None:
            raise EnvironmentFailure("BrowserGym has no page: no episode has begun")
        return self._env

    def _carry_out(self, env: BrowserEnv, action: Action) -> str:
        """Returns why the page could not carry the action out, as BrowserGym's own step does; empty if it could.

        Raises what Playwright raises if the browser is gone, which no action is to blame for.
        """
        from playwright.sync_api import Error

        if refused := self._devices.refused(action):
            return refused
        try:
            self._send(env, action)
        except Error as error:
            if not self._driver.connected:
                raise
            return f"{type(error).__name__}: {error}"
        return ""

    def _send(self, env: BrowserEnv, action: Action) -> None:
        match action:
            case Wait(seconds):
                env.page.wait_for_timeout(1000 * max(0.0, min(seconds, self._settings.max_wait_seconds)))
            case System("back"):
                env.page.go_back(wait_until="commit")
            case System("open_url", address) if address.startswith(("http://", "https://")):
                env.page.goto(address)
            case _:
                session = self._session(env)
                for method, parameters in self._devices.calls(action):
                    if method == PAUSE:
                        env.page.wait_for_timeout(1000 * float(str(parameters["seconds"])))
                    else:
                        session.send(method, dict(parameters))

    def _validate(self, env: BrowserEnv, info: dict[str, object]) -> bool:
        """Whether the episode is over."""
        seen, reward, terminated, truncated, info = env.post_step(info)
        self._score.add(reward)
        self._evidence = {"terminated": bool(terminated), "url": seen["url"], "task_info": info.get("task_info")}
        return bool(terminated or truncated)

    def _look(self, env: BrowserEnv) -> Image:
        shot = self._session(env).send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True})
        image = from_png(base64.b64decode(shot["data"]))
        # Places are fractions of this screenshot, and a popup may have a size of its own.
        self._devices.resize(round(image.width / self._scale), round(image.height / self._scale))
        return image

    def _session(self, env: BrowserEnv) -> CDPSession:
        """A DevTools session with the active page, which BrowserGym follows as pages open and close."""
        if self._input is None or self._input[0] is not env.page:
            self._input = env.page, env.page.context.new_cdp_session(env.page)
        return self._input[1]


def _scale(options: GymOptions) -> float:
    """How many pixels of a screenshot are one of the page's own, in which the mouse counts."""
    context = options.arguments.get("pw_context_kwargs")
    factor = context.get("device_scale_factor") if isinstance(context, dict) else None
    return float(factor) if isinstance(factor, int | float) and factor > 0 else 1.0


def goal_text(goal: object) -> str:
    """The text of a goal, which is a sequence of messages; pictures in it are named, since prompts hold text alone."""
    parts = []
    for message in goal if isinstance(goal, list | tuple) else ():
        parts.append(str(message["text"]) if message.get("type") == "text" else "[picture]")
    return "\n".join(parts)


# ---- Playwright, one per thread ----


class _Lent:
    """A browser that its borrowers cannot close: BrowserGym closes its browsers after every episode."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def new_context(self, **options: object) -> BrowserContext:
        return self._browser.new_context(**options)

    def close(self) -> None:
        return


class _Driver:
    """The Playwright of one thread, and its browser. `chromium` and `selectors` are what BrowserGym uses of it."""

    def __init__(self, executable: str) -> None:
        from playwright.sync_api import sync_playwright

        self._executable = executable
        self._children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
        self._killed = False
        before = self._running()
        self._playwright: Playwright = sync_playwright().start()
        self._process = self._running() - before
        self._browser: Browser | None = None
        self.selectors = self._playwright.selectors

    @property
    def chromium(self) -> _Driver:
        return self

    def launch(self, *, args: list[str], **options: object) -> _Lent:
        """The thread's browser, for whoever asks: the task and the chat get contexts of their own in it."""
        if self._browser is None or not self._browser.is_connected():
            # Without the first, every screenshot waits for a frame of 16 ms.
            flags = [*args, "--disable-frame-rate-limit", *LANGUAGE]
            self._browser = self._playwright.chromium.launch(
                args=flags, **{"executable_path": self._executable, "env": {**os.environ, **SURROUNDINGS}} | options
            )
        return _Lent(self._browser)

    @property
    def alive(self) -> bool:
        """Whether Playwright's process runs."""
        return not self._killed and self._process <= self._running()

    @property
    def connected(self) -> bool:
        """False once the browser or Playwright's process has died."""
        return self.alive and (self._browser is None or self._browser.is_connected())

    def stop(self) -> None:
        if self._browser is not None:
            with contextlib.suppress(Exception):  # Playwright raises Exception itself for a lost connection
                self._browser.close()
        self._playwright.stop()

    def kill(self) -> None:
        self._killed = True
        for process in self._process & self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _running(self) -> frozenset[int]:
        """The child processes that this thread has started; none where the system does not tell."""
        try:
            return frozenset(int(pid) for pid in self._children.read_text().split())
        except OSError:
            return frozenset()


class _Drivers(threading.local):
    """In BrowserGym's place for its one global Playwright, which only the thread that made it may use."""

    driver: _Driver | None = None

    def start(self, executable: str) -> _Driver:
        self.driver = _Driver(executable)
        return self.driver

    def __getattr__(self, name: str) -> object:
        return getattr(self.driver, name)


_drivers: _Drivers | None = None


def _share_playwright() -> _Drivers:
    """Give BrowserGym a Playwright for each thread. The first call is enough; later ones find the same object."""
    global _drivers  # noqa: PLW0603  BrowserGym's own is global, too
    if _drivers is None:
        import browsergym.core

        logging.getLogger("browsergym.core.env").setLevel(logging.ERROR)  # it warns of the viewport at every reset
        _drivers = _Drivers()
        browsergym.core._set_global_playwright(_drivers)
    return _drivers
