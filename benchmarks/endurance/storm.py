"""A real training run under random faults: `python -m benchmarks.endurance.storm --minutes 30 --seed 0`.

Chromium, vLLM, the trainer, the coordinator and SQLite are real, and each process is restarted when it ends, as a
cluster's supervisor would do. Workers reach the coordinator through a proxy. Every few seconds the seed picks a fault:
a process is killed (SIGKILL) or stopped for a while (SIGSTOP), connections are cut or held, or an outsider sends
rubbish to the coordinator's port; or a process is started anew with failpoints: errors, delays and kills between its
durable steps; or it may open no further file, or take no further memory, for a while. Meanwhile a witness reads the
database from outside: nothing that was stored may be lost, doubled or trained on twice, and the weights that a replica
takes must have the trainer's checksum. Then the same run, without faults, makes as many trajectories: in the last
third, the success under faults must not be more than `--most-points` below, at the end of the difference's 95 %
interval (trajectories counted as independent). Writes results/storm.json, and exits with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from resource import RLIMIT_AS, RLIMIT_NOFILE, prlimit

import psutil

from benchmarks.endurance.processes import CoordinatorProcess, Kept, WorkerProcess
from benchmarks.endurance.proxy import Proxy
from benchmarks.endurance.rubbish import talk_rubbish
from benchmarks.endurance.witness import LOOK_SECONDS, Witness
from dart.coordinator.summary import machine, write_json
from dart.wire.channel import free_port

RESULT = Path(__file__).parents[1] / "results" / "storm.json"
END_SECONDS = 30.0
CONFIG = Path("configs/miniwob_cpu.yaml")
OVERRIDES = (
    "evaluation.episodes=0", "stop.updates=100000", "stop.train_seconds=null", "stop.success_rate=null",
    "checkpoint.every_updates=5", "server.lost_after_seconds=10",
)  # fmt: skip
CALM_SECONDS = 90.0
"""The calm after the last fault, in which the run must show that it continues."""


FAILPOINTS = {
    "env": (
        "screenshot-write:20-200=fail:ENOSPC", "screenshot-write:20-60=fail:EMFILE", "before-Observed:50-60=delay:2",
        "before-Observed:100=fail:EIO",
    ),
    "rollout": ("before-Generated:30-35=delay:2", "before-Generated:50=fail:EIO", "before-WeightsLoaded:2=fail:EIO"),
    "train": (
        "folder-written:1-2=fail:ENOSPC", "folder-sealed:1=kill", "before-Trained:2=fail:EIO",
        "before-WeightsSent:2-5=delay:3", "before-CheckpointSaved:1=fail:EIO",
    ),
    "coordinator": (
        "group-closed:3=fail:EIO", "trajectory-stored:10-20=delay:0.5", "batch-trained:2=fail:EIO",
        "batch-consumed:2=kill", "checkpoint-saved:1=fail:EIO", "screenshots-put:20=fail:EMFILE",
    ),
}  # fmt: skip
"""Role → what its process may be started with: a full disk, no descriptors, an error after the work, a slow disk."""


@dataclass
class Storm:
    chance: random.Random
    coordinator: CoordinatorProcess
    workers: list[WorkerProcess]
    proxy: Proxy
    witness: Witness
    port: int
    happened: Counter[str] = field(default_factory=Counter)
    last: float = 0.0
    """When the last fault came, in Unix seconds."""
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    """Fault → seconds from each such fault until the next update was stored."""

    def of_role(self, role: str) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.role == role]

    # ---- one fault each; False if it cannot happen now ----

    async def kill_worker(self, role: str) -> bool:
        return self.chance.choice(self.of_role(role)).kill_alone()

    async def kill_child(self, role: str) -> bool:
        """Kill vLLM's engine process, a child of the roll-out worker, or the browser of an env worker."""
        children = self.chance.choice(self.of_role(role)).children()
        if not children:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            self.chance.choice(children).kill()
        return True

    async def kill_coordinator(self) -> bool:
        return self.coordinator.kill_alone()

    async def stop(self, process: Kept) -> bool:
        if not process.signal(signal.SIGSTOP):
            return False
        await asyncio.sleep(self.chance.uniform(2.0, 15.0))
        return process.signal(signal.SIGCONT)

    async def stop_worker(self) -> bool:
        return await self.stop(self.chance.choice(self.workers))

    async def stop_coordinator(self) -> bool:
        return await self.stop(self.coordinator)

    async def cut_one(self) -> bool:
        return self.proxy.cut_one(self.chance)

    async def cut_all(self) -> bool:
        return self.proxy.cut_all() > 0

    async def hold(self) -> bool:
        await self.proxy.hold(self.chance.uniform(1.0, 12.0))
        return True

    async def rubbish(self) -> bool:
        return await talk_rubbish(self.port, self.chance)

    async def without(self, process: Kept, resource: int) -> bool:
        """Let the process have no more of the resource than it has now, for a while."""
        if process.process is None or process.process.returncode is not None:
            return False
        pid = process.process.pid
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            before = prlimit(pid, resource)
            has = psutil.Process(pid).memory_info().vms if resource == RLIMIT_AS else 3
            prlimit(pid, resource, (has, before[1]))
            await asyncio.sleep(self.chance.uniform(2.0, 10.0))
            prlimit(pid, resource, before)
            return True
        return False

    async def begin_with_failpoints(self, process: Kept, role: str) -> bool:
        process.failpoints = self.chance.choice(FAILPOINTS[role])
        return process.kill_alone()

    async def failpoints_in_worker(self) -> bool:
        worker = self.chance.choice(self.workers)
        return await self.begin_with_failpoints(worker, worker.role)

    async def failpoints_in_coordinator(self) -> bool:
        return await self.begin_with_failpoints(self.coordinator, "coordinator")

    def faults(self) -> dict[str, tuple[int, Callable[[], Awaitable[bool]]]]:
        """Name → (weight, the method that causes it)."""
        return {
            "env worker killed": (3, lambda: self.kill_worker("env")),
            "replica killed": (2, lambda: self.kill_worker("rollout")),
            "trainer killed": (1, lambda: self.kill_worker("train")),
            "engine process killed": (2, lambda: self.kill_child("rollout")),
            "browser process killed": (3, lambda: self.kill_child("env")),
            "coordinator killed": (2, self.kill_coordinator),
            "worker stopped": (3, self.stop_worker),
            "coordinator stopped": (1, self.stop_coordinator),
            "one connection cut": (5, self.cut_one),
            "all connections cut": (2, self.cut_all),
            "network held": (2, self.hold),
            "rubbish": (5, self.rubbish),
            "worker without descriptors": (2, lambda: self.without(self.chance.choice(self.workers), RLIMIT_NOFILE)),
            "coordinator without descriptors": (2, lambda: self.without(self.coordinator, RLIMIT_NOFILE)),
            "worker without memory": (1, lambda: self.without(self.chance.choice(self.workers), RLIMIT_AS)),
            "coordinator without memory": (1, lambda: self.without(self.coordinator, RLIMIT_AS)),
            "worker with failpoints": (4, self.failpoints_in_worker),
            "coordinator with failpoints": (2, self.failpoints_in_coordinator),
        }

    async def rage(self, minutes: float, gap_seconds: float) -> None:
        """Cause fault after fault, from the first update until the time is over."""
        while not self.witness.updates():  # noqa: ASYNC110 - another process makes them
            await asyncio.sleep(LOOK_SECONDS)
        until = time.monotonic() + 60 * minutes - CALM_SECONDS
        faults = self.faults()
        names, weights = list(faults), [weight for weight, _ in faults.values()]
        async with asyncio.TaskGroup() as watches:
            while time.monotonic() < until:
                (name,) = self.chance.choices(names, weights)
                updates, began = self.witness.updates(), time.monotonic()
                if await faults[name][1]():
                    self.happened[name] += 1
                    self.last = time.time()
                    watches.create_task(self._recovery(name, updates, began, until + CALM_SECONDS))
                await asyncio.sleep(self.chance.expovariate(1 / gap_seconds))

    async def _recovery(self, name: str, updates: int, began: float, until: float) -> None:
        while time.monotonic() < until:
            if self.witness.updates() > updates:
                self.recoveries.setdefault(name, []).append(round(time.monotonic() - began, 2))
                return
            await asyncio.sleep(0.5)


