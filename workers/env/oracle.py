"""A scripted oracle for some MiniWoB tasks: it reads the page, which a policy may not do, and acts as a policy does.

For `dart collect --from oracle`, for demonstrations (supervised learning) and for tests of the environment. `TASKS`
lists the tasks it knows. Every click comes with its target's rectangle, so that a learner can be given any point in it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dart.core.action import Action, Click, Point, TypeText, Wait
from dart.core.types import Observation, Task
from dart.errors import UserError
from dart.workers.env.browser import Page

if TYPE_CHECKING:
    from dart.workers.env.miniwob import MiniWobEnv


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
class _On:
    """A click on the element that a JavaScript expression returns."""

    element: str


_Move = _On | TypeText | Wait
_Plan = Callable[[str], list[_Move]]


def _css(selector: str) -> _On:
    return _On(f"document.querySelector({json.dumps(selector)})")


def _labelled(selector: str, text: str) -> _On:
    """The element of `selector` whose text is `text`."""
    elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return _On(f"{elements}.find(element => element.textContent.trim() === {json.dumps(text)})")


def _quoted(instruction: str) -> list[str]:
    return re.findall(r'"([^"]*)"', instruction)


def _word(pattern: str, instruction: str) -> str:
    match = re.search(pattern, instruction)
    if match is None:
        raise ValueError(
            f"the instruction {instruction!r} does not match {pattern!r}: is this another version of the task?"
        )
    return match.group(1)


def _click_dialog_2(instruction: str) -> list[_Move]:
    label = _quoted(instruction)[0]
    if label == "x":
        return [_css(".ui-dialog-titlebar button")]
    return [_labelled(".ui-dialog-buttonpane button", label)]


def _select(instruction: str) -> list[_Move]:
    names = _word(r"^Select (.*) and click Submit", instruction)
    chosen = [] if names == "nothing" else names.split(", ")
    return [*(_labelled("#boxes label", name) for name in chosen), _css("#subbtn")]


def _enter_text(instruction: str) -> list[_Move]:
    return [_css("#tt"), TypeText(_quoted(instruction)[0]), _css("#subbtn")]


def _enter_password(instruction: str) -> list[_Move]:
    text = TypeText(_quoted(instruction)[0])
    return [_css("#password"), text, _css("#verify"), text, _css("#subbtn")]


def _login_user(instruction: str) -> list[_Move]:
    user, password = _quoted(instruction)
    return [_css("#username"), TypeText(user), _css("#password"), TypeText(password), _css("#subbtn")]


def _identify_shape(_: str) -> list[_Move]:
    name = """({rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[shape.tagName]
               || (/[0-9]/.test(shape.textContent) ? 'digit' : 'letter'))"""
    find = f"document.querySelector('#area-buttons button[data-type=' + {name} + ']')"
    return [_On(f"(shape => {find})(document.querySelector('#area_svg > *'))")]


def _click_shape(instruction: str) -> list[_Move]:
    *adjectives, noun = _word(r"^Click on a (.*)$", instruction).split()
    return [_On(_SHAPE % (json.dumps(adjectives), json.dumps(noun)))]


# Sizes are 20 and 10 pixels; a letter's size is that of its font.
_SHAPE = """((adjectives, noun) => [...document.querySelectorAll('#area_svg > *')].find(element => {
  const plain = {rect: 'rectangle', circle: 'circle', polygon: 'triangle'}[element.tagName];
  const text = plain || element.textContent;
  const type = plain ? 'shape' : /[0-9]/.test(text) ? 'digit' : 'letter';
  const size = plain ? element.getBBox().height : parseFloat(element.getAttribute('font-size'));
  const is = [element.getAttribute('fill'), size > 15 ? 'large' : 'small'];
  return adjectives.every(word => is.includes(word)) && ['item', type, text].includes(noun);
}))(%s, %s)"""


TASKS: dict[str, _Plan] = {
    "click-button": lambda said: [_labelled("#area button", _quoted(said)[0])],
    "click-button-sequence": lambda said: [_css("#subbtn"), _css("#subbtn2")],
    "click-checkboxes": _select,
    # The only wait that UI-TARS has; environment.options.max_wait_seconds shortens it.
    "click-collapsible": lambda said: [_css("#area h3"), Wait(5.0), _css("#subbtn")],
    "click-color": lambda said: [_css("#area [data-color=" + _word(r"on the (\w+)", said) + "]")],
    "click-dialog": lambda said: [_css(".ui-dialog-titlebar button")],
    "click-dialog-2": _click_dialog_2,
    "click-option": _select,
    "click-link": lambda said: [_labelled("#area .alink", _quoted(said)[0])],
    "click-shape": _click_shape,
    "click-tab": lambda said: [_css("#area a[href='#tabs-" + _word(r"#(\d)", said) + "']")],
    "click-test": lambda said: [_css("#subbtn")],
    "click-test-2": lambda said: [_css("#subbtn")],
    "enter-password": _enter_password,
    "enter-text": _enter_text,
    "focus-text": lambda said: [_css("#tt")],
    "focus-text-2": lambda said: [_css("#tt" + _word(r"the (\d)", said))],
    "grid-coordinate": lambda said: [_css("[id='" + _word(r"(\(.*\))", said) + "']")],
    "identify-shape": _identify_shape,
    "login-user": _login_user,
}

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

    def __init__(self, task: Task, instruction: str, rng: random.Random | None = None) -> None:
        self._task, self._instruction, self._rng = task, instruction, rng
        self._moves: Iterator[_Move] | None = None

    async def next(self, page: Page) -> tuple[Action, Target | None] | None:
        """None if it is stuck. Raises UserError for a task that it does not know."""
        if self._moves is None:
            self._moves = iter(_plan(self._task.name)(self._instruction))
        match next(self._moves, None):
            case None:
                return None
            case _On(element):
                target = await _locate(page, element)
                if target is None:  # hidden behind another element, or out of sight: some seeds are impossible
                    return None
                return Click(self._rng.choice(target.points) if self._rng else target.centre()), target
            case action:
                return action, None


def _plan(name: str) -> _Plan:
    if name not in TASKS:
        raise UserError(f"the oracle does not know task {name!r}: it knows {', '.join(TASKS)}")
    return TASKS[name]


async def demonstrate(env: MiniWobEnv, task: Task, rng: random.Random | None = None) -> Demonstration:
    """Do the task; `rng` as for Oracle.

    Raises UserError for a task that the oracle does not know, and EnvironmentFailure if the environment fails.
    """
    _plan(task.name)
    observation = await env.reset(task)
    instruction, oracle = observation.instruction, Oracle(task, observation.instruction, rng)
    steps: list[DemonstrationStep] = []
    while not observation.done and (suggested := await oracle.next(env.page)):
        steps.append(DemonstrationStep(observation, *suggested))
        observation = await env.act(suggested[0])
    return Demonstration(task, instruction, tuple(steps), observation.reward if observation.done else 0.0)


async def _locate(page: Page, element: str) -> Target | None:
    found = await page.evaluate(_LOCATE % (element, _GRID))
    if found is None or not found[1]:
        return None
    left, top, right, bottom = (min(max(edge, 0.0), _INSIDE) for edge in found[0])
    return Target(left, top, right, bottom, tuple(Point(x, y) for x, y in found[1] if 0 <= x < 1 and 0 <= y < 1))
