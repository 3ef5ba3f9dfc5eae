"""The training phase where it has to wait: for a batch, and, if it is synchronous, for weights to arrive."""

from __future__ import annotations

import itertools

import pytest
from run_processes.told import recorded

from benchmarks.simulation.cluster import DECOUPLED, Schedule, SetUp, simulate
from benchmarks.simulation.timings import Timings
from dart.coordinator.training.syncing import WeightSync
from dart.coordinator.training.updates import LOOK_SECONDS, STARVED_SECONDS
from dart.errors import UserError

SET_UP = SetUp("small", environments=24, replicas=2, trajectories_per_update=16, tasks=12, rollouts=4)


def test_while_no_batch_is_complete_what_became_of_trajectories_is_told_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = recorded(monkeypatch)
    simulate(SET_UP, DECOUPLED, Timings(), hours=0.25)
    told = [event for event in events if event["event"] in ("phase", "update", "starved")]
    starved = [(before, now) for before, now in itertools.pairwise(told) if now["event"] == "starved"]
    for before, now in starved:
        assert STARVED_SECONDS < now["unix_seconds"] - before["unix_seconds"] < STARVED_SECONDS + 2 * LOOK_SECONDS
        updates = sum(event["event"] == "update" for event in told[: told.index(now)])
        assert now["fates"].get("trained", 0) == updates * SET_UP.trajectories_per_update
    assert {before["event"] for before, _ in starved} == {"phase", "update", "starved"}


def test_a_synchronous_run_waits_again_where_no_replica_took_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, waited = WeightSync.wait_or_exclude, list[int]()

    async def wait_or_exclude(sync: WeightSync) -> None:
        waited.append(sync._replicas.version)
        if len(waited) == 1:
            raise UserError("no replica took version 1")
        await wait(sync)

    monkeypatch.setattr(WeightSync, "wait_or_exclude", wait_or_exclude)
    assert simulate(SET_UP, Schedule(training="synchronous"), Timings(), hours=0.5)["updates"] >= 2
    assert waited[:3] == [1, 1, 2]
