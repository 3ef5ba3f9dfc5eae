"""What the episodes of the world `ladder` look like: pages and symbols from a task's name and seed. No I/O.

A task's name fixes its six symbols; the seed fixes the instruction and every page. All pages of symbols show the same
six, so that only the instruction says which is right. The page is nine cells, three by three; buttons and symbols are
each in one of them, all nine equally likely. The dead pages that a wrong choice leads to show other symbols.
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

TAUGHT = (("red", "blue", "green", "yellow", "orange", "purple"), ("circle", "square", "triangle", "star"))
UNTAUGHT = (("black", "white", "pink", "cyan", "brown", "lime"), ("cross", "diamond", "heart", "moon"))
"""Colours and shapes. Imitation is only ever given those of TAUGHT: no word of UNTAUGHT is in both."""


@dataclass(frozen=True, slots=True)
class Level:
    """`twins`: every colour and every shape is there more than once, so that it takes both to tell symbols apart. Else
    the six have six colours."""

    tasks: int
    next_pages: int
    decisions: int
    alphabet: tuple[tuple[str, ...], tuple[str, ...]]
    twins: bool = False


LEVELS = {
    "easy": Level(15, 5, 1, TAUGHT),
    "medium": Level(3, 2, 3, TAUGHT, twins=True),
    "hard": Level(3, 2, 4, UNTAUGHT),
}


@dataclass(frozen=True, slots=True)
class Symbol:
    colour: str
    shape: str

    @property
    def name(self) -> str:
        """As the instruction names it, for example "red circle"."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class NextPage:
    """One button, "Next", in `cell` (0 to 8, row by row)."""

    cell: int


@dataclass(frozen=True, slots=True)
class SymbolPage:
    """Six symbols, `symbols[i]` in `cells[i]`. `right` is None on a dead page."""

    cells: tuple[int, ...]
    symbols: tuple[Symbol, ...]
    right: Symbol | None


Page = NextPage | SymbolPage


@dataclass(frozen=True, slots=True)
class Layout:
    """An episode. `pages` are shown in order while every choice is right; `dead` one after the other, around and
    around, once one was wrong."""

    instruction: str
    pages: tuple[Page, ...]
    dead: tuple[Page, ...]

    @property
    def wanted(self) -> tuple[Symbol, ...]:
        """The right choices, in order."""
        return tuple(page.right for page in self.pages if isinstance(page, SymbolPage) and page.right)


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
    colours, shapes = level.alphabet
    rng = random.Random(f"ladder/{name}")
    if level.twins:
        pairs = product(rng.sample(colours, 3), rng.sample(shapes, 2))
        return tuple(Symbol(colour, shape) for colour, shape in pairs)
    return tuple(Symbol(colour, rng.choice(shapes)) for colour in colours)


def layout(name: str, seed: int) -> Layout:
    """The episode of the task with this seed. Raises KeyError for a name that is not in `task_names`."""
    level, symbols = level_of(name), symbols_of(name)
    rng = random.Random(f"ladder/{name}/{seed}")
    wanted = rng.sample(symbols, level.decisions)
    nexts = _next_cells(rng, level.next_pages)
    pages = [NextPage(cell) for cell in nexts] + [_symbol_page(rng, symbols, right) for right in wanted]
    instruction = ", then ".join(["Click Next until symbols appear", *(symbol.name for symbol in wanted)]) + "."
    return Layout(instruction, tuple(pages), _dead_pages(rng, level, symbols))


def _next_cells(rng: random.Random, count: int) -> list[int]:
    """Uniform over all cells, but never the same twice running: to click again where one has clicked does not help."""
    cells: list[int] = []
    for _ in range(count):
        cells.append(rng.choice([cell for cell in range(CELLS) if cells[-1:] != [cell]]))
    return cells


def _symbol_page(rng: random.Random, symbols: tuple[Symbol, ...], right: Symbol | None) -> SymbolPage:
    return SymbolPage(tuple(rng.sample(range(CELLS), len(symbols))), symbols, right)


def _dead_pages(rng: random.Random, level: Level, symbols: tuple[Symbol, ...]) -> tuple[Page, ...]:
    others = [symbol for pair in product(*level.alphabet) if (symbol := Symbol(*pair)) not in symbols]
    pages: list[Page] = []
    for _ in range(DEAD_PAGES):
        if rng.random() < 0.5:
            pages.append(NextPage(rng.randrange(CELLS)))
        else:
            pages.append(_symbol_page(rng, tuple(rng.sample(others, SYMBOLS)), None))
    return tuple(pages)


class PageJSON(TypedDict):
    """A page as dart/assets/ladder/ladder.html draws it: [cell, colour, shape] for each symbol, none on a Next page;
    `next` is the cell of the button."""

    next: int | None
    symbols: list[tuple[int, str, str]]
    right: str | None


class LayoutJSON(TypedDict):
    pages: list[PageJSON]
    dead: list[PageJSON]


def to_json(made: Layout) -> LayoutJSON:
    """The layout for the page's `ladder.start`."""
    return {"pages": [_page_json(page) for page in made.pages], "dead": [_page_json(page) for page in made.dead]}


def _page_json(page: Page) -> PageJSON:
    if isinstance(page, NextPage):
        return {"next": page.cell, "symbols": [], "right": None}
    placed = [(cell, one.colour, one.shape) for cell, one in zip(page.cells, page.symbols, strict=True)]
    return {"next": None, "symbols": placed, "right": page.right.name if page.right else None}
