"""A run whose env workers and replicas all leave and come back, twice, as pre-empted nodes do: on SIGTERM, with a
goodbye.

Real: the coordinator's process, its database, and env worker processes with a world. Scripted: policy and trainer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml
from dashboards.scripted import ScriptedPolicy, ScriptedTrainer
from run_processes.told import events

from dart.wire.channel import Dial
from dart.wire.role import WorkerRole
from dart.wire.worker import WorkerOptions, serve

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 240
WORLD = "own_world:Boxes"
CLICK = "Action: click(start_box='(48,101)')"
"""On the first of four boxes, which is the right one in a quarter of the tasks."""
SETTINGS = {
    "run": {"name": "elastic"},
    "model": {"path": "builtin:tiny-qwen3vl"},
    "agent": {"grammar": "ui_tars", "coordinates": "pixels", "resize_multiple": 32, "min_pixels": 1024},
    "environment": {"kind": WORLD, "viewport": [160, 224], "slots": 4, "tasks": {"names": ["boxes"]}},
    "curation": {"rollouts": 4, "step_limit": 4, "dynamic_rollouts": {"enabled": False}, "max_staleness": 8},
    "trainer": {"trajectories_per_update": 8},
    "rollout": {"replicas": 2},
    "evaluation": {"episodes": 0},
    "stop": {"updates": 1_000_000},
    "dashboard": {"enabled": False},
    "watchdog": {"sampling_seconds": 1.0, "factor": 1.0},
}


class Elastic:
    """A run that is under way, and the workers that it has."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self._log = (folder / "processes.log").open("w")
        self._environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'python'}"}

    async def started(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dart", *words, stdout=self._log, stderr=self._log, env=self._environment
        )

    async def until(self, what: str, least: int) -> None:
        """Wait for so many updates ("update") or trajectories."""
        async with asyncio.timeout(HANG_SECONDS):
            while self.count(what) < least:
                await asyncio.sleep(0.1)

    def events(self, kind: str) -> list[dict[str, object]]:
        return events(self.run / "metrics.jsonl", kind)

    def count(self, what: str) -> int:
        return len(self.events(what))

    def came(self) -> int:
        """How often an env worker has been ready."""
        return sum(str(e["worker"]).startswith("env-") and e["state"] == "ready" for e in self.events("worker"))

    async def status(self) -> dict[str, dict[str, dict[str, float]]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dart", "status", str(self.run), "--json", stdout=asyncio.subprocess.PIPE
        )
        told, _ = await process.communicate()
        assert process.returncode == 0
        return json.loads(told)  # type: ignore[no-any-return]

    @asynccontextmanager
    async def workers(self) -> AsyncIterator[None]:
        """Two env workers and two replicas; afterwards the nodes of all of them are taken away."""
        address, stop = (self.run / "address").read_text(), asyncio.Event()
        came = self.came()
        envs = [
            await self.started("worker", "--role", "env", "--run", str(self.run), "--id", f"env-{n}") for n in range(2)
        ]
        async with asyncio.TaskGroup() as tasks:
            for n in range(2):
                tasks.create_task(served(ScriptedPolicy(CLICK), f"rollout-{n}", address, stop))
            yield
            async with asyncio.timeout(HANG_SECONDS):
                while self.came() < came + 2:  # a process that is still starting does not yet end in order
                    await asyncio.sleep(0.1)
            stop.set()
            for process in envs:
                process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_SECONDS):
            assert [await process.wait() for process in envs] == [0, 0]


async def served(role: WorkerRole, name: str, address: str, stop: asyncio.Event) -> None:
    await serve(role, WorkerOptions(Dial(address), name), stop)


@pytest.fixture
async def elastic(tmp_path: Path) -> AsyncIterator[Elastic]:
    made, config = Elastic(tmp_path), tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    async with AsyncExitStack() as ends:
        coordinator = await made.started("coordinator", str(config), "--run", str(made.run), "--quiet")
        async with asyncio.timeout(HANG_SECONDS):
            while not (made.run / "address").is_file():
                assert coordinator.returncode is None, (tmp_path / "processes.log").read_text()
                await asyncio.sleep(0.1)
        stop = asyncio.Event()
        address = (made.run / "address").read_text()
        trainer = asyncio.create_task(served(ScriptedTrainer(), "train-0", address, stop))
        ends.push_async_callback(asyncio.wait, {trainer})
        yield made
        coordinator.send_signal(signal.SIGINT)
        assert await coordinator.wait() == 130
        stop.set()


async def test_a_run_scales_to_zero_and_back_twice(elastic: Elastic) -> None:
    for round_ in range(1, 4):
        before = elastic.count("update")
        async with elastic.workers():
            await elastic.until("update", before + 3)
            stalls = elastic.count("stalled")
        if round_ == 3:
            break
        async with asyncio.timeout(HANG_SECONDS):  # it waits, says for what, and does not end
            while not any("env" in str(stall["waits_for"]) for stall in elastic.events("stalled")[stalls:]):
                await asyncio.sleep(0.1)
        status = await elastic.status()
        await asyncio.sleep(1.0)
        for part in ("env_time", "rollout_time"):
            assert (await elastic.status())[part] == status[part], "the ledger counts no second of a worker that left"
        assert status["env_time"]["seconds"].get("lost", 0.0) == 0.0, "what was taken back is nobody's loss"
        assert status["rollout_time"]["seconds"].get("lost", 0.0) == 0.0
    with sqlite3.connect(elastic.run / "run.db") as database:
        (stored,) = database.execute("SELECT count(*) FROM trajectories").fetchone()
        (unlike,) = database.execute(
            "SELECT count(*) FROM groups g WHERE state != 'open' AND planned != "
            "(SELECT count(*) FROM trajectories t WHERE t.group_id = g.id AND t.pooled_from = '')"
        ).fetchone()
        (unfinished,) = database.execute("SELECT count(*) FROM trajectories WHERE steps = 0").fetchone()
    assert unlike == 0, "each group that was decided about has every roll-out that was planned, once"
    assert unfinished == 0 and stored >= 9 * 8
