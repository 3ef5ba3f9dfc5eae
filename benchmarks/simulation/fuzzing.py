"""Simulated runs in which some workers send mutated messages, and what must hold meanwhile.

A run that trains, its resumption, and a run that collects what a scripted oracle does: together they bring about every
message that a worker sends. Real: the coordinator with its scheduler, boundary, store and both ends of the session.
Simulated: time, and what the workers do. What must hold: the run continues to its end; an honest worker is never lost,
and no attempt fails because of one; what is stored follows the rules; the run can be resumed.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from benchmarks.simulation import virtual_time
from benchmarks.simulation.capable import CapableReplica, ElasticEnvs, PausingReplica
from benchmarks.simulation.mutants import MUTATED, Mutants, Tally
from benchmarks.simulation.timings import EnvTimes, SyncTimes, Timings, TrainerTimes
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedTrainer
from dart import config
from dart.agent.vocabulary import vocabulary_size
from dart.coordinator.ending import Interrupted
from dart.coordinator.fleet import prompts
from dart.coordinator.fleet.sessions import InfrastructureError, Worker
from dart.coordinator.run import Run
from dart.coordinator.sampling.collecting import Collection
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.start import Start, starting_point
from dart.core.curation.orders import Order
from dart.core.types import Trajectory
from dart.job import Collect, Job, Train
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url
from dart.v1 import session_pb2 as pb

TASKS = 8
HONEST_ENVS, HONEST_REPLICAS, SLOTS = 2, 2, 4
MUTANTS = 8
"""The number of mutants among the env workers, and among the replicas."""
SHARES: dict[int, float] = {pb.ROLE_ENV: 0.4, pb.ROLE_ROLLOUT: 0.4, pb.ROLE_TRAIN: 0.3}
TIMINGS = Timings(
    env=EnvTimes(boot=(0.5, 1.0), settle=(0.1, 0.5), step=(0.1, 0.5), grade=(0.1, 0.2)),
    trainer=TrainerTimes(seconds_per_step=0.01, seconds=1.0),
    sync=SyncTimes(gigabytes=0.1, restart=0.2),
    failures_per_step=0.0,
)
RESUMED_UPDATES = 1
COLLECTED_SHARE = 0.25
"""Of a run's mutations, so many happen while it collects."""
RUNS_OF_A_SEED = 3
"""A run that trains, its resumption, and one that collects."""
COLLECT = Collect(
    "oracle", seeds=(0, 1_000_000), per_task=1_000_000, most_attempts=1_000_000, samples=1, temperature=1.0
)
ROOM_BYTES = 9_000
"""In place of 16 MiB: so little that a prompt with two new screenshots needs them sent ahead (HoldScreenshots)."""


@dataclass
class Outcome:
    seed: int
    mutations: Counter[tuple[str, str]] = field(default_factory=Counter)
    updates: int = 0
    trajectories: int = 0
    honest_trajectories: int = 0
    """How many trajectories finished in the environments of honest workers."""
    collected: int = 0
    """How many attempts the collection brought to an end."""
    violations: int = 0
    quarantines: int = 0
    longest_seconds: float = 0.0
    most_mb: float = 0.0
    wrong: list[str] = field(default_factory=list)


def fuzz(seed: int, mutations: int, folder: Path) -> Outcome:
    """Runs with at least `mutations` mutated messages. The folder must be empty."""
    outcome = Outcome(seed)
    collected = int(mutations * COLLECTED_SHARE)
    with patch.object(prompts, "ROOM_BYTES", ROOM_BYTES):
        for part in (
            _Part("train", Train(), mutations - collected),
            _Part("train", Train(), 0, resume=True),
            _Part("collect", COLLECT, collected),
        ):
            (folder / part.name).mkdir(exist_ok=True)
            virtual_time.run(_live(outcome, part, folder / part.name))
    return outcome


