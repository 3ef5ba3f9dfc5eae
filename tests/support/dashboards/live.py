"""A live run for the dashboard: `dart coordinator` in a process of its own, with workers that need no engine.

The coordinator, its database, journal and screenshots, and the workers' end of the protocol are real; an environment
answers with a fresh screenshot of random bytes after a pause, a policy and a trainer at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dashboards.made_run import Shape, drawn
from dashboards.scripted import scripted_workers

from dart.core.types import Image, Observation
from dart.v1 import session_pb2 as pb
from dart.wire.channel import Dial
from dart.wire.convert import observation_to_proto
from dart.wire.role import Command, Reply, WorkerRole
from dart.wire.worker import WorkerOptions, serve

CONFIG = Path(__file__).parents[3] / "examples" / "node" / "colours.yaml"
CLICK = "Action: click(start_box='(48,101)')"
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

    async def prepare(self, config_json: str) -> pb.Ready:
        return pb.Ready(slots=self._slots)

    async def handle(self, command: Command) -> Reply | None:
        if isinstance(command, pb.Release):
            return pb.Released()
        await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        if isinstance(command, pb.Act) and (command.last or random.random() < 0.1):
            return pb.Observed(done=True, reward=float(random.random() < 0.25))
        image = Image.of(self._picture + os.urandom(self._more_bytes), "image/png", 160, 224)
        return observation_to_proto(Observation(image, "click the button"), 0.0)


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
