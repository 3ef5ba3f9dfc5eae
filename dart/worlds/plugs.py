"""The class that `environment.kind` names, and `environment.options` read with its own model.

`find` imports the module by name, on demand: on the coordinator's machine (`dart doctor`, `dart train`, `dart collect`)
and in the env worker. So the coordinator's side depends on no world, and no world depends on the coordinator.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from dart.config.loading import explain
from dart.core.action_json import KINDS
from dart.errors import UserError
from dart.worlds.closing import close_all
from dart.worlds.contract import Env, Plug, SyncEnv, World
from dart.worlds.threads import Threaded, all_ended

log = logging.getLogger(__name__)
CALL_SECONDS = 30.0
"""How long calls that are under way may take when the world closes."""
BUILT_IN = {
    "miniwob": "dart.workers.env.miniwob:MiniWob",
    "ladder": "dart.workers.env.ladder:Ladder",
    "gym": "dart.workers.env.gym.world:Gym",
    "openenv": "dart.workers.env.openenv.world:OpenEnv",
    "osworld": "dart.workers.env.osworld.world:OSWorld",
    "android": "dart.workers.env.android.world:Android",
    "desktop": "dart.workers.env.desktop.world:Desktop",
    "webapps": "dart.workers.env.webapps.world:WebApps",
}
"""Kinds that ship with dart."""


class NotHere(UserError):
    """The world's module is not on this machine; it may be on another."""


def known_here(kind: str) -> bool:
    """Whether dart's own env workers run this kind. Other kinds are run by the user's own workers."""
    return kind in BUILT_IN or ":" in kind


def find(kind: str) -> type[Plug]:
    """The class that `environment.kind` names. Raises UserError, or NotHere if its module cannot be imported."""
    if not known_here(kind):
        raise UserError(
            f"environment.kind {kind}: no world of that name: use {', '.join(BUILT_IN)}, or module:Class for one of "
            "your own; for env workers in another language start `dart coordinator`"
        )
    module_name, _, name = BUILT_IN.get(kind, kind).partition(":")
    if kind not in BUILT_IN and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # where `python -m dart worker` will look as well
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise NotHere(
            f"environment.kind {kind}: module {module_name} cannot be imported ({error}): start dart in the module's "
            "folder, or put that folder on PYTHONPATH"
        ) from None
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, World | Env | SyncEnv)):
        where = getattr(module, "__file__", "built in")
        what = "is not a World, Env or SyncEnv of dart.worlds" if found is not None else "does not exist"
        raise UserError(f"environment.kind {kind}: {name} {what} in {where}: name a class that is one")
    if missing := getattr(found, "__abstractmethods__", None):
        raise UserError(f"environment.kind {kind}: {name} lacks {', '.join(sorted(missing))}: implement them")
    if isinstance(found.actions, str) or (set(found.actions) - set(KINDS)):
        raise UserError(
            f"environment.kind {kind}: {name}.actions is {found.actions!r}: write a set of names of actions, which are "
            f"{', '.join(sorted(KINDS))}"
        )
    return found


def read_options(plug: type[Plug], options: Mapping[str, object]) -> BaseModel:
    """`environment.options` as the world's own model. Raises UserError naming field, value and remedy."""
    try:
        return plug.Options.model_validate(dict(options))
    except ValidationError as error:
        lines = [explain("config", problem, plug.Options, "environment.options.") for problem in error.errors()]
        raise UserError("\n".join(lines)) from None


def check(kind: str, options: Mapping[str, object], tasks: Sequence[str]) -> type[Plug]:
    """Check all that can be checked before a run: the class, the options, the tasks. Raises UserError."""
    plug = find(kind)
    plug.check_tasks(read_options(plug, options), tasks)
    return plug


def make(plug: type[Plug]) -> World:
    """The world for the class; for an Env or SyncEnv, one that makes an instance for each lease. Raises
    TypeError for any other class."""
    if issubclass(plug, World):
        return plug()
    if issubclass(plug, Env | SyncEnv):
        return _OneEach(plug)
    raise TypeError(f"{plug.__name__} is not a World, Env or SyncEnv")


class _OneEach(World):
    """A world of environments that share nothing: each lease makes an instance."""

    def __init__(self, made: type[Env | SyncEnv]) -> None:
        self._class = made
        self._leased: list[Env] = []
        self.actions, self.timeouts = made.actions, made.timeouts  # type: ignore[misc]

    async def start(self, options: BaseModel, screen: tuple[int, int]) -> None:
        self._options, self._screen = options, screen

    async def lease(self) -> Env:
        made, options, screen = self._class, self._options, self._screen
        env = (
            await Threaded.start(lambda: made(options, screen), made.__name__)
            if issubclass(made, SyncEnv)
            else made(options, screen)
        )
        self._leased.append(env)
        return env

    async def dispose(self, env: Env) -> None:
        """One whose closing fails, or is cut off because its time or the run is over, is left for `close`."""
        await env.close()
        self._leased.remove(env)

    async def close(self) -> None:
        await close_all(env.close() for env in self._leased)
        if not await all_ended(CALL_SECONDS):
            log.warning("an environment is still in a call, and has not been closed")
