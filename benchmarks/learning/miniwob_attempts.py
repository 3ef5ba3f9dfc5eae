"""Attempts at MiniWoB's doubtful tasks, by scripts that know the answer: how much can a task give, and to whom?

A script reads the page, which a policy may not do, and acts with real input. `pause` is the time between what it has
seen and what it does about it, as a policy's own time to think would be.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter

from dart.core.action import Action, Click, Drag, Finish, Keys, Move, Point, TypeText, Wait
from dart.core.types import Task
from dart.workers.env.browser import EnvironmentFailure
from dart.workers.env.miniwob import SUITE, MiniWobEnv

T = TypeVar("T")
Place = tuple[float, float]
"""In pixels of the page."""
QUICK, SLOW = 0.02, 2.0
MOST_SECONDS = 30.0
"""After which an attempt gives up; as the page's own harness would, only later."""
_PLACE = TypeAdapter(Place | None)
_PLACES = TypeAdapter(tuple[Place, ...])
_TEXT, _NUMBER = TypeAdapter(str), TypeAdapter(int)


class Outcome(BaseModel):
    """Of one script on several seeds. `rewards`: MiniWoB's own, -1 to 1; of the episodes without a verdict, none."""

    task: str
    how: str
    rewards: list[float]
    full: int
    """How many were exactly 1."""
    without_verdict: int
    failed: int = 0
    """Episodes in which the environment failed."""


class Hands:
    """Looks at a page, takes its time, and acts."""

    def __init__(self, env: MiniWobEnv, pause: float, instruction: str) -> None:
        self._env, self.pause, self.instruction = env, pause, instruction
        self.done = False
        self._end = time.monotonic() + MOST_SECONDS

    @property
    def over(self) -> bool:
        return self.done or time.monotonic() > self._end

    async def read(self, expression: str, shape: TypeAdapter[T]) -> T:
        return shape.validate_python(await self._env.page.evaluate(expression))

    async def look(self, expression: str, shape: TypeAdapter[T]) -> T:
        """What the page has; what is done about it comes after the pause."""
        seen = await self.read(expression, shape)
        await self._env.page.pass_time(self.pause)
        return seen

    async def middle(self, element: str) -> Place | None:
        box = "(r => [r.left + r.width / 2, r.top + r.height / 2])"
        return await self.look(f"(e => e ? {box}(e.getBoundingClientRect()) : null)({element})", _PLACE)

    async def do(self, action: Action) -> None:
        self.done = self.done or (await self._env.act(action)).done

    async def click(self, place: Place | str) -> None:
        """At a place, or on the element with a selector."""
        at = await self.middle(f"document.querySelector({json.dumps(place)})") if isinstance(place, str) else place
        if at is not None:
            await self.do(Click(self.point(at)))

    def point(self, place: Place) -> Point:
        width, height = self._env.screen
        return Point(min(max(place[0] / width, 0), 0.999), min(max(place[1] / height, 0), 0.999))