@dataclass(frozen=True, slots=True)
class _Part:
    """One life of a coordinator. `mutations`: at least so many; with 0, all workers are honest."""

    name: str
    job: Job
    mutations: int
    resume: bool = False


async def _live(outcome: Outcome, part: _Part, folder: Path) -> None:
    directory = RunDirectory(folder)
    async with await Database.open(sqlite_url(directory.database), directory.blobs) as database:
        start = Start()
        if part.resume:
            start = await starting_point(database, directory)
            await database.resume_run()
        else:
            await database.start_run(directory.name, "fuzz", {}, started=virtual_time.START, kind=part.job.kind)
        run = Run(_config(outcome.seed), directory, database, part.job, start)
        chance, tally = random.Random(f"{outcome.seed}/{part.name}/{part.resume}"), Tally()
        honest = Honest(run, outcome)
        shares = {role: share if part.mutations else 0.0 for role, share in SHARES.items()}
        links = Mutants(run.fleet, chance, tally, shares)
        _workers(links, run, outcome.seed, start.version, trains=part.job == Train())
        wanted = start.update + RESUMED_UPDATES if part.job == Train() else 0
        try:
            async with asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(_end(run, tally, part.mutations, wanted))
                await run.work()
                ending.cancel()
        except* Interrupted:
            pass
        except* Exception as errors:  # noqa: BLE001 - anything that ends a run is a finding
            outcome.wrong += [f"the run ended ({part.name}): {type(one).__name__}: {one}" for one in errors.exceptions]
        finally:
            links.close()
        if run.progress.counts.updates < wanted:
            outcome.wrong.append(f"no update after {start.update}")
        honest.count()
        if part.resume or not wanted:
            await _stored(outcome, database, run)
        outcome.mutations += tally.mutations
        outcome.longest_seconds = max(outcome.longest_seconds, tally.longest_seconds)
        outcome.most_mb = max(outcome.most_mb, tally.most_mb)
        outcome.updates = max(outcome.updates, run.progress.counts.updates)
        outcome.trajectories += run.progress.counts.trajectories
        if run.collection is not None:
            outcome.collected = run.collection.finished_attempts


async def _end(run: Run, tally: Tally, mutations: int, updates: int) -> None:
    """Interrupt the run after enough mutations and updates, or after a year."""
    for _ in range(365 * 24 * 360):
        if tally.mutations.total() >= mutations and run.progress.counts.updates >= updates:
            break
        await asyncio.sleep(10.0)
    run.interrupt()


def _workers(links: Mutants, run: Run, seed: int, version: int, *, trains: bool) -> None:
    names = list(run.config.environment.tasks.names)
    if trains:
        trainer = SimulatedTrainer(links, TIMINGS, version)
        trainer.saving_seconds = 2.0
    for prefix, replicas, envs in (("", HONEST_REPLICAS, HONEST_ENVS), (MUTATED, MUTANTS, MUTANTS)):
        for number in range(replicas):
            kind = PausingReplica if number % 2 else CapableReplica
            kind(links, f"{prefix}rollout-{number}", TIMINGS, seed, version)
        for number in range(envs):
            # A collection can use only those with an oracle.
            ours = SimulatedEnvs if trains and number % 2 else ElasticEnvs
            ours(links, f"{prefix}env-{number}", SLOTS, TIMINGS, names, seed)


