"""How many trajectories a run has, and what that costs to find out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dashboards.made import SMALL, evaluate, execute, opened, small_run
from sqlalchemy import Connection

from dart.inspection.runs import _counted
from dart.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return small_run(tmp_path)


async def test_copies_and_evaluations_are_no_trajectories_of_their_own(run: RunDirectory) -> None:
    async with opened(run) as it:
        before = (await it.overview()).run.trajectories
        bars = sum(len(lane.spans) for lane in (await it.episodes(0.0, 2e9)).lanes)
    evaluate(run, "before", [True, False])
    own = "update trajectories set {} where id in (select id from trajectories where pooled_from = '' and {} limit 2)"
    trained, replaced = "fate = 'trained'", "fate = 'dropped: all failed'"
    execute(
        run,
        (own.format("pooled_from = 'another'", trained), ()),
        (own.format("fate = 'dropped: replaced by a pooled success'", replaced), ()),
    )
    async with opened(run) as it:
        assert (await it.overview()).run.trajectories == before - 2
        now = sum(len(lane.spans) for lane in (await it.episodes(0.0, 2e9)).lanes)
        assert now == bars - 2 + 2, "an evaluation's episodes did run"


async def test_trajectories_are_counted_in_indices_alone(run: RunDirectory) -> None:
    """The list of runs counts them every few seconds, of runs of any length."""
    async with opened(run) as it:
        record = await it.files.record()
        asked: list[str] = []

        def read(connection: Connection) -> str:
            trace: Any = connection.connection.driver_connection.set_trace_callback
            trace(asked.append)
            assert _counted(connection, record) == SMALL.trajectories
            trace(None)
            return str([connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").all() for text in asked])

        plans = await it.files.read(read)
    assert len(asked) == plans.count("SEARCH trajectories USING COVERING INDEX") == 3, plans
