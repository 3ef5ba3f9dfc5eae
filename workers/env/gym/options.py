"""The options of gymnasium environments, and how an episode's rewards become a verdict."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, PositiveInt, model_validator

from dart.core.action import Action
from dart.errors import UserError
from dart.worlds import Verdict, WorldOptions

Translate = Callable[[Action, object], object]
"""An action and the environment's action space → the environment's action, or None if it has none for this one."""

BROWSERGYM = "browsergym/"
"""What the ids of BrowserGym's environments begin with."""


class GymOptions(WorldOptions):
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
    reward: Literal["sum", "last"] | None = Field(
        None, description="Which rewards count: their sum, or the last. None: the sum, and BrowserGym's last."
    )
    reward_range: tuple[float, float] = Field(
        (0.0, 1.0), description="The rewards that become 0 and 1; others in proportion, within [0, 1]."
    )
    success_at: float | None = Field(
        None, description="If given, a reward of at least this becomes 1 and any other 0, instead of `reward_range`."
    )
    browser: str | None = Field(None, description="BrowserGym: Chromium's executable; none: searched for on the PATH.")
    page_timeout_seconds: float = Field(10.0, gt=0.0, description="BrowserGym: the limit of Playwright's own waits.")
    settle_seconds: float = Field(0.0, ge=0.0, description="BrowserGym: waited after each action.")
    max_wait_seconds: float = Field(
        2.0, ge=0.0, description="BrowserGym: the longest `wait`, hold of a button or drag that is carried out."
    )

    @model_validator(mode="after")
    def _consistent(self) -> GymOptions:
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range [{low:g}, {high:g}] is not a range: write [what becomes 0, what becomes 1]")
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


@dataclass(slots=True)
class Score:
    """The rewards of one episode so far."""

    total: float = 0.0
    last: float = 0.0
    steps: int = 0

    def add(self, reward: object) -> None:
        """Raises ValueError for a reward that is not a number."""
        self.last = float(reward)  # type: ignore[arg-type]
        self.total += self.last
        self.steps += 1

    def verdict(self, options: GymOptions, counted: Literal["sum", "last"], evidence: Mapping[str, object]) -> Verdict:
        """The verdict, with the unscaled reward in its evidence. Raises ValueError for a reward that is NaN."""
        raw = self.total if (options.reward or counted) == "sum" else self.last
        if options.success_at is not None:
            reward = float(raw >= options.success_at)
        else:
            low, high = options.reward_range
            reward = min(max((raw - low) / (high - low), 0.0), 1.0)  # NaN stays NaN, which Verdict refuses
        return Verdict(reward, {"reward": raw, "steps": self.steps, **evidence})


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
