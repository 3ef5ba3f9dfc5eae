"""The benchmarks of the dashboard measure what they say, in small."""

from __future__ import annotations

from pathlib import Path

import pytest
from dashboards.made import small_run

from benchmarks.dashboard import live, pages
from benchmarks.dashboard.served import serving


@pytest.mark.browser
def test_every_page_is_timed(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api")
    run = small_run(tmp_path)
    with serving(tmp_path) as served:
        found = pages.measure(run, served, 1)
    assert set(found["pages"]) == set(pages.PAGES)
    for times in found["pages"].values():
        assert 0 < times["first_paint_ms"]["median"] <= times["complete_ms"]["median"] + 1000
    assert found["player_step_ms"]["n"] >= 1 and found["event_search_ms"]["n"] == len(pages.SEARCHED)
    assert found["page_memory"]["renderer_mb"] > found["page_memory"]["heap_mb"] > 0


async def test_a_live_run_is_timed_with_and_without_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "START_SECONDS", 0.5)
    found = await live.measure(live.Load(8, 0.05, 2_000), 1, 1.0, tmp_path)
    assert found["steps_per_second"]["without"] > 0 and found["steps_per_second"]["with"] > 0
    assert found["dashboard_cores"] > 0, "its pages were asked for"
    assert found["steps_ratio"]["low"] <= found["steps_ratio"]["median"] <= found["steps_ratio"]["high"]


def test_ratios_are_of_neighbours() -> None:
    rows = [{"without": (100.0, 0.5), "with": (99.0, 0.6), "dashboard": (0.1, 0.0)} for _ in range(4)]
    found = live.results(rows)
    assert found["steps_ratio"] == {"median": 0.99, "low": 0.99, "high": 0.99}
    assert found["coordinator_cores_ratio"]["median"] == 1.2 and found["dashboard_cores"] == 0.1
