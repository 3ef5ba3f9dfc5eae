"""The benchmark's virtual clock, and the coordinator on it: modes, and accounting to the second."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.simulation import virtual_time
from benchmarks.simulation.cluster import COUPLED, DECOUPLED, Schedule, SetUp, simulate
from benchmarks.simulation.timings import ReplicaTimes, Timings

SET_UP = SetUp("small", environments=24, replicas=2, trajectories_per_update=16, tasks=12, rollouts=4)


def test_a_day_passes_at_once() -> None:
    async def day() -> tuple[float, float]:
        before, unix = time.monotonic(), time.time()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(3600))
            tasks.create_task(asyncio.sleep(86_400))
        return time.monotonic() - before, time.time() - unix

    began = time.monotonic()
    assert virtual_time.run(day()) == (86_400, 86_400)
    assert time.monotonic() - began < 60, "the real clock is back, and little of it went by"

    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(stuck())


def test_a_replica_is_shared_by_its_requests() -> None:
    times = ReplicaTimes()
    alone, together = 1 / times.seconds_per_pass(1), 32 / times.seconds_per_pass(32)
    assert 5 * alone < together < 32 * alone, "throughput grows with requests, and less than they do"


@pytest.mark.parametrize(
    "schedule", [DECOUPLED, COUPLED, Schedule("task"), Schedule(training="synchronous"), Schedule(sync="all")], ids=str
)
def test_every_slot_second_is_booked_once(schedule: Schedule) -> None:
    summary = simulate(SET_UP, schedule, Timings(failures_per_step=0.01), hours=1.0)
    assert summary["updates"] > 3
    assert summary["infrastructure_failures"] > 0
    seconds = summary["train_seconds"]
    spent = {name: sum(part["seconds"].values()) for name, part in summary["time"].items()}
    assert spent == pytest.approx(
        {"env": seconds * SET_UP.environments, "rollout": seconds * SET_UP.replicas, "trainer": seconds}, rel=1e-3
    )
    because = summary["time"]["env"]["idle_because"]
    assert sum(because.values()) == pytest.approx(summary["time"]["env"]["seconds"]["idle"], rel=0.02, abs=5)
    counted = summary["trained"] + sum(summary["dropped"].values())
    assert counted <= summary["trajectories"]
    assert summary["trained_actions_per_minute"] <= summary["sampled_actions_per_minute"]


def test_decoupling_pays() -> None:
    coupled, decoupled = (simulate(SET_UP, schedule, Timings(), hours=2.0) for schedule in (COUPLED, DECOUPLED))
    for name in ("env_utilisation", "rollout_utilisation", "trained_actions_per_minute"):
        assert decoupled[name] > 1.5 * coupled[name]
    assert coupled["staleness"]["max"] == 0 < decoupled["staleness"]["max"] <= SET_UP.max_staleness
