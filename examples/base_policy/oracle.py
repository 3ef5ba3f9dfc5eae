"""What a demonstration does, step by step, with the rectangle that a click may land in.

`plan` gives the moves of a task from its instruction; `locate` finds a click's target on the page. It reads the DOM,
which the policy never sees.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from dart.core.action import Action, Click, Point, TypeText
from dart.workers.env.browser import Page

# The visible point nearest to the middle of what is visible: another element may lie on top.
_LOCATE = """((selector) => {
  const element = document.querySelector(selector);
  if (!element) return null;
  const r = element.getBoundingClientRect(), seen = [], n = 9;
  for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
    const x = r.left + r.width * (i + .5) / n, y = r.top + r.height * (j + .5) / n;
    const hit = document.elementFromPoint(x, y);
    if (hit && (hit === element || element.contains(hit))) seen.push([x, y]);
  }
  if (!seen.length) return null;
  const mx = seen.reduce((a, p) => a + p[0], 0) / seen.length, my = seen.reduce((a, p) => a + p[1], 0) / seen.length;
  const far = p => (p[0] - mx) ** 2 + (p[1] - my) ** 2;
  const [x, y] = seen.reduce((a, p) => far(p) < far(a) ? p : a);
  return {x: Math.floor(x), y: Math.floor(y), box: [r.left, r.top, r.right, r.bottom]};
})(%s)"""


@dataclass(frozen=True, slots=True)
class Move:
    """A click on what `selector` names, at pixel (x, y) of `box` once located; or, without one, typing `text`."""

    selector: str = ""
    text: str = ""
    x: int = 0
    y: int = 0
    box: tuple[float, ...] = ()

    def action(self, width: int, height: int) -> Action:
        if not self.selector:
            return TypeText(self.text)
        return Click(Point(self.x / width, self.y / height))


def plan(task: str, instruction: str) -> list[Move]:
    """The moves that solve `task`. KeyError for a task that has no plan here."""
    return {
        "click-test": lambda: [Move("#subbtn")],
        "click-test-2": lambda: [Move("#subbtn")],
        "click-color": lambda: [Move("#area [data-color=" + _word(r"Click on the (\w+)", instruction) + "]")],
        "click-dialog": lambda: [Move(".ui-dialog button")],
        "focus-text": lambda: [Move("#tt")],
        "focus-text-2": lambda: [Move("#tt" + _word(r"(\d)", instruction))],
        "click-button-sequence": lambda: [Move("#subbtn"), Move("#subbtn2")],
        "enter-text": lambda: [Move("#tt"), Move(text=_word(r'"(.*)"', instruction)), Move("#subbtn")],
    }[task]()


async def locate(page: Page, move: Move) -> Move | None:
    """The move with its point and box. None when nothing of the target can be seen."""
    found = await page.evaluate(_LOCATE % json.dumps(move.selector))
    return None if found is None else replace(move, x=found["x"], y=found["y"], box=tuple(found["box"]))


def _word(pattern: str, instruction: str) -> str:
    match = re.search(pattern, instruction)
    if match is None:
        raise ValueError(f"instruction {instruction!r} is not what the plan expects ({pattern})")
    return match.group(1)
