"""What is shown of a run that was killed and resumed from an earlier checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dashboards.made import event, execute, opened, small_run

from dart.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return small_run(tmp_path)


async def test_a_worker_of_a_process_that_was_killed_is_ready_no_longer_than_that(run: RunDirectory) -> None:
    ready = {"worker": "env-7", "state": "ready", "slots": 16}
    execute(run, ("delete from events", ()))
    told = [("phase", {"phase": "starting", "begins": True}), ("worker", ready), ("phase", {"phase": "starting"}),
            ("plan", {"task": "x"}), ("update", {"update": 90}), ("phase", {"phase": "starting", "begins": True}),
            ("worker", {**ready, "worker": "env-8"})]  # fmt: skip
    for number, (kind, data) in enumerate(told):
        event(run, 9_000 + number, kind, json.dumps(data))
        execute(run, ("update events set unix_seconds = ? where sequence = ?", (100.0 * number, 9_000 + number)))
    async with opened(run) as it:
        lanes = {lane.worker: lane for lane in (await it.timeline(0.0, 1e9)).lanes}
    assert [(span.start, span.end) for span in lanes["env-7"].spans] == [(100.0, 400.0)]
    assert [(span.start, span.end) for span in lanes["env-8"].spans] == [(600.0, None)]


async def test_curves_are_those_of_the_policy_that_went_on(run: RunDirectory) -> None:
    """The run was killed after its fifth update, resumed after its second, and ended after its third."""
    execute(run, ("delete from events", ()), ("delete from versions", ()))
    made = [*((number, 10.0 * number) for number in (1, 2, 3, 4, 5)), (3, 60.0)]
    for place, (number, when) in enumerate(made):
        event(run, 9_000 + place, "update", json.dumps({"update": number, "success_rate": when}))
        execute(
            run, ("update events set unix_seconds = ? where sequence = ?", (when, 9_000 + place)),
            ("insert or replace into versions values (?, ?, ?, ?, '{}')", (run.name, number, number, when)),
        )  # fmt: skip
    event(run, 9_100, "evaluation", json.dumps({"label": "after", "mean": 0.5}))
    async with opened(run) as it:
        curves, pulse = await it.curves(), await it.pulse()
    assert (curves.updates, curves.unix_seconds) == ((1, 2, 3), (10.0, 20.0, 60.0))
    assert curves.series["success_rate"] == (10.0, 20.0, 60.0)
    assert [point.update for point in curves.evaluations] == [3]
    assert pulse.updates == 3
