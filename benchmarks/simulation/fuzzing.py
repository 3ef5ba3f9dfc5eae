"""One simulated run in which two workers say what no worker should, and what became of the run and of the others."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.simulation import virtual_time
from benchmarks.simulation.links import Links
from benchmarks.simulation.mutations import mutated
from benchmarks.simulation.store import NoDatabase
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config
from dart.coordinator.job import Train
from dart.coordinator.run import Run
from dart.coordinator.start import Start
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.v1 import session_pb2 as pb

ENV_WORKERS, REPLICAS, TASKS = 11, 10, 6
FIRST_GOOD = 8
"""The first so many env workers and replicas say nonsense; the others do not."""
VICTIMS = tuple(f"{role}-{number}" for role in ("env", "rollout") for number in range(FIRST_GOOD))
EVERY_SECONDS, MOST_SECONDS = 5.0, 900.0
"""Virtual seconds between two mutations of a victim, and of a run: its victims are in quarantine more and more."""


@dataclass
class Fuzzed:
    seed: int
    mutations: int = 0
    violations: int = 0
    ended: bool = False
    longest_hold: float = 0.0
    """Real seconds that one message of a victim took."""
    fields: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class _Fuzz:
    def __init__(self, fuzzed: Fuzzed, wanted: int) -> None:
        self.fuzzed, self.wanted = fuzzed, wanted
        self.chance = random.Random(f"fuzz/{fuzzed.seed}")

    def mutate(self, message: pb.SessionRequest, chance: random.Random) -> pb.SessionRequest:
        made, name = mutated(message, chance)
        self.fuzzed.mutations += 1
        self.fuzzed.fields[name] += 1
        return made

    async def run(self, folder: Path) -> None:
        run = Run(_config(self.fuzzed.seed), RunDirectory(folder), NoDatabase(), Train(), Start())  # type: ignore[arg-type]
        self._watch(run)
        links, timings, seed = Links(run.fleet, self.chance), Timings(), self.fuzzed.seed
        names = list(run.config.environment.tasks.names)
        SimulatedTrainer(links, timings)
        for number in range(REPLICAS):
            SimulatedReplica(links, f"rollout-{number}", timings, seed)
        for number in range(ENV_WORKERS):
            SimulatedEnvs(links, f"env-{number}", 1, timings, names, seed)
        self._instances = {name: link.worker for name, link in links.of.items() if name not in VICTIMS}
        working = asyncio.get_running_loop().create_task(run.work())
        try:
            await self._fuzz(run, links, working)
            self._judge(run)
        finally:
            run.interrupt()
            await asyncio.wait({working})
            links.close()

    async def _fuzz(self, run: Run, links: Links, working: asyncio.Task[object]) -> None:
        until = asyncio.get_running_loop().time() + MOST_SECONDS
        while self.fuzzed.mutations < self.wanted and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(EVERY_SECONDS)
            if working.done():
                error = working.exception()
                self.fuzzed.ended = True
                self.fuzzed.wrong.append(f"the run ended: {error!r}")
                return
            for name in VICTIMS:
                link = links.of[name]
                link.trouble.garbled = self.mutate
                link.trouble.ready = self.mutate if self.chance.random() < 0.1 else None

    def _watch(self, run: Run) -> None:
        receive, record = run.fleet.receive, run.journal.event

        def timed(worker: object, message: pb.SessionRequest) -> None:
            began = time.perf_counter()
            receive(worker, message)  # type: ignore[arg-type]
            self.fuzzed.longest_hold = max(self.fuzzed.longest_hold, time.perf_counter() - began)

        def event(kind: str, /, **fields: object) -> None:
            self.fuzzed.violations += kind == "violation"
            if kind == "violation" and fields.get("worker") not in VICTIMS:
                self.fuzzed.wrong.append(f"{fields.get('worker')} was blamed: {fields}")
            record(kind, **fields)

        run.fleet.receive = timed  # type: ignore[method-assign,assignment]
        run.journal.event = event  # type: ignore[method-assign]

    def _judge(self, run: Run) -> None:
        """The others are whom they were, and have worked."""
        present = {worker.id: worker for worker in run.fleet.workers.values()}
        for name, worker in self._instances.items():
            if present.get(name) is not worker:
                self.fuzzed.wrong.append(f"{name} was lost")
        if not self.fuzzed.ended and run.progress.counts.trajectories == 0:
            self.fuzzed.wrong.append("no trajectory was finished")


def fuzz(seed: int, mutations: int) -> Fuzzed:
    """One run with so many mutations."""
    fuzzed = Fuzzed(seed)
    with tempfile.TemporaryDirectory() as folder:
        try:
            virtual_time.run(_Fuzz(fuzzed, mutations).run(Path(folder)))
        except UserError as error:
            fuzzed.ended = True
            fuzzed.wrong.append(f"the run ended: {error}")
    return fuzzed


def _config(seed: int) -> config.Config:
    return config.parse(
        {
            "run": {"seed": seed},
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": [f"task-{number}" for number in range(TASKS)]}},
            "rollout": {"replicas": REPLICAS},
            "curation": {"rollouts": 4, "step_limit": 8},
            "trainer": {"trajectories_per_update": 8},
            "evaluation": {"episodes": 0},
            "stop": {"updates": 1_000_000},
            "server": {"lost_after_seconds": 15.0, "reply_timeout_seconds": 120.0},
        }
    )