Script = Callable[[Hands], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attempt:
    task: str
    how: str
    play: Script
    pause: float = QUICK


async def attempt(env: MiniWobEnv, one: Attempt, seeds: Sequence[int]) -> Outcome:
    """The script's outcome on these seeds of its task."""
    outcome = Outcome(task=one.task, how=one.how, rewards=[], full=0, without_verdict=0)
    for seed in seeds:
        try:
            observation = await env.reset(Task(SUITE, one.task, seed))
            await one.play(Hands(env, one.pause, observation.instruction))
            raw = (await env.judge(Finish(), at_limit=True)).evidence["raw"]
        except EnvironmentFailure:
            outcome.failed += 1
            continue
        if isinstance(raw, float):
            outcome.rewards.append(round(raw, 4))
            outcome.full += raw >= 1.0
        else:
            outcome.without_verdict += 1
    outcome.rewards.sort()
    return outcome


# ---- by the clock ----


async def _stay_on(hands: Hands, element: str) -> None:
    while not hands.over:
        place = await hands.middle(element)
        if place is not None:
            await hands.do(Move(hands.point(place)))


async def chase_circle(hands: Hands) -> None:
    await _stay_on(hands, "document.querySelector('#circ')")


async def hover_shape(hands: Hands) -> None:
    await _stay_on(hands, "document.querySelector('#highlight')")


async def moving_items(hands: Hands) -> None:
    """Clicks on the item that is nearest to the middle."""
    items = """Array.from(document.querySelectorAll('.item'), e => e.getBoundingClientRect())
      .map(r => [r.left + r.width / 2, r.top + r.height / 2])
      .filter(([x, y]) => x > 3 && x < 157 && y > 53 && y < 200)"""
    while not hands.over:
        places = await hands.look(items, _PLACES)
        if places:
            await hands.click(min(places, key=lambda place: abs(place[0] - 80)))


async def stock_market(hands: Hands) -> None:
    """Buys as soon as the price that it saw was low enough."""
    wanted = float(hands.instruction.rpartition("$")[2].rstrip("."))
    while not hands.over:
        shown = await hands.look("document.querySelector('#stock-price').textContent", _TEXT)
        price = shown.strip().lstrip("$")
        if price.replace(".", "").isdigit() and float(price) < wanted:
            await hands.click("#buy")


async def simon_says(hands: Hands) -> None:
    """Watches until nothing has lit up for two seconds, and pushes what it has seen; then the first button."""
    lit = "Array.from(document.querySelectorAll('#area button')).findIndex(e => e.classList.contains('push'))"
    seen, before, quiet = list[int](), -1, time.monotonic() + 2.0
    while time.monotonic() < quiet + max(0.0, 2.0 - hands.pause):
        now = await hands.look(lit, _NUMBER)
        if now >= 0 and now != before:
            seen.append(now)
            quiet = time.monotonic()
        before = now
    for number in [*seen, 0, 0, 0, 0, 0]:
        if not hands.over:
            await hands.click(f"#area button:nth-of-type({number + 1})")


async def button_delay(hands: Hands) -> None:
    await hands.click("#subbtn")
    seconds = next(float(word) for word in hands.instruction.split() if word.isdigit())
    await hands.do(Wait(seconds))
    await hands.click("#subbtn2")


# ---- graded ----


async def best_pixel(hands: Hands) -> None:
    """Tries the pixels around the right ones with the page's own marking, and clicks where it gave most."""
    x, y, _ = await hands.read(_BEST_PIXEL, _MARK)
    await hands.click((x, y))
    await hands.click("#subbtn")


# What is right is a point, or a line through it. The drawing begins 50 pixels below the top of the page. A click that
# does not bubble is not seen by MiniWoB's own marker of clicks.
_BEST_PIXEL = """(() => {
  const at = selector => Array.from(document.querySelectorAll(selector),
    e => [+e.getAttribute('cx'), +e.getAttribute('cy')]);
  const unit = ([x, y]) => [x / Math.hypot(x, y), y / Math.hypot(x, y)], minus = (p, q) => [p[0] - q[0], p[1] - q[1]];
  const vertex = at('.init-blue, #init-blue')[0], ends = at('.init-black, #init-black');
  let from = vertex, along = [0, 0];
  if (!vertex) {
    const centres = at('.black-circle');
    from = [0, 1].map(axis => centres.reduce((sum, centre) => sum + centre[axis], 0) / centres.length);
  } else if (ends.length === 1) {
    const [x, y] = unit(minus(ends[0], vertex));
    along = [-y, x];
  } else {
    const [one, other] = ends.map(end => unit(minus(end, vertex)));
    along = [one[0] + other[0], one[1] + other[1]];
  }
  const pixels = new Map();
  for (let far = -200; far <= 200; far++) for (const right of [-1, 0, 1]) for (const down of [-1, 0, 1]) {
    const x = Math.round(from[0] + far * along[0]) + right, y = Math.round(from[1] + far * along[1]) + down + 50;
    if (x > 0 && x < 159 && y > 50 && y < 179) pixels.set(`${x} ${y}`, [x, y]);
  }
  const end = core.endEpisode, marks = [], drawing = document.querySelector('svg'), kept = new Set(drawing.children);
  for (const [x, y] of pixels.values()) {
    graphClicked({ pageX: x, pageY: y });
    core.endEpisode = score => marks.push([x, y, score]);
    document.querySelector('#subbtn').dispatchEvent(new MouseEvent('click'));
    core.endEpisode = end;
    for (const element of [...drawing.children]) if (!kept.has(element)) element.remove();
  }
  return marks.filter(mark => Number.isFinite(mark[2])).sort((p, q) => q[2] - p[2])[0];
})()"""
_MARK = TypeAdapter(tuple[float, float, float])


async def type_colour(hands: Hands) -> None:
    """Types the colour's number into the field, which the page allows beside its picker."""
    wanted = """(([q, named]) => named ? getComputedStyle(named).backgroundColor
      : getComputedStyle(Object.assign(document.body.appendChild(document.createElement('i')),
        { style: 'background-color:' + q.textContent.split(' ')[1] })).backgroundColor)(
      [document.querySelector('#query'), document.querySelector('#query .cc')])"""
    colour = await hands.look(wanted, _TEXT)
    numbers = [int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    await hands.click("#col")
    await hands.do(Keys(("Control_L", "a")))
    await hands.do(TypeText("".join(f"{number:02x}" for number in numbers) + "\t"))
    await hands.click("#query")
    await hands.click("#subbtn")


async def pick_colour(hands: Hands) -> None:
    """Opens the picker and clicks in its middle."""
    await hands.click("#col")
    await hands.do(Drag((hands.point((60, 110)), hands.point((80, 90)))))
    await hands.click("#query")
    await hands.click("#subbtn")


# ---- drawn ----


async def stroke_beside(hands: Hands) -> None:
    """A straight stroke, 45 pixels long and 70 away from the dot, at a right angle to the way there."""
    x, y = await hands.middle("document.querySelector('#circ')") or (80.0, 100.0)
    right, down = 1 if x < 80 else -1, 1 if y < 110 else -1
    middle = (x + 50 * right, y + 50 * down)
    start, end = ((middle[0] + way * right * 16, middle[1] - way * down * 16) for way in (-1, 1))
    await hands.do(Drag((hands.point(start), hands.point(end))))
    await hands.click("#controls button")


async def whole_circle(hands: Hands) -> None:
    """A drag through 24 points, which `Drag` can express and no grammar writes."""
    x, y = await hands.middle("document.querySelector('#circ')") or (80.0, 100.0)
    angles = [2 * math.pi * number / 24 for number in range(25)]
    await hands.do(Drag(tuple(hands.point((x + 22 * math.cos(a), y + 22 * math.sin(a))) for a in angles)))
    await hands.click("#controls button")


async def line_through(hands: Hands) -> None:
    x, y = await hands.middle("document.querySelector('#circ')") or (80.0, 100.0)
    dx, dy = (0.0, 20.0) if "vertical" in hands.instruction else (20.0, 0.0)
    await hands.do(Drag((hands.point((x - dx, y - dy)), hands.point((x + dx, y + dy)))))
    await hands.click("#controls button")


def _both(task: str, what: str, play: Script) -> tuple[Attempt, Attempt]:
    return Attempt(task, f"{what}, at once", play), Attempt(task, f"{what}, 2 s after each look", play, SLOW)


ATTEMPTS: tuple[Attempt, ...] = (
    Attempt("hover-shape", "keep the pointer on the lit square for 30 s", hover_shape),
    *_both("chase-circle", "follow the circle", chase_circle),
    *_both("moving-items", "click on the nearest item", moving_items),
    *_both("stock-market", "buy when the price shown is low", stock_market),
    *_both("simon-says", "push what lit up", simon_says),
    *_both("button-delay", "click, wait as told, click", button_delay),
    *(
        Attempt(task, "click on the best pixel", best_pixel)
        for task in ("bisect-angle", "circle-center", "find-midpoint", "right-angle")
    ),
    *(
        Attempt(task, how, play)
        for task in ("use-colorwheel", "use-colorwheel-2")
        for how, play in (("type the exact colour", type_colour), ("any place in the picker", pick_colour))
    ),
    Attempt("draw-circle", "a straight stroke beside the dot", stroke_beside),
    Attempt("draw-circle", "a drag around the dot", whole_circle),
    Attempt("draw-line", "a straight stroke through the dot", line_through),
)
