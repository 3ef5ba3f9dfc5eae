"""The options of gymnasium environments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, JsonValue, PositiveInt, model_validator

from dart.core.action import Action
from dart.errors import UserError
from dart.worlds.scoring import ScoredOptions

Translate = Callable[[Action, object], object]
"""An action and the environment's action space → the environment's action, or None if it has none for this one."""

BROWSERGYM = "browsergym/"
"""What the ids of BrowserGym's environments begin with."""


class GymOptions(ScoredOptions):
    """`environment.options` where `environment.kind` is gym.

    A plain environment needs `actions`, `keys` or `cells`, and `instruction` or `instruction_at`. BrowserGym needs none
    of these: it has a mouse, a keyboard and a goal.
    """

    id: str = Field(
        min_length=1,
        description="The environment, as `gymnasium.make` takes it: `Id-v0`, or `module:Id-v0` to import its module "
        "first; `browsergym/miniwob.{task}` for BrowserGym. `{task}` stands for the task's name.",
    )
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="More keyword arguments for `gymnasium.make`."
    )
    actions: str | None = Field(
        None,
        description="`module:function`: called with an action of dart and the action space, it returns the "
        "environment's action, or none where there is none and the environment is to stand still.",
    )
    keys: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="The environment's action for each key, by X keysym: `{Left: 0, Right: 1}`. A list is an array.",
    )
    cells: tuple[PositiveInt, PositiveInt] | None = Field(
        None,
        description="Columns and rows of the screen's cells: a left click in one is the action of its number, row by "
        "row from the top left. For a Discrete space of that size.",
    )
    instruction: str = Field("", description="The instruction; `{task}` stands for the task's name.")
    instruction_at: str = Field(
        "",
        description="Where a reset's answer holds the instruction, if `instruction` is empty: `info.KEY` or "
        "`observation.KEY`, with dots for keys within.",
    )
    browser: str | None = Field(None, description="BrowserGym: Chromium's executable; none: searched for on the PATH.")
    page_timeout_seconds: float = Field(10.0, gt=0.0, description="BrowserGym: the limit of Playwright's own waits.")
    settle_seconds: float = Field(0.0, ge=0.0, description="BrowserGym: waited after each action.")
    max_wait_seconds: float = Field(
        2.0, ge=0.0, description="BrowserGym: the longest `wait`, hold of a button or drag that is carried out."
    )

    @model_validator(mode="after")
    def _consistent(self) -> GymOptions:
        if self.actions is not None and (self.keys or self.cells):
            raise ValueError(
                "actions is set, and keys or cells too: remove keys and cells, which your function replaces"
            )
        given = self.actions is not None or bool(self.keys) or self.cells is not None
        if self.is_browsergym:
            if given:
                raise ValueError("BrowserGym has a mouse and a keyboard: leave out actions, keys and cells")
            if "viewport" in self.arguments:
                raise ValueError("arguments.viewport: set environment.viewport instead, which is BrowserGym's, too")
            return self
        if not given:
            raise ValueError(
                "nothing says how clicks and keys become the environment's actions: give actions (module:function), "
                "keys, or cells"
            )
        if not (self.instruction or self.instruction_at):
            raise ValueError("the environment has no instruction: give instruction, or instruction_at")
        return self

    @property
    def is_browsergym(self) -> bool:
        return self.id.rpartition(":")[2].startswith(BROWSERGYM)

    @property
    def module(self) -> str:
        """The module that registers the environment, or "" if gymnasium itself does."""
        named, _, name = self.id.rpartition(":")
        if named or not self.is_browsergym:
            return named
        benchmark, dot, _ = name.removeprefix(BROWSERGYM).partition(".")
        return f"browsergym.{benchmark}" if dot else "browsergym.core"

    def name(self, task: str) -> str:
        """The id without its module, for a task."""
        return self.id.rpartition(":")[2].replace("{task}", task)


def import_here(module: str, field: str) -> object:
    """Import a module of the user's, also from the folder in which dart was started. Raises UserError."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except (ImportError, SyntaxError) as error:
        raise UserError(
            f"environment.options.{field}: module {module} cannot be imported ({error}): install it, start dart in its "
            "folder, or put that folder on PYTHONPATH"
        ) from None