async def storm(
    minutes: float, seed: int, gap_seconds: float, folder: Path, calm_trajectories: int = 0
) -> tuple[Storm, list[Kept]]:
    """Run it; returns it when it is over. With `calm_trajectories` there are no faults, and it ends with so many."""
    port, runs, logs = free_port(), folder / "runs", folder / "logs"
    logs.mkdir(parents=True)
    proxy = Proxy(port)
    await proxy.start()
    overrides = (*OVERRIDES, f"server.port={port}", f"run.directory={runs}", f"run.seed={seed}")
    coordinator = CoordinatorProcess("coordinator", logs, finishes=True, config=CONFIG, runs=runs, overrides=overrides)
    roles = ["env", "env", "rollout", "rollout", "train"]
    workers = [WorkerProcess(f"{role}-{number}", logs, role=role, port=proxy.port) for number, role in enumerate(roles)]
    kept = [coordinator, *workers]
    async with asyncio.TaskGroup() as tasks:
        keeping = [tasks.create_task(process.keep()) for process in kept]
        witness = Witness(await coordinator.made() / "run.db")
        coordinator.on_resume = witness.resumed
        watching = tasks.create_task(witness.watch())
        one = Storm(random.Random(seed), coordinator, workers, proxy, witness, port)
        if calm_trajectories:
            while len(witness.trajectories) < calm_trajectories:  # noqa: ASYNC110 - others make them
                await asyncio.sleep(LOOK_SECONDS)
        else:
            await one.rage(minutes, gap_seconds)
            await asyncio.sleep(CALM_SECONDS)
        for task in [*keeping[1:], watching]:
            task.cancel()
        coordinator.signal(signal.SIGINT)
        keeping[0].cancel()
        if coordinator.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(coordinator.process.wait(), END_SECONDS)
    for process in kept:
        process.end()
        if process.process is not None:
            await process.process.wait()
    await proxy.stop()
    return one, kept


