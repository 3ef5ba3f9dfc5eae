"""The benchmarks' own logic: what counts as a drop, and pages that say what the results say."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check, efficiency, efficiency_real, report, step_path
from benchmarks.check import Check
from benchmarks.simulation.cluster import SetUp
from benchmarks.trials import sweep
from benchmarks.trials.records import Point


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


def test_tables_of_the_same_runs_show_the_same_ratios() -> None:
    headline, schedules = report.headline(), report.real()
    assert headline is not None and schedules is not None
    (short,) = (line for line in headline.splitlines() if line.startswith("| real, on two cores |"))
    (long,) = (line for line in schedules.splitlines() if line.startswith("| decoupled |"))
    ratios = re.findall(r"[\d.]+ ×", short)
    assert len(ratios) == 3 and ratios == re.findall(r"[\d.]+ ×", long)


def test_help_has_the_details_as_the_page_says() -> None:
    page = (report.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    named = re.findall(r"python -m benchmarks\.([\w.]+)", page)
    assert len(named) > 15
    for name in named:
        folder = report.ROOT / "benchmarks" / name.replace(".", "/")
        text = (folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text(encoding="utf-8")
        assert "__doc__" in text and "__doc__.partition" not in text, f"{name} --help shows less than its docstring"


# ---- runs of earlier calls ----

Row = dict[str, Any]


def _efficiency(path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Call the command with a simulation that does nothing; which set-ups it simulated."""
    made: list[str] = []

    def simulated(set_up: SetUp, *_: object) -> Row:
        made.append(set_up.name)
        return dict.fromkeys(efficiency.KEPT, 1.0)

    monkeypatch.setattr(efficiency, "RESULT", path)
    monkeypatch.setattr(efficiency, "simulate", simulated)
    monkeypatch.setattr(efficiency, "show", lambda rows: None)
    monkeypatch.setattr("sys.argv", ["efficiency", *words])
    efficiency.main()
    return made


def _rows(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["results"]["runs"]
    return rows


def test_runs_of_another_length_are_not_discarded_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "efficiency.json"
    every = len(_efficiency(path, monkeypatch))
    with pytest.raises(SystemExit, match=r"--hours 1 does not make .*, 6 h.*--anew"):
        _efficiency(path, monkeypatch, "--hours", "1", "--only", "honest-sliding")
    assert len(_rows(path)) == every
    assert len(_efficiency(path, monkeypatch, "--hours", "1", "--anew")) == every
    assert {row["hours"] for row in _rows(path)} == {1.0, 24.0}


def test_anew_discards_only_what_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "efficiency.json"
    every = len(_efficiency(path, monkeypatch))
    assert len(_efficiency(path, monkeypatch, "--anew", "--only", "honest-sliding")) == 14
    assert len(_rows(path)) == every


def test_runs_with_other_timings_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "efficiency.json"
    _efficiency(path, monkeypatch)
    record = json.loads(path.read_text(encoding="utf-8"))
    record["results"]["timings"]["trainer"]["seconds"] = 11.0
    path.write_text(json.dumps(record), encoding="utf-8")
    for more in ((), ("--anew", "--only", "honest-sliding")):
        with pytest.raises(SystemExit, match=r"other timings.*--anew"):
            _efficiency(path, monkeypatch, *more)
    _efficiency(path, monkeypatch, "--anew")


def test_set_ups_with_new_timings_are_added_to_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "efficiency.json"
    every = _efficiency(path, monkeypatch)
    new = {name for name in every if name.endswith(", honest-stride3-lora")}
    record = json.loads(path.read_text(encoding="utf-8"))
    of_all = record["results"]
    timings = of_all["named_timings"].pop("honest-stride3-lora")
    of_all["runs"] = [row for row in of_all["runs"] if row["set_up"] not in new]
    path.write_text(json.dumps(record), encoding="utf-8")
    made = _efficiency(path, monkeypatch)
    assert (len(made), set(made)) == (14, new)
    assert len(_rows(path)) == len(every)
    for name in ("honest-sliding", "a name that is gone"):
        named = of_all["named_timings"] | {name: timings}
        path.write_text(json.dumps(record | {"results": of_all | {"named_timings": named}}), encoding="utf-8")
        with pytest.raises(SystemExit, match=r"other named_timings"):
            _efficiency(path, monkeypatch)


def test_a_record_keeps_its_date_and_machine_if_no_run_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "efficiency.json"
    _efficiency(path, monkeypatch)
    record = json.loads(path.read_text(encoding="utf-8")) | {"date": "2026-01-01"}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert _efficiency(path, monkeypatch) == []
    assert json.loads(path.read_text(encoding="utf-8"))["date"] == "2026-01-01"


# ---- real runs of the schedules ----


def test_a_run_that_failed_or_was_restarted_does_not_hide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two seeds, of which the first has not finished in one arm; another run is only its second piece."""
    run = dict.fromkeys(efficiency_real.SHOWN, 0.5) | {
        "curve": [Point(48, 1.0, 0, 1.0)],
        "time": {"env": {}},
        "updates": 0,
    }
    run |= {"train_seconds": 1.0}
    other = run | {"starts": 2, "env_utilisation": 0.6}
    finished = {"coupled": {0: run | {"starts": 1}, 1: other}, "decoupled": {1: run | {"starts": 1}}}
    monkeypatch.setattr(sweep, "RESULTS", tmp_path)
    monkeypatch.setattr(sweep, "finished", lambda plan: finished)
    monkeypatch.setattr("sys.argv", ["efficiency_real", "--seeds", "2", "--report"])
    efficiency_real.main()
    found = json.loads((tmp_path / "efficiency_real.json").read_text(encoding="utf-8"))["results"]
    assert [(row["rung"], row["runs"]) for row in found["runs"]] == [("coupled", 2), ("decoupled", 1)]
    assert any("coupled-1 (2 starts)" in note for note in found["notes"])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = report.real() or ""
    assert "coupled-1 (2 starts)" in page
    assert "| coupled | 2 | 55.0% ± 63.5% | 50.0% ± 0.0% |" in page, "12.7 standard errors of 5 % with two runs"
    assert "| decoupled | 1 | 50.0% | 50.0% |" in page, "a single run has no interval"


def test_a_schedule_is_no_slower_for_the_batch_that_the_clock_cut_off() -> None:
    """8 actions a minute in the 4 minutes of the run are 16 in the 2 minutes until its last update."""
    run: Any = {"trained_actions_per_minute": 8.0, "train_seconds": 240.0, "last_update_seconds": 120.0}
    assert efficiency_real.actions_trained_on(run) == 16.0


# ---- the step path ----


async def _answers(number: int, payload: int) -> list[int]:
    """The sizes of what the ceiling's peer answers to so many requests on one stream."""

    async def requests() -> AsyncIterator[bytes]:
        for _ in range(number):
            yield b"x"

    return [len(answer) async for answer in step_path.echo(payload, requests())]


def test_the_ceiling_of_the_step_path_carries_what_a_step_carries() -> None:
    """The screenshot comes from the environment once a step, and the replica has it: it is always the same."""
    assert asyncio.run(_answers(4, 200_000)) == [200_000, step_path.SMALL_BYTES] * 2


# ---- weights ----


@pytest.mark.torch
def test_weights_arrive_and_are_timed() -> None:
    pytest.importorskip("torch")
    from benchmarks.weight_sync import measure

    row = measure(200_000, 1)
    assert row["bytes"] == 200_000 and min(row["link_seconds"], row["transfer_seconds"]) > 0
    assert row["transfer_over_link"] > 0
