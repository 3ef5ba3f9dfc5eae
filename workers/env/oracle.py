"""A scripted oracle for tasks on web pages: it reads the page, which a policy may not do, and acts as a policy does.

For `dart collect --from oracle`, for demonstrations (supervised learning) and for tests of the environment. A task's
`Plan` says what to do; `WebEnv.plan` has it. Every click comes with its target's rectangle, so that a learner can be
given any point in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dart.core.action import Action, Click, Point, TypeText, Wait
from dart.core.types import Observation, Task
from dart.workers.env.browser import Page

if TYPE_CHECKING:
    from dart.workers.env.web import WebEnv


@dataclass(frozen=True, slots=True)
class Target:
    """What a click is aimed at, in fractions of the observation; `points`: places in it that nothing covers."""

    left: float
    top: float
    right: float
    bottom: float
    points: tuple[Point, ...]

    def centre(self) -> Point:
        """The free point nearest to the middle of all free points."""
        x = sum(point.x for point in self.points) / len(self.points)
        y = sum(point.y for point in self.points) / len(self.points)
        return min(self.points, key=lambda point: (point.x - x) ** 2 + (point.y - y) ** 2)


@dataclass(frozen=True, slots=True)
class DemonstrationStep:
    """What was seen, and what was done then. `target` is None unless it was a click."""

    observation: Observation
    action: Action
    target: Target | None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A whole episode; `reward` is the task's own verdict, 0 if the oracle got stuck."""

    task: Task
    instruction: str
    steps: tuple[DemonstrationStep, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class On:
    """A click on the element that a JavaScript expression returns."""

    element: str


Step = On | TypeText | Wait
Plan = Callable[[str], Sequence[Step]]
"""The steps of an episode with this instruction. Raises ValueError for an instruction that it does not understand."""


_GRID = 9  # points per side that are tested for being free
_LOCATE = """((element, n) => {
  if (!element) return null;
  const r = element.getBoundingClientRect(), free = [];
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
    const x = r.left + r.width * (i + .5) / n, y = r.top + r.height * (j + .5) / n;
    const hit = document.elementFromPoint(x, y);
    if (hit && element.contains(hit)) free.push([x / innerWidth, y / innerHeight]);
  }
  return [[r.left / innerWidth, r.top / innerHeight, r.right / innerWidth, r.bottom / innerHeight], free];
})(%s, %d)"""
_INSIDE = 1.0 - 1e-9


class Oracle:
    """Gives one episode's next action, and assumes that each is carried out. Clicks go to the middle of their target,
    or with `rng` to any free point of it."""

    def __init__(self, plan: Plan, instruction: str, rng: random.Random | None = None) -> None:
        self._plan, self._instruction, self._rng = plan, instruction, rng
        self._steps: Iterator[Step] | None = None

    async def next(self, page: Page) -> tuple[Action, Target | None] | None:
        """None if it is stuck. Raises ValueError for an instruction that the plan does not understand."""
        if self._steps is None:
            self._steps = iter(self._plan(self._instruction))
        match next(self._steps, None):
            case None:
                return None
            case On(element):
                target = await _locate(page, element)
                if target is None:  # hidden behind another element, or out of sight: some seeds are impossible
                    return None
                return Click(self._rng.choice(target.points) if self._rng else target.centre()), target
            case action:
                return action, None


async def demonstrate(env: WebEnv, task: Task, rng: random.Random | None = None) -> Demonstration:
    """Do the task; `rng` as for Oracle.

    Raises UserError for a task that the oracle does not know, and EnvironmentFailure if the environment fails.
    """
    plan = env.plan(task.name)
    observation = await env.reset(task)
    instruction = observation.instruction
    oracle = Oracle(plan, instruction, rng)
    steps: list[DemonstrationStep] = []
    while not observation.done and (suggested := await oracle.next(env.page)):
        steps.append(DemonstrationStep(observation, *suggested))
        observation = await env.act(suggested[0])
    return Demonstration(task, instruction, tuple(steps), observation.reward if observation.done else 0.0)


async def _locate(page: Page, element: str) -> Target | None:
    found = await page.evaluate(_LOCATE % (element, _GRID), own_world=True)
    if found is None or not found[1]:
        return None
    left, top, right, bottom = (min(max(edge, 0.0), _INSIDE) for edge in found[0])
    return Target(left, top, right, bottom, tuple(Point(x, y) for x, y in found[1] if 0 <= x < 1 and 0 <= y < 1))
