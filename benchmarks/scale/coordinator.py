"""One size: the coordinator in this process, its workers in others, and what the coordinator used."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scale.workers import (
    ACT_SECONDS,
    ENVIRONMENTS_PER_WORKER,
    GENERATE_SECONDS,
    REPLICAS,
    STEPS,
    WORKERS_PER_PROCESS,
    Answer,
    open_files,
)
from benchmarks.sessions import lateness, quantiles
from benchmarks.simulation.memory import resident_mb
from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.service.journal import Journal
from dart.core.curation.orders import Order
from dart.core.progress import Progress
from dart.core.types import Trajectory
from dart.screenshots.stored import StoredScreenshots
from dart.store.database import Database, sqlite_url
from dart.v1 import control_pb2_grpc

WORKER = (sys.executable, "-m", "benchmarks.scale")
WAIT_SECONDS = 300.0
WARM_UP_SECONDS = 20.0


def settings(environments: int) -> config.Config:
    """Groups of 8 trajectories of 30 steps, and no environment that waits for the trainer."""
    return config.parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "agent": {"prompt": "minimal", "history_screenshots": 5, "resize_multiple": 32, "min_pixels": 1024},
            "environment": {"tasks": {"names": [f"task-{number:04d}" for number in range(1_000)]}},
            "curation": {"step_limit": STEPS, "dynamic_rollouts": {"enabled": False}, "max_staleness": 1_000},
            "trainer": {"trajectories_per_update": max(8, environments // 8)},
            "stop": {"updates": 1},
            "server": {"heartbeat_seconds": 5.0},
        }
    )


class Data(DataManager):
    """Shortens each environment's first trajectory, by a number of steps of its own, so that they do not all end at
    the same time."""

    def __init__(self, *arguments: Any, environments: int) -> None:
        super().__init__(*arguments)
        self._environments, self._numbers = environments, itertools.count()
        self.stored = 0

    async def next(self) -> Order | None:
        order, number = await super().next(), next(self._numbers)
        if order is None or number >= self._environments:
            return order
        return replace(order, step_limit=1 + number * STEPS // self._environments)

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await super().finished(order, trajectory)
        self.stored += 1


async def measure(environments: int, seconds: float, answer: Answer) -> dict[str, Any]:
    made = settings(environments)
    async with AsyncExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        database = await ends.enter_async_context(await Database.open(sqlite_url(folder / "run.db"), folder / "blobs"))
        await database.start_run("bench", "bench", {}, started=time.time())
        fleet, stored = Fleet(60.0), StoredScreenshots(database.blobs)
        envs, policy = EnvPool(fleet), RolloutPool(fleet, stored)
        complete = asyncio.Event()
        fleet.on_ready.append(
            lambda _: complete.set() if envs.slots == environments and len(policy.replicas) == REPLICAS else None
        )
        share = stored.share()
        assert share is not None
        told = share.model_dump_json()
        server = Server(made.server)
        await server.start(
            CoordinatorService(fleet, made.server, "bench", lambda hello: told),
            control_pb2_grpc.ControlServiceServicer(),
        )
        ends.push_async_callback(server.stop)
        children = await _workers(server.address, environments, answer)
        ends.push_async_callback(_end, fleet, children)
        began = time.perf_counter()
        async with asyncio.timeout(WAIT_SECONDS):
            await complete.wait()
        joined, idle = time.perf_counter() - began, resident_mb()
        progress, journal = Progress(made.stop.window), Journal(folder / "metrics.jsonl")
        ends.callback(journal.close)
        data = Data(made, database, progress, journal, "bench", 1, envs, environments=environments)
        await data.prepare()
        running = [
            asyncio.create_task(work)
            for work in (sample(data, envs, policy, made), _train(data), journal.write_events(database))
        ]
        try:
            found = await _observed(data, policy, seconds)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return {
            "environments": environments,
            "replicas": REPLICAS,
            "env_workers": -(-environments // ENVIRONMENTS_PER_WORKER),
            "asked": round(environments / (sum(ACT_SECONDS) / 2 + sum(GENERATE_SECONDS) / 2), 1),
            "seconds_to_join": round(joined, 1),
            "mb_idle": round(idle),
        } | found


async def _train(data: Data) -> None:
    """Mark batch after batch as trained at once."""
    for number in itertools.count(1):
        await data.consumed(await data.next_batch(0), number, 0)


async def _observed(data: Data, policy: RolloutPool, seconds: float) -> dict[str, Any]:
    """What the coordinator did and used in `seconds`, after the warm-up."""
    await asyncio.sleep(WARM_UP_SECONDS)
    before, began = _used(data, policy), time.perf_counter()
    late = await lateness(seconds)
    took = time.perf_counter() - began
    used = {name: value - before[name] for name, value in _used(data, policy).items()}
    steps = used["steps"]
    return {
        "steps_per_second": round(steps / took, 1),
        "trajectories_per_second": round(used["trajectories"] / took, 2),
        "cores": round(used["cpu"] / took, 3),
        "loop_cores": round(used["loop_cpu"] / took, 3),
        "cpu_ms_per_step": round(1e3 * used["cpu"] / steps, 3),
        "loop_ms_per_step": round(1e3 * used["loop_cpu"] / steps, 3),
        "mb": round(resident_mb()),
        "network_kb_per_step": round(used["network"] / steps / 1e3, 2),
        "written_kb_per_step": round(used["written"] / steps / 1e3, 2),
        "loop_lateness_ms": quantiles(late),
    }


def _used(data: Data, policy: RolloutPool) -> dict[str, float]:
    """Counters that only grow. Loopback carries every byte once, in either direction; what is written to files is the
    database, its write-ahead log and metrics.jsonl (sockets do not count)."""
    loopback = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return {
        "steps": policy.requests,
        "trajectories": data.stored,
        "cpu": time.process_time(),
        "loop_cpu": time.thread_time(),
        "network": float(loopback.split(":")[1].split()[0]),
        "written": float(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0]),
    }


async def _workers(address: str, environments: int, answer: Answer) -> list[asyncio.subprocess.Process]:
    at_once = ENVIRONMENTS_PER_WORKER * WORKERS_PER_PROCESS
    sizes = [min(at_once, environments - first) for first in range(0, environments, at_once)]
    of = (*WORKER, "--workers-of", address, *answer.words)
    words = [("--envs", str(size)) for size in sizes] + [("--policies", str(REPLICAS))]
    return [await asyncio.create_subprocess_exec(*of, *these, preexec_fn=open_files) for these in words]


async def _end(fleet: Fleet, children: list[asyncio.subprocess.Process]) -> None:
    fleet.say_goodbye("done")
    for child in children:
        try:
            await asyncio.wait_for(child.wait(), 30.0)
        except TimeoutError:
            child.kill()
