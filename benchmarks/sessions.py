"""Thousands of environments on one coordinator: `python -m benchmarks.sessions`.

Real: the coordinator's server, sessions, pools and episodes, and a gRPC connection of its own for every environment
(each is an env worker with one slot, run by the project's own worker loop). Simulated: what an environment does (it
sleeps as long as a desktop takes for an action) and the policy, which answers at once. No database.

Memory is that of the coordinator's process. A step's delay is the time from an environment's answer until it has its
next command: two messages of its own, two of the policy, everything in between, and the client's own event loop, which
shares the two cores. The coordinator's part of it is its event loop's lateness (how late a 10 ms timer wakes): a step
goes through that loop twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.instant import InstantPolicy, settings
from benchmarks.results import write
from benchmarks.simulation.memory import resident_mb
from benchmarks.step_path import Source
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet
from dart.coordinator.sampling.episodes import sample
from dart.core.types import Image
from dart.processes.settings import collect_seldom
from dart.screenshots.stored import StoredScreenshots
from dart.v1 import control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.channel import OPTIONS, Dial
from dart.wire.convert import image_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

RESULT = Path(__file__).parent / "results" / "sessions.json"
ITSELF = (sys.executable, "-m", "benchmarks.sessions")
STEP_SECONDS = (2.0, 10.0)
"""The shortest and longest step, as in benchmarks.simulation.timings."""
PER_PROCESS = 1250
DIALLED_AT_ONCE = 50
WAIT_SECONDS = 300.0
WARM_UP_SECONDS = 15.0
"""All environments begin at the same moment here; delays count only once they have drifted apart."""
TICK_SECONDS = 0.01


class Apart(Dial):
    """Gives each channel its own connection; otherwise channels of one process to one address share one."""

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=(*OPTIONS, ("grpc.use_local_subchannel_pool", 1)))


class SlowEnv(WorkerRole):
    """One slow environment; it adds to `delays` the milliseconds from each answer to the next command."""

    role = pb.ROLE_ENV

    def __init__(self, image_bytes: int, delays: list[float]) -> None:
        self._image = image_to_proto(Image.of(bytes(image_bytes), "image/png", 1920, 1080))
        self._delays = delays
        self._answered = 0.0
        self._began = 0.0

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=1)

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        self._began = self._began or time.perf_counter()
        if isinstance(command, pb.Act) and time.perf_counter() - self._began > WARM_UP_SECONDS:
            self._delays.append(1000 * (time.perf_counter() - self._answered))
        await asyncio.sleep(random.uniform(*STEP_SECONDS))
        self._answered = time.perf_counter()
        last = isinstance(command, pb.Act) and command.last
        return pb.Observed(image=self._image, instruction="Click the button.", done=last)


async def measure(sessions: int, seconds: float, image_bytes: int) -> dict[str, Any]:
    fleet = Fleet(60.0)
    envs, policy = EnvPool(fleet), RolloutPool(fleet, StoredScreenshots(None))
    made = settings()
    complete = asyncio.Event()
    fleet.on_ready.append(lambda _: complete.set() if envs.slots == sessions and policy.replicas.free else None)
    server = Server(made.server)
    await server.start(
        CoordinatorService(fleet, made.server, "bench", lambda hello: "{}"), control_pb2_grpc.ControlServiceServicer()
    )
    before = resident_mb()
    children = [await _child("--policy", server.address, sessions, image_bytes)]
    for first in range(0, sessions, PER_PROCESS):
        children.append(await _child("--fleet", server.address, min(PER_PROCESS, sessions - first), image_bytes))
    try:
        began = time.perf_counter()
        async with asyncio.timeout(WAIT_SECONDS):
            await complete.wait()
        joined = time.perf_counter() - began
        idle = resident_mb()
        source = Source(seconds, 30)
        running = asyncio.create_task(sample(source, envs, policy, made))
        await asyncio.sleep(WARM_UP_SECONDS)
        before_steps, cpu, began = policy.requests, time.process_time(), time.perf_counter()
        late = await lateness(seconds - WARM_UP_SECONDS)
        took, used = time.perf_counter() - began, time.process_time() - cpu
        steps, busy = policy.requests - before_steps, resident_mb()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        fleet.say_goodbye("done")
        outputs = [await asyncio.wait_for(child.communicate(), WAIT_SECONDS) for child in children]
        await server.stop()
    delays = sorted(delay for out, _ in outputs[1:] for delay in json.loads(out))
    return {
        "sessions": sessions,
        "image_bytes": image_bytes,
        "seconds_to_join": round(joined, 1),
        "coordinator_mb_before": round(before),
        "coordinator_mb_idle": round(idle),
        "coordinator_mb": round(busy),
        "steps_per_second": round(steps / took, 1),
        "coordinator_cpu_share": round(used / took, 3),
        "step_delay_ms": quantiles(delays),
        "loop_lateness_ms": quantiles(late),
    }


async def lateness(seconds: float) -> list[float]:
    """How many milliseconds late this event loop woke each timer during `seconds`; sorted."""
    late = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        await asyncio.sleep(TICK_SECONDS)
        late.append(1000 * (time.perf_counter() - begun - TICK_SECONDS))
    return sorted(late)


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p90 and p99 of sorted values."""
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {name: round(values[int(len(values) * share)], 2) for name, share in places.items()}
    return found | {"max": round(values[-1], 2)}


async def _child(what: str, address: str, number: int, image_bytes: int) -> asyncio.subprocess.Process:
    arguments = [what, address, "--sessions", str(number), "--image-bytes", str(image_bytes)]
    return await asyncio.create_subprocess_exec(
        *ITSELF, *arguments, stdout=subprocess.PIPE, limit=1 << 26, preexec_fn=_open_files
    )


async def be_fleet(address: str, number: int, image_bytes: int) -> None:
    """`number` env workers in this process, each with a connection of its own; prints their delays at the end."""
    delays: list[float] = []
    dialling = asyncio.Semaphore(DIALLED_AT_ONCE)
    stop = asyncio.Event()

    async def one(name: str) -> None:
        role = SlowEnv(image_bytes, delays)
        prepare = role.prepare
        await dialling.acquire()

        async def prepared(config_json: str) -> pb.Ready:
            dialling.release()
            return await prepare(config_json)

        role.prepare = prepared  # type: ignore[method-assign]
        await serve(role, WorkerOptions(Apart(address), name), stop)

    async with asyncio.TaskGroup() as tasks:
        for index in range(number):
            tasks.create_task(one(f"env-{random.getrandbits(48):012x}-{index}"))
    print(json.dumps(delays))


def _open_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--image-bytes", type=int, default=1000, help="size of a screenshot")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--fleet", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seconds <= WARM_UP_SECONDS:
        parser.error(f"--seconds {options.seconds:g}: give more than the {WARM_UP_SECONDS:g} s of warm-up")
    collect_seldom()  # in all processes, as in the coordinator: only this benchmark has a thousand workers in one
    if options.fleet:
        uvloop.run(be_fleet(options.fleet, options.sessions, options.image_bytes))
        return
    if options.policy:
        worker = WorkerOptions(Dial(options.policy), "rollout")
        uvloop.run(serve(InstantPolicy(options.sessions), worker, asyncio.Event()))
        return
    _open_files()
    results = uvloop.run(measure(options.sessions, options.seconds, options.image_bytes))
    write(
        options.out,
        "sessions",
        "real coordinator and gRPC connections; environments sleep; no database",
        results,
    )
    print(json.dumps(results, indent=1))
    print(options.out)


if __name__ == "__main__":
    main()
