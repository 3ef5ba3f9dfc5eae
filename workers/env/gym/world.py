"""Gymnasium environments and BrowserGym: each instance has a thread of its own for its whole life."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial

from pydantic import BaseModel

from dart.errors import UserError
from dart.versions import installed
from dart.workers.env.devtools import find_executable
from dart.workers.env.gym.browser import MINIWOB_URL, BrowserGym
from dart.workers.env.gym.options import GymOptions, import_here
from dart.workers.env.gym.plain import PlainGym
from dart.workers.env.gym.translate import translator
from dart.workers.env.miniwob import pages_folder
from dart.worlds import Env, World
from dart.worlds.missing import package, problem
from dart.worlds.plugs import make
from dart.worlds.threads import Threaded

PACKAGES = ("gymnasium", "browsergym-core", "playwright")


class Gym(World):
    """Environments of the id in the options, each made when it is leased."""

    Options = GymOptions

    def __init__(self) -> None:
        self._each: World | None = None

    @classmethod
    def checks(cls, options: BaseModel) -> dict[str, Callable[[], str | None]]:
        if not isinstance(options, GymOptions):
            return {}
        found: dict[str, Callable[[], str | None]] = {"gymnasium": partial(package, "gymnasium", extra="gym")}
        if options.is_browsergym:
            found["browsergym"] = lambda: problem(lambda: _browsergym(options))
            found["chromium"] = lambda: problem(lambda: find_executable(options.browser))
        else:
            found["environment.options.actions"] = lambda: problem(lambda: translator(options))
            if options.module:
                found["environment.options.id"] = lambda: problem(lambda: import_here(options.module, "id"))
        return found

    @property
    def versions(self) -> Mapping[str, str]:
        return installed(*PACKAGES)

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, GymOptions)
        for check in self.checks(options).values():
            if (wrong := check()) is not None:
                raise UserError(wrong)
        if options.module:
            import_here(options.module, "id")
        self._each = make(BrowserGym if options.is_browsergym else PlainGym)
        await self._each.start(options, screen)

    async def lease(self) -> Env:
        assert self._each is not None
        return await self._each.lease()

    async def dispose(self, env: Env) -> None:
        """A page in an endless loop would keep its thread in a call for good: ending its browser ends the call."""
        assert self._each is not None
        try:
            await self._each.dispose(env)
        finally:
            if isinstance(env, Threaded) and isinstance(env.env, BrowserGym):
                env.env.kill()

    async def close(self) -> None:
        if self._each is not None:
            await self._each.close()


def _browsergym(options: GymOptions) -> None:
    """The benchmark's package is there, and Playwright with it. Nothing is imported."""
    for module in ("browsergym", "browsergym.core", options.module, "playwright"):
        try:
            missing = importlib.util.find_spec(module) is None
        except ImportError:
            missing = True
        if missing:
            benchmark = options.module.rpartition(".")[2]
            package = "" if benchmark in ("core", "miniwob") else f" browsergym-{benchmark}"
            raise UserError(
                f"environment.options.id {options.id}: {module} is not installed: run "
                f"`pip install 'dart-gui-rl[browsergym]'{package}`"
            )
    if options.module == "browsergym.miniwob" and not os.environ.get(MINIWOB_URL):
        pages_folder()
