"""The ladder's pages from a task's name and seed: the same every time, all different, and nothing but the instruction
gives the right answer away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from dart.config import load
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env.ladder import SUITE, Ladder, LadderEnv
from dart.workers.env.ladder_layout import (
    CELLS,
    LEVELS,
    MIDDLE,
    SYMBOLS,
    ConfirmPage,
    NextPage,
    Page,
    SymbolPage,
    layout,
    level_of,
    symbols_of,
    task_names,
    to_json,
)
from dart.worlds.plugs import check

SEEDS = 1800
CHI_SQUARED = {1: 15.1, 5: 25.7, 7: 29.9, 8: 31.8}
"""By degrees of freedom: exceeded by chance once in ten thousand; there are a hundred comparisons."""
GOLDEN_INSTRUCTION = (
    "Click Next until symbols appear, then big purple ring, then big orange ring, then big blue ring"
    ", then big orange ring, then big orange ring."
)
GOLDEN_CELLS = [
    6,
    1,
    (5, 1, 4, 0, 7, 6),
    (1, 7, 4, 2, 0, 3),
    (5, 0, 6, 7, 3, 8),
    (3, 8, 4, 6, 0, 1),
    (7, 5, 1, 0, 3, 6),
    7,
]
GOLDEN_DEAD = [
    (6, 4, 0, 1, 5, 7),
    (7, 6, 3, 4, 2, 8),
    (3, 1, 0, 2, 7, 6),
    (6, 4, 2, 0, 5, 8),
    (2, 5, 7, 1, 0, 8),
    (7, 8, 0, 4, 3, 2),
    (5, 7, 4, 1, 6, 2),
    (4, 0, 8, 5, 3, 2),
]


def uniform(found: Iterable[int], values: int) -> bool:
    counts = Counter(found)
    expected = counts.total() / values
    distance = sum((counts[value] - expected) ** 2 / expected for value in range(values))
    return set(counts) <= set(range(values)) and distance < CHI_SQUARED[values - 1]


def choices(name: str, seed: int) -> list[SymbolPage]:
    return [page for page in layout(name, seed).pages if isinstance(page, SymbolPage)]


def place(page: Page) -> int | tuple[int, ...]:
    match page:
        case SymbolPage(cells):
            return cells
        case NextPage(cell) | ConfirmPage(cell):
            return cell


def right_cell(page: SymbolPage) -> int:
    return page.cells[page.symbols.index(page.right[0])]


def test_the_suite() -> None:
    assert len(task_names()) == len(set(task_names())) == 33
    counts = {level: (shape.next_pages, shape.decisions, shape.pages) for level, shape in LEVELS.items()}
    assert counts == {
        "easy": (5, 1, 6), "medium": (2, 3, 5), "hard": (2, 5, 8), "chain3": (2, 3, 5), "chain5": (2, 5, 7),
        "either": (2, 4, 6), "long": (24, 1, 25),
    }  # fmt: skip
    assert {level for level, shape in LEVELS.items() if shape.confirmed} == {"hard"}
    assert (task_names()[0], task_names()[14], task_names()[15], task_names()[32]) == (
        "ladder-easy-01", "ladder-easy-15", "ladder-medium-01", "ladder-long-03",
    )  # fmt: skip


def test_the_config_has_all_but_what_is_for_imitation() -> None:
    trained = {"easy", "medium", "hard"}
    environment = load(Path(__file__).parents[3] / "configs" / "ladder_cpu.yaml").environment
    assert check(environment.kind, environment.options, environment.tasks.names) is Ladder
    assert environment.tasks.names == tuple(one for one in task_names() if one.split("-")[1] in trained)
    with pytest.raises(UserError, match="did you mean settle_seconds"):
        check("ladder", {"settle": 1}, ())


def test_the_demo_is_the_ladder_with_the_first_three_tasks_of_each_level() -> None:
    """The rule by which its tasks were chosen; nothing of the algorithm differs."""
    demo, ladder = (load(Path(__file__).parents[3] / "configs" / f"ladder_{name}.yaml") for name in ("demo", "cpu"))
    assert demo.environment.tasks.names == tuple(
        f"ladder-{level}-{number:02d}" for level in ("easy", "medium", "hard") for number in (1, 2, 3)
    )
    for section in ("model", "agent", "rollout", "curation", "trainer", "sync", "schedule"):
        assert getattr(demo, section) == getattr(ladder, section), section


def test_an_unknown_task_names_close_ones() -> None:
    with pytest.raises(UserError, match=r"no task 'ladder-hard-04': did you mean ladder-hard-0"):
        LadderEnv.check_task("ladder-hard-04")
    with pytest.raises(UserError, match=r"no task 'x': there are for example ladder-easy-01, ladder-easy-02"):
        LadderEnv.check_task("x")
    with pytest.raises(KeyError):
        layout("ladder-hard-3", 0)


def test_a_layout_that_was_written_down_once() -> None:
    """A protocol names tasks and seeds: they must mean the same in every process and every release."""
    made = layout("ladder-hard-01", 7)
    assert made.instruction == GOLDEN_INSTRUCTION
    assert [place(page) for page in made.pages] == GOLDEN_CELLS
    assert [place(page) for page in made.dead] == GOLDEN_DEAD


@pytest.mark.parametrize("name", task_names())
def test_pages_are_as_the_level_says(name: str) -> None:
    level, six = level_of(name), symbols_of(name)
    assert len(set(six)) == SYMBOLS
    for seed in range(50):
        made = layout(name, seed)
        kinds = [NextPage] * level.next_pages + [SymbolPage] * level.decisions + [ConfirmPage] * level.confirmed
        assert [type(page) for page in made.pages] == kinds
        assert len(made.wanted) == level.decisions and set(made.wanted) <= set(six)
        names = [one.twins_name if level.either else one.name for one in made.wanted]
        assert made.instruction.removesuffix(".").split(", then ")[1:] == names
        for page in choices(name, seed):
            assert page.symbols == six, "each page shows the same six: which is right, only the instruction says"
            assert len(set(page.cells)) == SYMBOLS
            assert len(page.right) == 1 + level.either and set(page.right) <= set(six)


@pytest.mark.parametrize("level", LEVELS)
def test_all_are_distinct(level: str) -> None:
    names = [name for name in task_names() if f"-{level}-" in name]
    assert len({frozenset(symbols_of(name)) for name in names}) == len(names)
    made = {repr(to_json(layout(name, seed))) for name in names for seed in range(300)}
    assert len(made) == 300 * len(names)


@pytest.mark.parametrize("name", ["ladder-easy-04", "ladder-medium-01", "ladder-hard-02"])
def test_nothing_but_the_instruction_gives_the_right_answer_away(name: str) -> None:
    six, decisions = symbols_of(name), level_of(name).decisions
    episodes = [choices(name, seed) for seed in range(SEEDS)]
    for step in range(decisions):
        pages = [episode[step] for episode in episodes]
        assert uniform((right_cell(page) for page in pages), CELLS), "its place"
        assert uniform((sorted(page.cells).index(right_cell(page)) for page in pages), SYMBOLS), "its rank in reading"
        assert uniform((six.index(page.right[0]) for page in pages), SYMBOLS), "which of the six it is"
        assert uniform((cell for page in pages for cell in page.cells), CELLS)
    for step in range(1, decisions):
        moved = ((right_cell(one[step]) - right_cell(one[step - 1])) % CELLS for one in episodes)
        assert uniform(moved, CELLS), "its place does not depend on the last one's"


def test_next_is_everywhere_alike_and_never_twice_in_one_place() -> None:
    for name in ("ladder-easy-01", "ladder-medium-03", "ladder-hard-01"):
        count = level_of(name).next_pages
        cells = [[page.cell for page in layout(name, seed).pages[:count]] for seed in range(SEEDS)]  # type: ignore[union-attr]
        for step in range(count):
            assert uniform((one[step] for one in cells), CELLS)
        assert all(one[step] != one[step - 1] for one in cells for step in range(1, count))


def test_the_wrong_button_beside_ok_is_everywhere_else_alike() -> None:
    last = [layout("ladder-hard-03", seed).pages[-1] for seed in range(SEEDS)]
    others = [cell for cell in range(CELLS) if cell != MIDDLE]
    assert uniform((others.index(page.next) for page in last if isinstance(page, ConfirmPage)), len(others))


def test_colours_suffice_except_for_twins_that_differ_in_size() -> None:
    for name in task_names():
        twins, six = level_of(name).twins, symbols_of(name)
        pairs = [[one for one in six if one.colour == colour] for colour in {symbol.colour for symbol in six}]
        if not twins:
            assert [len(pair) for pair in pairs] == [1] * SYMBOLS
            continue
        assert [len(pair) for pair in pairs] == [2, 2, 2]
        for one, other in pairs:
            assert one.size != other.size and one.shape == other.shape
    assert [level.twins for level in LEVELS.values()] == [False, True, True, False, False, True, False]


def test_dead_pages_have_six_other_symbols_and_no_right_answer() -> None:
    for name in task_names():
        for seed in range(40):
            for page in layout(name, seed).dead:
                assert isinstance(page, SymbolPage), "no dead page has a button"
                assert page.right == () and len(set(page.symbols)) == SYMBOLS == len(set(page.cells))
                assert not set(page.symbols) & set(symbols_of(name))


def test_the_oracle_takes_either_twin_alike_often() -> None:
    taken = [
        "small" in str(step)
        for seed in range(SEEDS)
        for step in LadderEnv.plan("ladder-either-01")(layout("ladder-either-01", seed).instruction)[2:]
    ]
    assert uniform(taken, 2)


def test_the_oracle_reads_the_instruction() -> None:
    made = layout("ladder-medium-01", 5)
    steps = [str(step) for step in LadderEnv.plan("ladder-medium-01")(made.instruction)]
    assert len(steps) == len(made.pages)
    assert all(symbol.name in step for symbol, step in zip(made.wanted, steps[2:], strict=True))
    last = LadderEnv.plan("ladder-hard-01")(layout("ladder-hard-01", 5).instruction)[-1]
    assert 'data-name=\\"ok\\"' in getattr(last, "element", "")
    assert Task(SUITE, "ladder-medium-01", 5).id == "ladder/ladder-medium-01#5"
