"""What the episodes of the world `ladder` look like: pages and symbols from a task's name and seed. No I/O.

A task's name fixes its six symbols; the seed fixes the instruction and every page. All pages of symbols show the same
six, so that only the instruction says which is right. The page is nine cells, three by three; buttons and symbols are
each in one of them, all nine equally likely; but OK is in the middle, and Next beside it in one of the other eight. The
dead pages that a wrong choice leads to show other symbols, and no button.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import TypedDict

CELLS = 9
SYMBOLS = 6  # on a page
DEAD_PAGES = 8
"""How many different dead pages there are before the first comes again."""

COLOURS = ("red", "blue", "green", "yellow", "orange", "purple")
SIZES = ("small", "big")
SHAPES = ("disc", "ring")
MIDDLE = 4
"""The cell of the OK button."""


@dataclass(frozen=True, slots=True)
class Level:
    """What the tasks of a level ask for, page by page."""

    tasks: int
    next_pages: int
    decisions: int
    twins: bool = False
    """Each of three colours is there twice, small and big. If not, the six have six colours."""
    either: bool = False
    """The instruction leaves the size out, and both twins are right."""
    confirmed: bool = False
    """The last page has an OK button, which is right, and a Next button, which is wrong there."""

    @property
    def pages(self) -> int:
        return self.next_pages + self.decisions + self.confirmed


LEVELS = {
    "easy": Level(15, 5, 1),
    "medium": Level(3, 2, 3, twins=True),
    "hard": Level(3, 2, 5, twins=True, confirmed=True),
    "chain3": Level(3, 2, 3),
    "chain5": Level(3, 2, 5),
    "either": Level(3, 2, 4, twins=True, either=True),
    "long": Level(3, 24, 1),
}
"""The last four are for imitation. The chains have instructions of the form of the medium and the hard tasks. A policy
that imitates `either` picks the small or the big twin at random, so that its roll-outs differ. The long tasks are about
as long as an episode can get. None of these, nor the easy tasks, needs the size or has a Next button that is wrong."""


@dataclass(frozen=True, slots=True)
class Symbol:
    colour: str
    size: str
    shape: str

    @property
    def name(self) -> str:
        """As the instruction names it, for example "small red ring"."""
        return f"{self.size} {self.twins_name}"

    @property
    def twins_name(self) -> str:
        """What it and its twin have in common."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class NextPage:
    """One button, "Next", in `cell` (0 to 8, row by row)."""

    cell: int


@dataclass(frozen=True, slots=True)
class SymbolPage:
    """Six symbols, `symbols[i]` in `cells[i]`. `right` has those that the instruction asks for; none on a dead page."""

    cells: tuple[int, ...]
    symbols: tuple[Symbol, ...]
    right: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True)
class ConfirmPage:
    """Two buttons: "OK" in the middle, which is right, and "Next" in the cell `next`."""

    next: int


Page = NextPage | SymbolPage | ConfirmPage


@dataclass(frozen=True, slots=True)
class Layout:
    """An episode. `pages` are shown in order while every choice is right; `dead` one after the other, around and
    around, once one was wrong."""

    instruction: str
    pages: tuple[Page, ...]
    dead: tuple[Page, ...]

    @property
    def wanted(self) -> tuple[Symbol, ...]:
        """A right choice for each page of symbols, in order."""
        return tuple(page.right[0] for page in self.pages if isinstance(page, SymbolPage))


def task_names() -> tuple[str, ...]:
    return tuple(f"ladder-{level}-{n:02d}" for level, shape in LEVELS.items() for n in range(1, shape.tasks + 1))


def level_of(name: str) -> Level:
    """Raises KeyError for a name that is not in `task_names`."""
    if name not in task_names():
        raise KeyError(name)
    return LEVELS[name.split("-")[1]]


def symbols_of(name: str) -> tuple[Symbol, ...]:
    """The task's six symbols."""
    level = level_of(name)
    rng = random.Random(f"ladder/{name}")
    six: list[Symbol] = []
    for colour in rng.sample(COLOURS, 3) if level.twins else COLOURS:
        size, shape = rng.choice(SIZES), rng.choice(SHAPES)
        six += [Symbol(colour, one, shape) for one in (SIZES if level.twins else (size,))]
    return tuple(six)


def layout(name: str, seed: int) -> Layout:
    """The episode of the task with this seed. Raises KeyError for a name that is not in `task_names`."""
    level, symbols = level_of(name), symbols_of(name)
    rng = random.Random(f"ladder/{name}/{seed}")
    wanted = rng.choices(symbols, k=level.decisions)
    nexts = _next_cells(rng, level.next_pages)
    pages: list[Page] = [NextPage(cell) for cell in nexts]
    pages += [_symbol_page(rng, symbols, _right(one, symbols) if level.either else (one,)) for one in wanted]
    if level.confirmed:
        pages.append(ConfirmPage(rng.choice([cell for cell in range(CELLS) if cell != MIDDLE])))
    names = [one.twins_name if level.either else one.name for one in wanted]
    instruction = ", then ".join(["Click Next until symbols appear", *names]) + "."
    return Layout(instruction, tuple(pages), _dead_pages(rng, symbols))


def _next_cells(rng: random.Random, count: int) -> list[int]:
    """Uniform over all cells, but never the same twice running: to click again where one has clicked does not help."""
    cells: list[int] = []
    for _ in range(count):
        cells.append(rng.choice([cell for cell in range(CELLS) if cells[-1:] != [cell]]))
    return cells


def _right(wanted: Symbol, symbols: tuple[Symbol, ...]) -> tuple[Symbol, ...]:
    """The symbol and its twin."""
    return tuple(one for one in symbols if one.twins_name == wanted.twins_name)


def _symbol_page(rng: random.Random, symbols: tuple[Symbol, ...], right: tuple[Symbol, ...]) -> SymbolPage:
    return SymbolPage(tuple(rng.sample(range(CELLS), len(symbols))), symbols, right)


def _dead_pages(rng: random.Random, symbols: tuple[Symbol, ...]) -> tuple[Page, ...]:
    others = [symbol for three in product(COLOURS, SIZES, SHAPES) if (symbol := Symbol(*three)) not in symbols]
    return tuple(_symbol_page(rng, tuple(rng.sample(others, SYMBOLS)), ()) for _ in range(DEAD_PAGES))


class PageJSON(TypedDict):
    """A page as dart/assets/ladder/ladder.html draws it: the cells of the buttons, and [cell, colour, size, shape]
    for each symbol. What the page does not have is None or empty."""

    next: int | None
    symbols: list[tuple[int, str, str, str]]
    right: list[str]
    ok: int | None


class LayoutJSON(TypedDict):
    pages: list[PageJSON]
    dead: list[PageJSON]


def to_json(made: Layout) -> LayoutJSON:
    """The layout for the page's `ladder.start`."""
    return {"pages": [_page_json(page) for page in made.pages], "dead": [_page_json(page) for page in made.dead]}


def _page_json(page: Page) -> PageJSON:
    made: PageJSON = {"next": None, "symbols": [], "right": [], "ok": None}
    match page:
        case NextPage(cell):
            made["next"] = cell
        case SymbolPage(cells, symbols, right):
            placed = zip(cells, symbols, strict=True)
            made["symbols"] = [(cell, one.colour, one.size, one.shape) for cell, one in placed]
            made["right"] = [one.name for one in right]
        case ConfirmPage(cell):
            made["next"], made["ok"] = cell, MIDDLE
    return made
