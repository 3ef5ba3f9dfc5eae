"""The world osworld: OSWorld's tasks on virtual machines that run OSWorld's server (docs/osworld.md).

This module imports without httpx: the coordinator's machine reads the options and checks the tasks with it. The parts
that speak to machines are imported when the world starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from pydantic import BaseModel

from dart.errors import UserError
from dart.workers.env.osworld.options import OSWorldOptions
from dart.workers.env.osworld.programs import ACTIONS
from dart.workers.env.osworld.tasks import Tasks, check_form
from dart.worlds import Env, Timeouts, World
from dart.worlds.closing import close_all
from dart.worlds.missing import package, problem

if TYPE_CHECKING:
    from dart.workers.env.osworld.episodes import OSWorldEnv, Shared

_httpx = partial(package, "httpx", extra="osworld")


class OSWorld(World):
    """Machines of one pool, and OSWorld's evaluators."""

    Options = OSWorldOptions
    actions = ACTIONS
    timeouts = Timeouts(lease=900, reset=1800, act=240, judge=900, probe=60, renew=900)

    def __init__(self) -> None:
        self._shared: Shared | None = None
        self._leased: set[OSWorldEnv] = set()

    @classmethod
    def check_task(cls, name: str) -> None:
        check_form(name)

    @classmethod
    def check_tasks(cls, options: BaseModel, names: Collection[str]) -> None:
        """That the folder has the tasks, that they are supported, and that `leave_out` does not refuse them."""
        assert isinstance(options, OSWorldOptions)
        Tasks(options.tasks_folder).check(names, options.leave_out)

    @classmethod
    def checks(cls, options: BaseModel) -> Mapping[str, Callable[[], str | None]]:
        assert isinstance(options, OSWorldOptions)
        from dart.workers.env.osworld.evaluator import missing
        from dart.workers.env.osworld.reachable import unreachable

        return {
            "httpx": _httpx,
            "osworld tasks": lambda: problem(lambda: Tasks(options.tasks_folder)),
            "osworld evaluators": lambda: missing(options.evaluators),
            "osworld machines": lambda: unreachable(options) if _httpx() is None else None,
        }

    @property
    def versions(self) -> Mapping[str, str]:
        from dart.workers.env.osworld.evaluator import REQUIREMENT

        return {"httpx": metadata.version("httpx"), "osworld evaluators": REQUIREMENT} if self._shared else {}

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        assert isinstance(options, OSWorldOptions)
        if missing := _httpx():
            raise UserError(missing)
        from dart.workers.env.osworld.episodes import Shared

        self._shared = Shared.make(options, screen)
        await self._shared.start()

    async def lease(self) -> Env:
        assert self._shared is not None
        from dart.workers.env.osworld.episodes import OSWorldEnv

        env = await OSWorldEnv.boot(self._shared)
        self._leased.add(env)
        return env

    async def dispose(self, env: Env) -> None:
        await env.close()
        self._leased = {one for one in self._leased if one is not env}

    async def close(self) -> None:
        """Close all environments at once, because each waits for its machine, and then what they share, even if some
        fail to close."""
        leased, self._leased = self._leased, set()
        shared, self._shared = self._shared, None
        try:
            await close_all(env.close() for env in leased)
        finally:
            if shared is not None:
                await shared.close()
