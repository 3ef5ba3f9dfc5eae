"""The benchmarks' own logic: what counts as a drop, and pages that say what the results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import check, report
from benchmarks.check import Check


@pytest.mark.parametrize("path", report.PAGES, ids=lambda path: path.name)
def test_pages_say_what_the_results_say(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert report.rendered(page) == page, "run python -m benchmarks.report"


def test_every_table_is_on_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in report.PAGES)
    for name in report.TABLES:
        assert f"<!-- {name} -->" in pages


def test_a_table_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError, match="unknown"):
        report.rendered("<!-- unknown -->\n<!-- /unknown -->")


def test_a_ratio_has_dropped_when_it_is_clearly_smaller_and_a_cost_when_it_is_larger() -> None:
    assert not Check("speed", 0.7, 0.6).dropped(1.0)
    assert Check("speed", 0.5, 0.6).dropped(1.0)
    assert not Check("cost", 1.4, 0.6, higher_is_better=False).dropped(1.0)
    assert Check("cost", 1.8, 0.6, higher_is_better=False).dropped(1.0)


def test_the_record_has_numbers_alone() -> None:
    recorded = json.loads(check.RECORD.read_text(encoding="utf-8"))["results"]
    assert recorded
    assert all(isinstance(value, float) and value > 0 for value in recorded.values())
