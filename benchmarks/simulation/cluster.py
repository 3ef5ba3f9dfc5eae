"""A simulated training run: a set-up, a schedule, and what came of it."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulation import virtual_time
from benchmarks.simulation.store import NoDatabase
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.job import Train
from dart.processes.settings import collect_seldom
from dart.rundir import RunDirectory

SLOTS_PER_WORKER = 10
"""Environments per env worker."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """A cluster, and how much it trains on at a time."""

    name: str
    environments: int
    replicas: int
    """Of one H100 each [ours]."""
    trajectories_per_update: int = 64
    """Roll-outs in a batch [ours]."""
    tasks: int = 203
    rollouts: int = 8
    step_limit: int = 30
    max_staleness: int = 4
    curation: bool = False
    """Dynamic roll-out number and length, and the pool; otherwise N and the step limit are fixed."""


@dataclass(frozen=True, slots=True)
class Schedule:
    sampling: str = "rollout"
    training: str = "asynchronous"
    sync: str = "rolling"


DECOUPLED = Schedule()
COUPLED = Schedule("batch", "synchronous", "all")


MakeReplica = Callable[[Fleet, str, Timings, int], SimulatedReplica]
HostEnvs = Callable[[Run], AbstractAsyncContextManager[None]]
"""Adds env workers to the run's fleet, and ends them after the run."""


def simulate(
    set_up: SetUp,
    schedule: Schedule,
    timings: Timings,
    hours: float,
    seed: int = 0,
    make_replica: MakeReplica = SimulatedReplica,
    host_envs: HostEnvs | None = None,
    kind: str = config.BUILTIN_SUITE,
) -> dict[str, Any]:
    """The run's summary.json, with `events` by kind, and `real_seconds`: how long the simulation took.

    `host_envs`: in the place of `SimulatedEnvs`, for a world of this `kind`.
    """
    collect_seldom()
    began = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        settings, directory = _config(set_up, schedule, hours, seed, kind), RunDirectory(Path(folder))
        summary = virtual_time.run(_run(settings, directory, timings, set_up, seed, make_replica, host_envs))
        with directory.metrics.open(encoding="utf-8") as lines:
            events = Counter(line.split('"', 4)[3] for line in lines)
    return summary | {
        "events": events,
        "real_seconds": round(time.perf_counter() - began[0], 2),
        "cpu_seconds": round(time.process_time() - began[1], 2),
    }


def _config(set_up: SetUp, schedule: Schedule, hours: float, seed: int, kind: str) -> config.Config:
    return config.parse(
        {
            "run": {"seed": seed},
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"kind": kind, "tasks": {"names": [f"task-{number:03d}" for number in range(set_up.tasks)]}},
            "rollout": {"replicas": set_up.replicas},
            "curation": {
                "rollouts": set_up.rollouts,
                "step_limit": set_up.step_limit,
                "max_staleness": set_up.max_staleness,
                "task_preference": 0.0,
                "dynamic_rollouts": {"enabled": set_up.curation},
                "dynamic_length": {"enabled": set_up.curation},
                "pool": {"enabled": set_up.curation},
            },
            "trainer": {"trajectories_per_update": set_up.trajectories_per_update},
            "sync": {"max_unavailable": max(1, set_up.replicas // 8)},
            "schedule": {"sampling": schedule.sampling, "training": schedule.training, "sync": schedule.sync},
            "evaluation": {"episodes": 0},
            "checkpoint": {"every_updates": 1_000_000},
            "stop": {"train_seconds": hours * 3600},
            "server": {"lost_after_seconds": 1e9},
        }
    )


async def _run(
    settings: config.Config,
    directory: RunDirectory,
    timings: Timings,
    set_up: SetUp,
    seed: int,
    make_replica: MakeReplica,
    host_envs: HostEnvs | None,
) -> dict[str, Any]:
    run = Run(settings, directory, NoDatabase(), Train(), Start())  # type: ignore[arg-type]
    names = list(settings.environment.tasks.names)
    SimulatedTrainer(run.fleet, timings)
    for number in range(set_up.replicas):
        make_replica(run.fleet, f"rollout-{number}", timings, seed)
    if host_envs is not None:
        async with host_envs(run):
            return await run.work()
    left, number = set_up.environments, 0
    while left:
        SimulatedEnvs(run.fleet, f"env-{number}", min(left, SLOTS_PER_WORKER), timings, names, seed)
        left, number = left - min(left, SLOTS_PER_WORKER), number + 1
    return await run.work()
