"""The timeline of a run that goes on: what is sent again, and how much of the database is read for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dashboards.made import SMALL, event, execute, opened, small_run
from sqlalchemy import Select
from sqlalchemy.dialects import sqlite

from dart.inspection import timeline
from dart.inspection.opening import RunFiles
from dart.inspection.records import Span
from dart.rundir import RunDirectory
from dart.store.upkeep import Upkeep

Told = tuple[float, str, dict[str, object]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Without events."""
    made = small_run(tmp_path)
    execute(made, ("delete from events", ()))
    return made


def tell(run: RunDirectory, told: Sequence[Told], first: int = 1) -> None:
    for number, (at, kind, data) in enumerate(told, first):
        event(run, number, kind, json.dumps(data))
        execute(run, ("update events set unix_seconds = ? where sequence = ?", (at, number)))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each query of a run's files, with the rows that it gave."""
    found: list[tuple[str, int]] = []
    rows = RunFiles.rows

    async def counted(self: RunFiles, statement: Select[Any]) -> Sequence[Any]:
        given = await rows(self, statement)
        text = statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
        found.append((str(text), len(given)))
        return given

    monkeypatch.setattr(RunFiles, "rows", counted)
    return found


READY = {"worker": "env-7", "state": "ready", "slots": 4}
BEGUN: Sequence[Told] = (
    (100.0, "phase", {"phase": "starting", "begins": True}),
    (101.0, "worker", READY),
    (102.0, "sync_started", {"replica": "rollout-0", "version": 1}),
    (103.0, "sync", {"replica": "rollout-0", "version": 1}),
)


async def test_a_replica_in_quarantine_is_not_shown_as_ready(run: RunDirectory) -> None:
    health = {"replica": "rollout-0", "failures": 3}
    later: Sequence[Told] = (
        (200.0, "replica_health", health | {"state": "quarantined", "why": "it answered nothing"}),
        (210.0, "sync_started", {"replica": "rollout-0", "version": 2}),
        (211.0, "sync", {"replica": "rollout-0", "version": 2}),
        (220.0, "replica_health", health | {"state": "probing", "why": "it answered nothing"}),
        (221.0, "replica_health", health | {"state": "healthy", "why": ""}),
    )
    tell(run, (*BEGUN, *later))
    async with opened(run) as it:
        (lane,) = (lane for lane in (await it.timeline()).lanes if lane.worker == "rollout-0")
    assert lane.role == "rollout"
    assert [span.state for span in lane.spans] == [
        "syncing", "ready", "quarantined", "syncing", "quarantined", "probing", "ready",
    ]  # fmt: skip


async def test_a_worker_has_the_role_that_was_recorded_whatever_its_name_says(run: RunDirectory) -> None:
    told = [(name, {**READY, "worker": name, **role}) for name, role in
            (("envy-0", {"role": "rollout"}), ("node-7", {"role": "env"}), ("env-8", {}))]  # fmt: skip
    tell(
        run, [(101.0, "violation", {"worker": "envy-0", "field": "text"}), *((102.0, "worker", one) for _, one in told)]
    )
    async with opened(run) as it:
        lanes = (await it.timeline()).lanes
    assert [(lane.worker, lane.role) for lane in lanes] == [("envy-0", "rollout"), ("env-8", "env"), ("node-7", "env")]


async def test_what_is_sent_since_the_last_answer_closes_what_was_open_then(run: RunDirectory) -> None:
    tell(run, BEGUN)
    async with opened(run) as it:
        before = await it.timeline()
        assert {lane.worker: [span.end for span in lane.spans] for lane in before.lanes} == {
            "env-7": [None], "rollout-0": [103.0, None],
        }  # fmt: skip
        later: Sequence[Told] = (
            (200.0, "update", {"update": 1, "version": 2, "trainer": {"round_trip_seconds": 150.0}}),
            (201.0, "worker", READY | {"state": "lost"}),
            (202.0, "sync_started", {"replica": "rollout-0", "version": 2}),
        )
        tell(run, later, 5)
        since = {lane.worker: lane for lane in (await it.timeline(110.0)).lanes}
    spans = {name: [(span.start, span.end, span.state) for span in lane.spans] for name, lane in since.items()}
    assert spans == {
        "env-7": [(101.0, 201.0, "ready"), (201.0, None, "lost")],
        "rollout-0": [(103.0, 202.0, "ready"), (202.0, None, "syncing")],
        "trainer": [(50.0, 200.0, "training")],
    }
    assert [mark.at for lane in since.values() for mark in lane.marks] == [200.0]


