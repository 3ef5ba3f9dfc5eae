"""The world webapps: offline web applications that keep CUA-Gym-Hub's contract, in the worker's own Chromium.

An application serves its page and, for each session id (`sid`), a state: `/post?sid=` sets it, `/go?sid=` tells it and
how it differs from the first. Read for this: CUA-Gym-Hub at commit c4ded60 of 2026-05-27 (its README, DEPLOY.md and the
`vite.config` files of its applications), and the tasks of CUA-Gym as their data card and runners describe them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Collection

from pydantic import BaseModel

from dart.errors import UserError
from dart.workers.env.browser import Browser
from dart.workers.env.web import WebEnv, WebWorld
from dart.workers.env.webapps.environment import WebAppEnv
from dart.workers.env.webapps.episodes import Shared
from dart.workers.env.webapps.options import WebAppsOptions
from dart.workers.env.webapps.servers import Servers
from dart.workers.env.webapps.tasks import Tasks
from dart.worlds import Timeouts
from dart.worlds.missing import problem

OLDEST_NODE = 18
NODE_REMEDY = "run `apt-get install nodejs npm`, or install it from nodejs.org"


class WebApps(WebWorld):
    """One Chromium, and one server for each application, for all environments of the worker."""

    Options = WebAppsOptions
    environment = WebAppEnv
    timeouts = Timeouts(lease=120.0, reset=600.0, act=120.0, judge=300.0, probe=60.0, renew=120.0)

    def __init__(self) -> None:
        super().__init__()
        self._shared: Shared | None = None

    @classmethod
    def check_tasks(cls, options: BaseModel, names: Collection[str]) -> None:
        """That the tasks exist and can be run, and that their applications are built."""
        assert isinstance(options, WebAppsOptions)
        Tasks(options).check(names)

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        assert isinstance(options, WebAppsOptions)
        return {
            "webapps folders": lambda: problem(lambda: Tasks(options)),
            "webapps server": lambda: problem(lambda: check_command(options.command[0])),
            "webapps python": lambda: problem(lambda: check_python(options.interpreter)),
            **super().checks(options),
        }

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, WebAppsOptions)
        check_command(options.command[0])
        tasks, servers = Tasks(options), Servers(options)
        await super().start(options, screen)
        assert isinstance(self._browser, Browser)
        await servers.open()
        self._resources.push_async_callback(servers.close)
        self._shared = Shared(options, tasks, servers, self._browser)

    async def lease(self) -> WebEnv:
        assert self._shared is not None
        return await WebAppEnv.lease(self._shared, self._screen)


def check_command(program: str) -> None:
    """Raises UserError unless it is there, and, if it is Node.js, new enough for the published applications."""
    found = shutil.which(program)
    if found is None:
        remedy = NODE_REMEDY if program == "node" else "name a program on the PATH"
        raise UserError(f"environment.options.command: there is no program {program}: {remedy}")
    if program == "node":
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        major = said.removeprefix("v").partition(".")[0]
        if not major.isdigit() or int(major) < OLDEST_NODE:
            raise UserError(
                f"{found} is {said or 'not Node.js'}: version {OLDEST_NODE} or newer is needed: {NODE_REMEDY}"
            )


def check_python(python: str) -> None:
    """Raises UserError unless it is an interpreter that has what published programs import."""
    try:
        ran = subprocess.run([python, "-c", "import requests"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"environment.options.python {python}: {error.strerror}: name a Python interpreter") from None
    if ran.returncode:
        raise UserError(
            f"environment.options.python {python} has no requests, which the published tasks' programs import: run "
            f"`{python} -m pip install requests`, or `pip install 'dart-gui-rl[env-webapps]'` if it is dart's own"
        )