def too_low(faulted: tuple[int, float], calm: tuple[int, float], most_points: float) -> tuple[dict[str, float], str]:
    """Compare (trajectories, success rate) under faults and without: the difference in points with its 95 % interval,
    and what is wrong with it, if anything."""
    (n, rate), (calm_n, calm_rate) = faulted, calm
    points = 100 * (calm_rate - rate)
    spread = 196 * math.sqrt(rate * (1 - rate) / max(n, 1) + calm_rate * (1 - calm_rate) / max(calm_n, 1))
    found = {"lower_by_points": round(points, 2), "plus_or_minus": round(spread, 2), "most_points": most_points}
    if n and calm_n and points + spread <= most_points:
        return found, ""
    return found, f"success under faults is {points:.1f} ± {spread:.1f} points lower, of at most {most_points:g}"


def _results(
    one: Storm, kept: list[Kept], calm: Storm, minutes: float, seed: int, most_points: float
) -> dict[str, object]:
    trajectories = sum(count for count, _ in one.witness.success())
    faulted, reference = one.witness.success(), calm.witness.success(first=trajectories)
    difference, low = too_low(faulted[-1], reference[-1], most_points)
    wrong = [
        *one.witness.verdict(),
        *(f"without faults: {what}" for what in calm.witness.verdict()),
        *filter(None, [low]),
        *(
            f"{replica.name} had no weights compared with the trainer's after the last fault"
            for replica in one.of_role("rollout")
            if not one.witness.compared(since=one.last)[replica.name]
        ),
    ]
    return {
        "machine": machine(),
        "minutes": minutes,
        "seed": seed,
        "faults": dict(sorted(one.happened.items())),
        "faults_in_all": one.happened.total(),
        "seconds_to_the_next_update": {
            name: {"n": len(times), "p50": sorted(times)[len(times) // 2], "max": max(times)}
            for name, times in sorted(one.recoveries.items())
        },
        "starts": {process.name: process.starts for process in kept},
        "exits": {process.name: dict(Counter(map(str, process.exits))) for process in kept},
        "trajectories": len(one.witness.trajectories),
        "updates": one.witness.updates(),
        "equal_weights_by_checksum": dict(one.witness.compared()),
        "wrong": wrong,
        "success_by_third": _thirds(faulted),
        "success_by_third_without_faults": _thirds(reference),
        "last_third": difference,
    }


def _thirds(parts: list[tuple[int, float]]) -> list[dict[str, float]]:
    return [{"trajectories": count, "success_rate": round(rate, 4)} for count, rate in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap-seconds", type=float, default=12.0, help="average time between two faults")
    parser.add_argument("--most-points", type=float, default=5.0, help="how much lower success under faults may be")
    parser.add_argument("--folder", type=Path, help="keep the run directory and the logs here")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = choices.folder or Path(temporary)
        one, kept = asyncio.run(storm(choices.minutes, choices.seed, choices.gap_seconds, folder / "faults"))
        made = max(len(one.witness.trajectories), 1)
        calm, _ = asyncio.run(storm(0.0, choices.seed, 0.0, folder / "calm", calm_trajectories=made))
        result = _results(one, kept, calm, choices.minutes, choices.seed, choices.most_points)
    write_json(choices.out, result)
    print(json.dumps(result, indent=2))
    if result["wrong"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
