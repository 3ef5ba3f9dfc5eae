"""The benchmarks of worlds: what is measured again replaces what it repeats, and nothing else; the pages' tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning import miniwob_pages, worlds
from benchmarks.learning.miniwob_attempts import ATTEMPTS, Outcome
from benchmarks.learning.miniwob_pages import Results, Row
from benchmarks.learning.miniwob_tasks import added
from dart.workers.env.miniwob import CAUTIONS


def measured(world: str, environments: int, steps: float, megabytes: float = 10.0) -> worlds.Row:
    one = worlds.Round(boot=1.0, starts=2.0, start_ms=3.0, steps=steps, step_ms=5.0, megabytes=megabytes * environments)
    return worlds.summarise(world, environments, [one], load=0.5)


def test_rows_of_a_later_run_replace_the_same_ones_alone(tmp_path: Path) -> None:
    path = tmp_path / "worlds.json"
    worlds.write(path, [measured("desktop", 16, 1.0), measured("miniwob", 1, 2.0)], {})
    worlds.write(path, [measured("miniwob", 1, 3.0), measured("browsergym", 1, 4.0)], {"browsergym 64": "no room"})
    found = [(row.world, row.environments, row.steps_per_second) for row in worlds.recorded(path)]
    assert found == [("miniwob", 1, 3.0), ("browsergym", 1, 4.0), ("desktop", 16, 1.0)]


def test_a_row_is_the_median_of_its_rounds_with_its_ends() -> None:
    rounds = [worlds.Round(1.0, 2.0, 3.0, steps, 5.0, 320.0) for steps in (30.0, 10.0, 20.0)]
    row = worlds.summarise("miniwob", 16, rounds, load=1.23)
    assert (row.steps_per_second, row.steps_range, row.mb_per_environment) == (20.0, (10.0, 30.0), 20.0)


def test_what_does_not_fit_into_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = worlds.SPARE_BYTES + 1_000_000_000

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    rows = [measured("browsergym", 1, 1.0, megabytes=300.0), measured("browsergym", 16, 1.0, megabytes=100.0)]
    assert worlds.too_little_memory(rows, "browsergym", 64) == "64 x 100 MB do not fit into 1,000 MB"
    assert worlds.too_little_memory(rows, "browsergym", 16) == "16 x 300 MB do not fit into 1,000 MB"
    assert not worlds.too_little_memory(rows, "browsergym", 1)
    assert not worlds.too_little_memory(rows, "miniwob", 64), "nothing is known"


def test_tasks_that_are_examined_again_replace_their_rows_alone() -> None:
    first, second = ATTEMPTS[0], ATTEMPTS[1]

    def outcome(of: str, how: str, full: int) -> Outcome:
        return Outcome(task=of, how=how, rewards=[], full=full, without_verdict=0)

    old = Results(
        rows=[Row(task="b"), Row(task="a")], attempts=[outcome(second.task, second.how, 1), outcome("gone", "so", 1)]
    )
    new = Results(rows=[Row(task="b", starts=True)], attempts=[outcome(first.task, first.how, 2)])
    both = added(old, new)
    assert [(row.task, row.starts) for row in both.rows] == [("a", False), ("b", True)]
    assert [(one.how, one.full) for one in both.attempts] == [(first.how, 2), (second.how, 1)]


def test_every_caution_was_tried_by_a_script() -> None:
    assert {task for caution in CAUTIONS for task in caution.tasks} <= {one.task for one in ATTEMPTS}


def test_the_page_has_every_task_and_what_doctor_says() -> None:
    page = (Path(worlds.__file__).parents[2] / "docs" / "miniwob.md").read_text(encoding="utf-8")
    found = miniwob_pages.read()
    assert found is not None and len(found.rows) == 130 and all(row.starts for row in found.rows)
    assert {(one.task, one.how) for one in found.attempts} == {(one.task, one.how) for one in ATTEMPTS}
    for caution in CAUTIONS:
        assert f"| {', '.join(f'`{task}`' for task in caution.tasks)} | {caution.why} |" in page
