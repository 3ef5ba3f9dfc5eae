"""The ladder: long, branching, unforgiving and cheap tasks in a real browser, for experiments on learning.

An episode shows pages with a Next button, then decisions: pages of six symbols of which the instruction names the right
one for each. The hard ones end with an OK button beside a Next button. A wrong choice leads to pages that look much the
same and never end, so that a failure costs the whole step limit, as on a desktop; what is right on the last page ends
the episode with success. `ladder_layout` has the tasks.

The pages ship with dart (dart/assets/ladder) and are made for 96 × 96 pixels, nine image tokens of 32 × 32, one for
each cell; they scale to other screens. The page itself keeps the score, which is read for the verdict.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import Field

from dart import assets
from dart.core.types import Task
from dart.workers.env import ladder_layout
from dart.workers.env.oracle import On, Plan
from dart.workers.env.web import WebEnv, WebOptions, WebWorld
from dart.worlds import Verdict
from dart.worlds.tasks import no_task

SUITE = "ladder"
PAGE = Path(assets.__file__).parent / "ladder" / "ladder.html"

# False if the page in the browser is another one.
_START = "typeof ladder !== 'undefined' && (ladder.start(%s), true)"
# A page that has navigated elsewhere can never be done: the episode is over, with reward 0.
_STATE = "typeof ladder === 'undefined' ? null : ladder.state()"


class LadderOptions(WebOptions):
    """`environment.options` where `environment.kind` is ladder. For delays like a desktop's: `environment.delay`."""

    max_wait_seconds: float = Field(
        0.0, ge=0.0, description="The longest `wait` action that is carried out; nothing on these pages takes time."
    )


class LadderEnv(WebEnv):
    """One page with one task at a time."""

    @classmethod
    def check_task(cls, name: str) -> None:
        """Raises UserError with the closest names if there is no such task."""
        if name not in ladder_layout.task_names():
            raise no_task(SUITE, name, ladder_layout.task_names())

    @classmethod
    def oracle_tasks(cls) -> Collection[str]:
        return ladder_layout.task_names()

    @classmethod
    def plan(cls, name: str) -> Plan:
        """The oracle presses Next as often as the task has it, then the symbols that the instruction names, and OK if
        the task ends with it. Where both twins are right it takes either, at random by the instruction. It is stuck on
        a dead page."""
        cls.check_task(name)
        level = ladder_layout.level_of(name)
        return lambda said: [
            *(_named("next") for _ in range(level.next_pages)),
            *(_named(symbol) for symbol in _chosen(said)),
            *([_named("ok")] if level.confirmed else []),
        ]

    async def begin(self, task: Task) -> str:
        """Start on the page that is there, which costs a quarter of loading it; clicks leave nothing behind."""
        made = ladder_layout.layout(task.name, task.seed)
        start = _START % json.dumps(ladder_layout.to_json(made))
        if not await self.page.evaluate(start):
            await self.page.navigate(PAGE.as_uri())
            await self.page.evaluate(start)
        return made.instruction

    async def grade(self) -> tuple[bool, Verdict]:
        """Success if the page says that every choice was right. The evidence is the page's state: see ladder.html."""
        state = await self.page.evaluate(_STATE)
        if state is None:
            return True, Verdict(0.0, {"left_the_page": True})
        return state["done"], Verdict(float(state["done"]), state)


class Ladder(WebWorld):
    """One Chromium for all environments of the worker."""

    Options = LadderOptions
    environment = LadderEnv


def _chosen(instruction: str) -> Iterator[str]:
    """The symbols that it asks for, with a size for those that it names without."""
    chance = random.Random(instruction)
    for name in instruction.removesuffix(".").split(", then ")[1:]:
        sized = name.startswith(ladder_layout.SIZES)
        yield name if sized else f"{chance.choice(ladder_layout.SIZES)} {name}"


def _named(name: str) -> On:
    return On(f"document.querySelector({json.dumps(f'#page[data-kind=live] [data-name={json.dumps(name)}]')})")