class Honest:
    """Watches what happens to the honest workers, and to their work."""

    def __init__(self, run: Run, outcome: Outcome) -> None:
        self._outcome, self._run = outcome, run
        self._at: dict[str, str] = {}
        """Trajectory → the env worker that its attempt runs on."""
        self._finished: Counter[str] = Counter()
        run.fleet.on_lost.append(self._lost)
        record = run.journal.event

        def event(kind: str, /, **fields: object) -> None:
            if kind == "violation":
                outcome.violations += 1
                outcome.quarantines += bool(fields["quarantine_seconds"])
                if not str(fields["worker"]).startswith(MUTATED) and fields["worker"] != "train":
                    outcome.wrong.append(f"an honest worker broke a rule: {fields}")
            if kind == "phase" and fields["phase"] == "collecting":  # the collection is made next
                asyncio.get_running_loop().call_soon(lambda: self._watch(run.collection))
            record(kind, **fields)

        run.journal.event = event  # type: ignore[method-assign]
        if isinstance(run.data, DataManager):
            self._watch(run.data)

    def _watch(self, source: DataManager | Collection | None) -> None:
        """Note what becomes of the source's orders."""
        assert source is not None
        outcome, failed, finished = self._outcome, source.failed, source.finished

        def note_failed(order: Order, error: InfrastructureError) -> None:
            if any(not name.startswith(MUTATED) for name in order.failed_on) or not error.worker:
                outcome.wrong.append(f"an attempt failed on an honest worker ({sorted(order.failed_on)}): {error}")
            failed(order, error)

        async def note_finished(order: Order, trajectory: Trajectory) -> None:
            await finished(order, trajectory)
            self._finished[trajectory.id] += 1

        source.failed = note_failed  # type: ignore[method-assign]
        source.finished = note_finished  # type: ignore[method-assign]

    def _lost(self, worker: Worker) -> None:
        if not worker.id.startswith(MUTATED) and not worker.said_goodbye:
            self._outcome.wrong.append(f"an honest worker was lost: {worker.id}")

    def count(self) -> None:
        twice = [name for name, times in self._finished.items() if times > 1]
        if twice:
            self._outcome.wrong.append(f"finished twice: {twice[:5]}")
        self._outcome.honest_trajectories += len(self._finished)


async def _stored(outcome: Outcome, database: Database, run: Run) -> None:
    """Check that every stored trajectory follows the rules."""
    version, vocabulary = run.progress.counts.version, vocabulary_size(run.config.model.folder) or 2**24
    for row in await database.list_trajectories("", 100_000, ""):
        stored = await database.trajectory(row.id)
        assert stored is not None
        if why := _unusable(stored.trajectory, version, vocabulary, forced=not run.progress.counts.updates):
            outcome.wrong.append(f"stored: {row.id}: {why}")


def _unusable(trajectory: Trajectory, version: int, vocabulary: int, *, forced: bool) -> str:
    if not 0.0 <= trajectory.reward <= 1.0:
        return f"reward {trajectory.reward}"
    for step in trajectory.steps:
        generation = step.generation
        if not generation.token_ids or max(*generation.token_ids, *generation.prompt_token_ids, 0) >= vocabulary:
            return f"tokens of step {step.index}"
        scored = 0 if forced else len(generation.token_ids)
        wrong = len(generation.logprobs) != scored and not trajectory.pooled_from
        if wrong or not all(map(math.isfinite, generation.logprobs)):
            return f"log-probabilities of step {step.index}"
        ends = [0, *(span.end for span in generation.versions)]
        if [span.start for span in generation.versions] != ends[:-1] or ends[-1] != len(generation.token_ids):
            return f"versions of step {step.index}"
    return "a version that was never made" if trajectory.newest_version > version else ""


def _config(seed: int) -> config.Config:
    return config.parse(
        {
            "run": {"seed": seed},
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": [f"task-{number:03d}" for number in range(TASKS)]}},
            "rollout": {"replicas": HONEST_REPLICAS},
            "curation": {"rollouts": 4, "step_limit": 6, "max_staleness": 8},
            "trainer": {"trajectories_per_update": 4},
            "evaluation": {"episodes": 0},
            "checkpoint": {"every_updates": 1},
            "sync": {"transport": "gloo", "timeout_seconds": 20.0},
            "stop": {"updates": 1_000_000},
            "server": {"lost_after_seconds": 15.0, "reply_timeout_seconds": 60.0},
        }
    )
