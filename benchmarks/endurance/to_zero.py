"""A real training run scaled to zero and back, twice: `python -m benchmarks.endurance.to_zero`.

Chromium, vLLM, the trainer, the coordinator and SQLite are real, each worker is a process, as on a cluster. All env
workers and replicas get SIGTERM after some updates, as from nodes that are pre-empted; some time later new ones come. A
witness reads the database from outside: nothing that was stored may be lost, doubled or trained on twice, and while
nobody is there the ledger of times must stand still. Writes results/to_zero.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.endurance.witness import Witness
from dart.coordinator.summary import machine, software, write_json
from dart.rundir import RunDirectory

RESULT = Path(__file__).parents[1] / "results" / "to_zero.json"
CONFIG = Path("configs/miniwob_cpu.yaml")
OVERRIDES = (
    "evaluation.episodes=0", "stop.updates=100000", "stop.train_seconds=null", "stop.success_rate=null",
    "dashboard.enabled=false",
)  # fmt: skip
ELASTIC = ("env", "env", "rollout", "rollout")
HANG_SECONDS = 900.0
SETTLE_SECONDS = 3.0
"""Until the last goodbye has been dealt with."""


@dataclass
class Run:
    directory: RunDirectory
    log: Path
    witness: Witness = field(init=False)
    started: list[Process] = field(default_factory=list)
    workers: list[Process] = field(default_factory=list)
    """The env workers and replicas that came last."""

    def __post_init__(self) -> None:
        self.witness = Witness(self.directory.database)

    async def start(self, *words: str) -> Process:
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dart", *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.started.append(process)
        return process

    async def worker(self, role: str, name: str) -> Process:
        return await self.start("worker", "--role", role, "--run", str(self.directory.path), "--id", name)

    async def status(self) -> dict[str, Any]:
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dart", "status", str(self.directory.path), "--json", stdout=asyncio.subprocess.PIPE
        )
        told, _ = await asking.communicate()
        status: dict[str, Any] = json.loads(told)
        return status

    async def up(self, updates: int) -> dict[str, object]:
        """All workers come; returns when so many updates have been made with them."""
        self.witness.look()
        began, before, had = time.monotonic(), self.witness.updates(), len(self.witness.trajectories)
        self.workers = [await self.worker(role, f"{role}-{number}") for number, role in enumerate(ELASTIC)]
        seconds: dict[str, float] = {}
        async with asyncio.timeout(HANG_SECONDS):
            while (made := self.witness.updates() - before) < updates:
                await asyncio.sleep(0.5)
                self.witness.look()
                if len(self.witness.trajectories) > had:
                    seconds.setdefault("to_the_first_trajectory", round(time.monotonic() - began, 1))
                if self.witness.updates() > before:
                    seconds.setdefault("to_the_first_update", round(time.monotonic() - began, 1))
        status = await self.status()
        return {
            "seconds": round(time.monotonic() - began, 1),
            "updates": made,
            "trajectories": len(self.witness.trajectories) - had,
            **seconds,
            **{part: round(status["figures"]["usage"][part], 3) for part in ("env_utilisation", "rollout_utilisation")},
        }

    async def down(self, seconds: float) -> dict[str, object]:
        """All of them leave, and nobody is there for so long."""
        began = time.monotonic()
        for process in self.workers:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_SECONDS):
            exits = [await process.wait() for process in self.workers]
        left = time.monotonic() - began
        await asyncio.sleep(SETTLE_SECONDS)
        first = await self.status()
        await asyncio.sleep(seconds)
        last = await self.status()
        return {
            "exits": exits,
            "seconds_until_the_last_had_left": round(left, 1),
            "workers": sorted(worker["worker_id"] for worker in last["workers"]),
            "ledger_stood_still": all(first[part] == last[part] for part in ("env_time", "rollout_time")),
            "seconds_lost": {part: last[part]["seconds"].get("lost", 0.0) for part in ("env_time", "rollout_time")},
        }


async def to_zero(times: int, updates: int, seconds: float, folder: Path) -> dict[str, object]:
    """Run it; returns the results as JSON."""
    directory = RunDirectory(folder / "run")
    run = Run(directory, folder / "processes.log")
    choices = [part for override in OVERRIDES for part in ("--set", override)]
    coordinator = await run.start("coordinator", str(CONFIG), "--run", str(directory.path), "--quiet", *choices)
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not directory.address.is_file():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.2)
        trainer = await run.worker("train", "train")
        phases: list[dict[str, object]] = []
        for number in range(times + 1):
            phases.append({"phase": "up", **await run.up(updates)})
            if number < times:
                phases.append({"phase": "zero", **await run.down(seconds)})
        counts = (await run.status())["figures"]["counts"]["fates"]
        coordinator.send_signal(signal.SIGINT)
        exits = {"coordinator": await coordinator.wait(), "trainer": await trainer.wait()}
    finally:
        for process in run.started:
            if process.returncode is None:
                process.kill()
    return {
        "machine": machine(),
        "versions": software(),
        "real": "Chromium, vLLM, trainer, coordinator, SQLite; every worker a process that SIGTERM ends",
        "phases": phases,
        "exits": exits,
        "fates": counts,
        "updates": run.witness.updates(),
        "trajectories": len(run.witness.trajectories),
        "wrong": run.witness.verdict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2, help="how often everybody leaves")
    parser.add_argument("--updates", type=int, default=4, help="updates before that, and after the last return")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long nobody is there")
    parser.add_argument("--folder", type=Path, help="keep the run directory and the logs here")
    parser.add_argument("--out", type=Path, default=RESULT)
    choices = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = choices.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = asyncio.run(to_zero(choices.times, choices.updates, choices.seconds, folder))
    write_json(choices.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