async def test_an_event_is_read_once_while_the_run_is_open(
    run: RunDirectory, read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "AT_ONCE", 3)
    tell(run, BEGUN)
    async with opened(run) as it:
        first, same = await asyncio.gather(it.timeline(), it.timeline())
        assert first == same
        again: Sequence[Told] = ((300.0, "plan", {"task": "x"}), (301.0, "worker", READY | {"state": "lost"}))
        tell(run, again, 5)
        read.clear()
        newer = await it.timeline()
        assert sum(given for text, given in read if "events.json" in text) == 1, "the worker's, and not the plan's"
        assert (newer.start, newer.end) == (first.start, 301.0)
        read.clear()
        assert await it.timeline() == newer
        assert not sum(given for text, given in read if "events.json" in text)
    async with opened(run) as another:
        assert await another.timeline() == newer


async def test_what_the_run_has_deleted_is_not_remembered_for_ever(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "SPARE", 0)
    tell(run, BEGUN)
    async with opened(run) as it:
        await it.timeline()
        for number in range(5, 11):
            tell(run, [(100.0 + number, "sync", {"replica": "rollout-0", "version": number})], number)
            execute(run, ("delete from events where sequence <= ? and kind != 'phase'", (number - 3,)))
            lanes = {lane.worker: lane for lane in (await it.timeline()).lanes}
        assert "env-7" not in lanes
        assert [mark.sequence for mark in lanes["rollout-0"].marks] == [8, 9, 10]


async def test_a_worker_that_came_long_ago_has_its_lane_in_a_run_that_keeps_few_events(run: RunDirectory) -> None:
    tell(run, [*BEGUN, *((104.0 + number, "plan", {"task": "x"}) for number in range(50))])
    async with await run.open_to_work() as database:
        while await Upkeep(database).trim_events(1):
            pass
        assert len(await database.events_since(0)) == 3, "begun, came, and the newest"
    async with opened(run) as it:
        (lane,) = (await it.timeline()).lanes
    assert (lane.worker, lane.spans) == ("env-7", (Span(101.0, None, "ready", "4 slots"),))


async def test_the_end_is_that_of_the_newest_event_of_any_kind(run: RunDirectory) -> None:
    async with opened(run) as it:
        assert (await it.timeline()).lanes == ()
        execute(run, ("update runs set finished = null, started = 90.0", ()))
        assert ((empty := await it.timeline()).start, empty.end) == (90.0, 90.0)
        tell(run, [*BEGUN, (104.0, "plan", {"task": "x"})])
        assert ((shown := await it.timeline()).start, shown.end) == (90.0, 104.0)


async def test_episodes_that_are_too_many_are_counted_in_the_index_alone(
    run: RunDirectory, read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MOST_EPISODES", 50)
    async with opened(run) as it:
        found = await it.episodes(0.0, 1e12)
        assert (found.count, found.lanes) == (SMALL.trajectories, ())
        ((text, given),) = [one for one in read if "FROM trajectories" in one[0]]
        assert given == 1
        plan = await it.files.read(lambda connection: connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").all())
    assert "USING COVERING INDEX trajectories_by_time (run_id=? AND finished>? AND finished<?)" in str(plan)


async def test_episodes_that_still_ran_at_the_end_count_too(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_EPISODES", 50)
    execute(run, ("update trajectories set started = 1.0, finished = 20.0", ()))
    async with opened(run) as it:
        assert (await it.episodes(0.0, 10.0)).count == SMALL.trajectories
