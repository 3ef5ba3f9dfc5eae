"""The world `desktop`: what the env worker sees of it. Imports without Xvfb, python-xlib or any application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from dart.errors import UserError
from dart.worlds import Env, EnvironmentFailure, Timeouts, World, WorldOptions
from dart.worlds.closing import close_all
from dart.worlds.missing import package
from dart.worlds.threads import Threaded

if TYPE_CHECKING:
    from dart.workers.env.desktop.environment import DesktopEnv

log = logging.getLogger(__name__)
SUITE = "desktop"
MODULES = ("Xlib", "jeepney", "PIL")
CLOSE_SECONDS = 60.0
NEEDED = {
    "Xvfb": "xvfb",
    "openbox": "openbox",
    "dbus-daemon": "dbus",
    "/usr/libexec/at-spi-bus-launcher": "at-spi2-core",
}
"""Programs of every desktop → their Debian packages; those of tasks are in `tasks.PROGRAMS`."""


class DesktopOptions(WorldOptions):
    """`environment.options` where `environment.kind` is desktop."""

    settle_seconds: float = Field(
        0.1, ge=0.0, description="After an action the screenshot is taken once the screen has been still for so long…"
    )
    max_settle_seconds: float = Field(3.0, ge=0.0, description="…or after this long, if it does not come to rest.")
    rest_seconds: float = Field(
        0.4, ge=0.0, description="How long it must be still before an episode's first screenshot, and its verdict."
    )
    max_wait_seconds: float = Field(
        5.0, ge=0.0, description="The longest `wait`, hold of a button or drag that is carried out."
    )
    screenshot_format: Literal["png", "jpeg"] = Field(
        "png", description="PNG is exact; JPEG takes a fifth of the time, and fewer bytes only for photographs."
    )
    jpeg_quality: int = Field(85, ge=1, le=100, description="Only for JPEG.")


class Desktop(World):
    """Fresh desktops, each on a thread of its own."""

    Options = DesktopOptions
    actions = frozenset({"move", "click", "button", "drag", "scroll", "keys", "type_text", "wait", "observe"})
    timeouts = Timeouts(lease=180.0, reset=240.0, act=90.0, judge=180.0, probe=30.0, renew=180.0)

    def __init__(self) -> None:
        self._options, self._screen = DesktopOptions(), (0, 0)
        self._leased: dict[Env, DesktopEnv] = {}
        self._versions: dict[str, str] = {}

    @classmethod
    def check_task(cls, name: str) -> None:
        """Also that the task's programs are on this machine."""
        from dart.workers.env.desktop import tasks

        tasks.check_task(name)

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        from dart.workers.env.desktop import tasks

        return tuple(name for name in tasks.task_names() if tasks.load(name).oracle)

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        return {"desktop packages": _missing_modules, "desktop programs": _missing_programs}

    @property
    def versions(self) -> dict[str, str]:
        return self._versions

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        for problem in (_missing_modules(), _missing_programs()):
            if problem is not None:
                raise UserError(problem)
        from dart.workers.env.desktop import processes

        assert isinstance(options, DesktopOptions)
        self._options, self._screen = options, screen
        await asyncio.to_thread(processes.sweep)
        self._versions = await asyncio.to_thread(_versions)

    async def lease(self) -> Env:
        from dart.workers.env.desktop.environment import DesktopEnv

        given_up = threading.Event()

        def make() -> DesktopEnv:
            made = DesktopEnv(self._options, self._screen)
            if given_up.is_set():
                made.close()  # nobody else knows it
                raise EnvironmentFailure("the lease was given up")
            return made

        with contextlib.ExitStack() as undo:
            undo.callback(given_up.set)
            env = await Threaded.start(make, "desktop")
            undo.pop_all()
        assert isinstance(env.env, DesktopEnv)
        self._leased[env] = env.env
        return env

    async def dispose(self, env: Env) -> None:
        """Kills first: a call that hangs, because its X server is stopped say, then ends. Waits until all is gone."""
        desktop = self._leased.pop(env)
        desktop.kill()
        await env.close()
        if not await asyncio.to_thread(desktop.closed.wait, CLOSE_SECONDS):
            log.warning("a desktop hangs: it has not closed within %g s", CLOSE_SECONDS)

    async def close(self) -> None:
        await close_all(self.dispose(env) for env in list(self._leased))


def _missing_modules() -> str | None:
    return package(*MODULES, extra="env-desktop")


def _missing_programs() -> str | None:
    missing = [debian for program, debian in NEEDED.items() if shutil.which(program) is None]
    if not missing:
        return None
    return f"desktops need {', '.join(missing)}: run `apt-get install --no-install-recommends {' '.join(missing)}`"


def _versions() -> dict[str, str]:
    """Of the window manager, as it prints it, and the X server, whose package knows it; empty where unknown."""
    said = subprocess.run(["openbox", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Openbox (\S+)", said)
    return {"openbox": found[1] if found else ""}
