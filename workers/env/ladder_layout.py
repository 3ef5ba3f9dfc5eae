"""What the episodes of the world `ladder` look like: pages and symbols from a task's name and seed. No I/O.

A task's name fixes its six symbols; the seed fixes the instruction and every page. All pages of symbols show the same
six, so that only the instruction says which is right. The page is nine cells, three by three; buttons and symbols are
each in one of them, all nine equally likely. The dead pages that a wrong choice leads to show other symbols, and no
button.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypedDict

CELLS = 9
SYMBOLS = 6  # on a page
DEAD_PAGES = 8
"""How many different dead pages there are before the first comes again."""

COLOURS = ("red", "blue", "green", "yellow", "orange", "purple")
SIZES = ("small", "big")
SHAPES = ("disc", "ring")


@dataclass(frozen=True, slots=True)
class Level:
    """`twins`: each of three colours is there twice, and the two differ in this alone. None: the six have six
    colours."""

    tasks: int
    next_pages: int
    decisions: int
    twins: Literal["size", "shape"] | None = None


LEVELS = {
    "easy": Level(15, 5, 1),
    "medium": Level(3, 2, 3, twins="size"),
    "hard": Level(3, 2, 5, twins="shape"),
    "chain3": Level(3, 2, 3),
    "chain5": Level(3, 2, 5),
}
"""The chains have the form of the medium and the hard tasks, and need only what the easy ones need: who imitates them
and the easy tasks has never had to look at a size or a shape."""


@dataclass(frozen=True, slots=True)
class Symbol:
    colour: str
    size: str
    shape: str

    @property
    def name(self) -> str:
        """As the instruction names it, for example "small red ring"."""
        return f"{self.size} {self.colour} {self.shape}"


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
    rng = random.Random(f"ladder/{name}")
    six: list[Symbol] = []
    for colour in rng.sample(COLOURS, 3) if level.twins else COLOURS:
        size, shape = rng.choice(SIZES), rng.choice(SHAPES)
        sizes = SIZES if level.twins == "size" else (size,)
        shapes = SHAPES if level.twins == "shape" else (shape,)
        six += [Symbol(colour, *pair) for pair in product(sizes, shapes)]
    return tuple(six)


def layout(name: str, seed: int) -> Layout:
    """The episode of the task with this seed. Raises KeyError for a name that is not in `task_names`."""
    level, symbols = level_of(name), symbols_of(name)
    rng = random.Random(f"ladder/{name}/{seed}")
    wanted = rng.choices(symbols, k=level.decisions)
    nexts = _next_cells(rng, level.next_pages)
    pages = [NextPage(cell) for cell in nexts] + [_symbol_page(rng, symbols, right) for right in wanted]
    instruction = ", then ".join(["Click Next until symbols appear", *(symbol.name for symbol in wanted)]) + "."
    return Layout(instruction, tuple(pages), _dead_pages(rng, symbols))


def _next_cells(rng: random.Random, count: int) -> list[int]:
    """Uniform over all cells, but never the same twice running: to click again where one has clicked does not help."""
    cells: list[int] = []
    for _ in range(count):
        cells.append(rng.choice([cell for cell in range(CELLS) if cells[-1:] != [cell]]))
    return cells


def _symbol_page(rng: random.Random, symbols: tuple[Symbol, ...], right: Symbol | None) -> SymbolPage:
    return SymbolPage(tuple(rng.sample(range(CELLS), len(symbols))), symbols, right)


def _dead_pages(rng: random.Random, symbols: tuple[Symbol, ...]) -> tuple[Page, ...]:
    others = [symbol for three in product(COLOURS, SIZES, SHAPES) if (symbol := Symbol(*three)) not in symbols]
    return tuple(_symbol_page(rng, tuple(rng.sample(others, SYMBOLS)), None) for _ in range(DEAD_PAGES))


class PageJSON(TypedDict):
    """A page as dart/assets/ladder/ladder.html draws it: [cell, colour, size, shape] for each symbol, none on a Next
    page; `next` is the cell of the button."""

    next: int | None
    symbols: list[tuple[int, str, str, str]]
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
    placed = [(cell, one.colour, one.size, one.shape) for cell, one in zip(page.cells, page.symbols, strict=True)]
    return {"next": None, "symbols": placed, "right": page.right.name if page.right else None}
