"""What three open dashboards cost a live run's coordinator: `python -m benchmarks.dashboard.live`.

Real: `dart coordinator` with its database, journal and screenshots, in a process of its own; `dart view` in another;
the workers' end of the protocol. Simulated: what the workers do (an environment answers with a fresh screenshot of
random bytes after a pause, a policy and a trainer at once), and the browsers: each of three readers keeps the run's
stream open and fetches its page again at most once in two seconds, as the pages do. Browsers usually run on another
machine.

Windows without and with open dashboards take turns; a pair is two neighbours. Throughput is the actions that reached
the environments in a window; processor time is that of its process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
import yaml

from benchmarks.dashboard.made_run import Shape, drawn
from benchmarks.dashboard.scripted import scripted_workers
from benchmarks.dashboard.served import serving
from benchmarks.results import write
from dart.core.types import Image, Observation
from dart.v1 import session_pb2 as pb
from dart.wire.channel import Dial
from dart.wire.convert import observation_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

RESULT = Path(__file__).parents[1] / "results" / "dashboard_live.json"
CONFIG = Path(__file__).parents[2] / "examples" / "node" / "colours.yaml"
CLICK = "Action: click(start_box='(48,101)')"
READERS = ("", "/timeline", "/tasks")
"""What the pages Overview, Workers and Tasks fetch."""
PULSE_SECONDS = 2.0
START_SECONDS = 30.0
"""All environments begin at the same moment; until then, they have drifted apart."""
DIFFERENT_BYTES = 16
"""The fewest bytes that make one screenshot differ from the others."""


class PacedEnv(WorkerRole):
    """Answers an action after `seconds`, on average, with a fresh screenshot (a PNG, with bytes after its end). An
    episode ends after ten steps, on average; a quarter of them succeeds."""

    role = pb.ROLE_ENV

    def __init__(self, slots: int, seconds: float, image_bytes: int) -> None:
        self._slots, self._seconds = slots, seconds
        self._picture = next(drawn(Shape(width=160, height=224)))
        self._more_bytes = max(DIFFERENT_BYTES, image_bytes - len(self._picture))
        self.steps = 0
        self.begun = asyncio.Event()

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=self._slots)

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        if isinstance(command, pb.Act):
            self.steps += 1
            self.begun.set()
        if isinstance(command, pb.Act) and (command.last or random.random() < 0.1):
            return pb.Observed(done=True, reward=float(random.random() < 0.25))
        image = Image.of(self._picture + os.urandom(self._more_bytes), "image/png", 160, 224)
        return observation_to_proto(Observation(image, "click the button"), 0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """`environments`, each with a step of `step_seconds` on average and screenshots of `image_bytes`."""

    environments: int
    step_seconds: float
    image_bytes: int


@dataclass(frozen=True, slots=True)
class Live:
    """A live run: the process id of its coordinator, and the page that it printed, if it has a dashboard."""

    pid: int
    page: str


@contextlib.asynccontextmanager
async def live_run(
    folder: Path, env: WorkerRole, trains: WorkerRole | None = None, **sections: dict[str, Any]
) -> AsyncIterator[Live]:
    """`dart coordinator` on examples/node/colours.yaml, changed by `sections`, with this env worker, a policy that
    always clicks, and a trainer (`trains`; by default one that makes a version of every batch).

    Its run directory is in `folder` / runs.
    """
    settings = yaml.safe_load(CONFIG.read_text())
    own = {
        "run": {"name": "live", "directory": str(folder / "runs")}, "server": {"port": 0}, "dashboard": {"port": 0},
        "stop": {"updates": 1_000_000},
    }  # fmt: skip
    for name, section in (*own.items(), *sections.items()):
        settings[name] = settings.get(name, {}) | section
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dart", "coordinator", str(folder / "config.yaml"), "--quiet",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    told, page = "", ""
    while "listens on " not in told:
        line = (await process.stdout.readline()).decode()
        told += line
        if not line:
            raise SystemExit(f"error: the coordinator ended:\n{told}")
        if line.startswith("dashboard "):
            page = line.split()[1]
    address = told.split("listens on ")[1].split(";")[0]
    unread = asyncio.create_task(process.stdout.read())
    try:
        async with asyncio.TaskGroup() as tasks, scripted_workers(address, CLICK, trains):
            working = tasks.create_task(serve(env, WorkerOptions(Dial(address), "env-0"), asyncio.Event()))
            yield Live(process.pid, page)
            working.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        unread.cancel()


async def reader(client: httpx.AsyncClient, run: str, page: str) -> None:
    """One open page, until cancelled."""
    fetched = 0.0
    async with client.stream("GET", f"/api/runs/{run}/stream") as stream:
        async for line in stream.aiter_lines():
            if line == "event: events" and time.monotonic() - fetched >= PULSE_SECONDS:
                fetched = time.monotonic()
                (await client.get(f"/api/runs/{run}{page}")).raise_for_status()


async def window(env: PacedEnv, coordinator: psutil.Process, seconds: float) -> tuple[float, float]:
    """(steps per second, the coordinator's processor seconds per second)."""
    began, first, spent = time.perf_counter(), env.steps, sum(coordinator.cpu_times()[:2])
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    return (env.steps - first) / took, (sum(coordinator.cpu_times()[:2]) - spent) / took


async def with_readers(served: str, run: str, body: Any) -> Any:
    async with httpx.AsyncClient(base_url=served, timeout=60.0) as client:
        reading = [asyncio.create_task(reader(client, run, page)) for page in READERS]
        try:
            await asyncio.sleep(PULSE_SECONDS)
            return await body
        finally:
            for task in reading:
                task.cancel()
            for ended in await asyncio.gather(*reading, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


async def measure(load: Load, pairs: int, seconds: float, folder: Path) -> dict[str, Any]:
    env = PacedEnv(load.environments, load.step_seconds, load.image_bytes)
    slots = {"slots": load.environments}
    async with live_run(
        folder,
        env,
        environment=slots,
        rollout=slots,
        dashboard={"enabled": False},
        curation={"step_limit": 20},
        checkpoint={"every_updates": 1_000_000},
        trainer={"trajectories_per_update": 4 * load.environments},  # environments never wait for an update
    ) as run:
        coordinator = psutil.Process(run.pid)
        (directory,) = (folder / "runs").iterdir()
        await env.begun.wait()
        await asyncio.sleep(START_SECONDS)
        with serving(directory) as served:
            rows, viewer = [], psutil.Process(served.pid)
            for pair in range(pairs):
                row: dict[str, tuple[float, float]] = {}
                for side in ("without", "with") if pair % 2 == 0 else ("with", "without"):
                    looking = window(env, coordinator, seconds)
                    if side == "without":
                        row[side] = await looking
                        continue
                    spent = sum(viewer.cpu_times()[:2])
                    row[side] = await with_readers(served.address, directory.name, looking)
                    row["dashboard"] = ((sum(viewer.cpu_times()[:2]) - spent) / (seconds + PULSE_SECONDS), 0.0)
                rows.append(row)
    return results(rows)


def results(rows: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    def ratio(which: int) -> dict[str, float]:
        found = sorted(row["with"][which] / row["without"][which] for row in rows)
        draws = sorted(statistics.median(random.Random(seed).choices(found, k=len(found))) for seed in range(2_000))
        low, high = draws[50], draws[-51]
        return {"median": round(statistics.median(found), 4), "low": round(low, 4), "high": round(high, 4)}

    def middle(side: str, which: int) -> float:
        return round(statistics.median(row[side][which] for row in rows), 3)

    return {
        "pairs": len(rows),
        "steps_per_second": {side: middle(side, 0) for side in ("without", "with")},
        "coordinator_cores": {side: middle(side, 1) for side in ("without", "with")},
        "dashboard_cores": middle("dashboard", 0),
        "steps_ratio": ratio(0),
        "coordinator_cores_ratio": ratio(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, default=256)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--image-bytes", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one window")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    load = Load(options.environments, options.step_seconds, options.image_bytes)
    with tempfile.TemporaryDirectory() as folder:
        measured = uvloop.run(measure(load, options.pairs, options.seconds, Path(folder)))
    told = {name: getattr(options, name) for name in ("environments", "step_seconds", "image_bytes", "seconds")}
    write(
        options.out,
        "dashboard_live",
        "real coordinator, store, dashboard and protocol; simulated workers and readers",
        {**told, **measured},
    )
    print(measured)
    print(options.out)


if __name__ == "__main__":
    main()
