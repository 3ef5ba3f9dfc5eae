"""The simulation with faults: its invariants hold, and a seed is a history."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from benchmarks.simulation.chaos import Cluster, chaos
from benchmarks.simulation.faults import LASTING, Fault, plan
from benchmarks.simulation.timings import Timings

HOURS, GAP_SECONDS = 0.5, 12.0
SMALL = Cluster(environments=20, replicas=2, tasks=10)


def test_a_plan_is_its_seed_and_has_every_class() -> None:
    assert plan(3, 2.0, 20.0) == plan(3, 2.0, 20.0) != plan(4, 2.0, 20.0)
    seen = {one.fault for seed in range(10) for one in plan(seed, 2.0, 20.0)}
    assert seen == set(Fault)
    assert all(LASTING[one.fault][0] <= one.seconds <= LASTING[one.fault][1]
               for one in plan(0, 2.0, 20.0) if one.fault in LASTING)  # fmt: skip


def test_under_faults_nothing_is_lost_and_a_seed_replays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    first, again = (
        chaos(1, plan(1, HOURS, GAP_SECONDS), HOURS, tmp_path / name, Timings(), SMALL) for name in ("first", "again")
    )
    assert first.wrong == []
    assert first.faults.total() > 50
    assert first.trajectories > 0
    assert again.decisions == first.decisions
