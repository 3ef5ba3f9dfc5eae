"""One simulated training run under planned faults: the real coordinator, scheduler, store and session machines.

When a coordinator is killed, its directory stays as it is at that moment (a copy is taken, and whatever the dying
process would still write is thrown away); the next one resumes it. After the planned time the coordinator is killed
once more, and the last process, under no faults, must make an update. `Outcome.wrong` lists every broken invariant,
also those of `benchmarks.simulation.faults.harm`: the throughput of what is healthy, and the culprits of stalls.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import random
import shutil
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy.exc import OperationalError

from benchmarks.endurance.witness import Witness
from benchmarks.simulation import virtual_time
from benchmarks.simulation.cluster import SLOTS_PER_WORKER
from benchmarks.simulation.faults.befall import befall, twin_admitted
from benchmarks.simulation.faults.harm import EVERYBODY, SLACK, Curve, Harms
from benchmarks.simulation.faults.plan import (
    ENDS_THE_PROCESS,
    FAILING_SECONDS,
    ROLES,
    WALL_CLOCK_SECONDS,
    Fault,
    Planned,
)
from benchmarks.simulation.links import Link, Links
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config
from dart.coordinator.run import Run
from dart.coordinator.start import Start, starting_point
from dart.coordinator.training.ranks import TrainerLost
from dart.core.fleet.invariants import validate
from dart.core.types import Trajectory
from dart.errors import UserError, ungrouped
from dart.job import Train
from dart.rundir import RunDirectory
from dart.store import engine
from dart.store.database import Database, sqlite_url

LOOK_SECONDS = 60.0
SILENT_SECONDS = 1200.0
"""After this long without a finished group or an update, and `WATCHDOG_FACTOR` times the duration of the slowest
trajectory or update of late, the watchdog must have reported a stall."""
WATCHDOG_FACTOR = 2.0
RESUMED_SECONDS = 3600.0
"""The last process must make its update within this time."""

TRIES = 3
RESTART_SECONDS = 5.0
"""The time between a coordinator's death and the start of the next one."""


@dataclass
class Outcome:
    seed: int
    hours: float
    faults: Counter[Fault] = field(default_factory=Counter)
    recoveries: dict[Fault, list[float]] = field(default_factory=dict)
    """The seconds from the end of a fault to the next update."""
    resumes: int = 0
    trajectories: int = 0
    updates: int = 0
    open: list[tuple[Fault, float]] = field(default_factory=list)
    """Faults that are over but after which no update has come yet, each with the time when it ended."""
    stored: set[str] = field(default_factory=set)
    """Trajectories that a coordinator was told are stored: whatever it did next relied on them."""
    finished: list[float] = field(default_factory=list)
    """When each trajectory was stored, in virtual seconds since the run began."""
    worth: float = 0.0
    """What the healthy time is worth in trajectories (`harm`)."""
    stalls: list[tuple[float, str, str]] = field(default_factory=list)
    """(seconds since the run began, kind, culprit) of each stall that the watchdog reported."""
    wall_clock_ahead: float = 0.0
    """Seconds by which faults have moved the wall clock."""
    decisions: str = ""
    """A digest of every event that the run recorded."""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cluster:
    environments: int = 40
    replicas: int = 4
    tasks: int = 40
    missing: frozenset[str] = frozenset()
    """Workers that do not come before the last resume."""

    @property
    def env_names(self) -> list[str]:
        return [f"env-{number}" for number in range(self.environments // SLOTS_PER_WORKER)]

    @property
    def replica_names(self) -> list[str]:
        return [f"rollout-{number}" for number in range(self.replicas)]


class _Killed(Exception):
    """The coordinator's process ends here."""


class _Life:
    """One coordinator process, from its start to its death or to the end of the run."""

    def __init__(
        self,
        outcome: Outcome,
        cluster: Cluster,
        folder: Path,
        began: float,
        until: float,
        harms: Harms,
        updates: int | None = None,
    ) -> None:
        """`updates`: the run ends in order with this update; None: it goes on until it is killed."""
        self.outcome, self.cluster, self.folder, self.updates = outcome, cluster, folder, updates
        self._began, self._harms = began, harms
        """When the run began, in virtual seconds."""
        self._events: list[tuple[float, str, str]] = []
        self._progress_at = began
        self._slow_until = began
        self._short: Fault | None = None
        self.killed_at = until
        self.dead = False

    async def live(self, planned: list[Planned], timings: Timings, resume: bool) -> None:
        """Run until the run is over, or until a fault ends this process. Raises _Killed."""
        directory = RunDirectory(self.folder)
        async with await Database.open(sqlite_url(directory.database), directory.blobs) as database:
            settings = _config(self.cluster, self.outcome.seed, self.updates)
            self._note_stored(database)
            self._may_be_slow(database)
            if resume:
                start = await starting_point(database, directory)
                await database.resume_run()
            else:
                start = Start()
                await database.start_run(directory.name, "chaos", {}, started=self._began)
            self.run = Run(settings, directory, database, Train(), start)
            self._listen()
            self._may_be_full()
            database.wait_at_most(settings.run.database_wait_seconds)
            self.links = Links(self.run.fleet, random.Random(f"links/{self.outcome.seed}/{self.outcome.resumes}"))
            self._workers(settings, timings, start.version)
            await self._with_faults(planned)

    def _note_stored(self, database: Database) -> None:
        store = database.add_trajectory

        async def stored(trajectory: Trajectory, attempt: int = 1) -> None:
            await store(trajectory, attempt)
            if not self.dead:
                self.outcome.stored.add(trajectory.id)
                self.outcome.finished.append(asyncio.get_running_loop().time() - self._began)

        database.add_trajectory = stored  # type: ignore[method-assign]

    def _workers(self, settings: config.Config, timings: Timings, version: int) -> None:
        names, seed = list(settings.environment.tasks.names), self.outcome.seed
        missing = self.cluster.missing if self.updates is None else frozenset()
        if "train" not in missing:
            SimulatedTrainer(self.links, timings, version)
        for name in [name for name in self.cluster.replica_names if name not in missing]:
            SimulatedReplica(self.links, name, timings, seed, version)
        for name in [name for name in self.cluster.env_names if name not in missing]:
            SimulatedEnvs(self.links, name, SLOTS_PER_WORKER, timings, names, seed)

    def _listen(self) -> None:
        record = self.run.journal.event

        def event(kind: str, /, **fields: object) -> None:
            now = asyncio.get_running_loop().time()
            self._events.append((now, kind, json.dumps(fields, default=str, sort_keys=True)))
            if kind in ("group", "update"):
                self._progress_at = now
            if kind == "update":
                for fault, ended in self.outcome.open:
                    self.outcome.recoveries.setdefault(fault, []).append(now - ended)
                self.outcome.open.clear()
            if kind == "stalled":
                self._stalled(now, str(fields["kind"]), str(fields["culprit"]), float(str(fields["seconds"])))
            record(kind, **fields)

        self.run.journal.event = event  # type: ignore[method-assign]

    def _stalled(self, now: float, kind: str, culprit: str, seconds: float) -> None:
        """The watchdog has reported a stall: it must name somebody at fault."""
        at = now - self._began
        self.outcome.stalls.append((at, kind, culprit))
        if not self.dead and not self.cluster.missing and self._harms.wrongly_blamed(culprit, now - seconds):
            self.outcome.wrong.append(f"{culprit} was blamed for a stall of {seconds:.0f} s ({kind}) at {at:.0f}")

    async def _with_faults(self, planned: list[Planned]) -> None:
        async def work() -> None:
            try:
                async with asyncio.timeout(None if self.updates is None else RESUMED_SECONDS):
                    await self.run.work()
            except UserError as error:
                trainers = isinstance(error, TrainerLost) or "the trainer has refused" in str(error)
                if trainers and self._harms.may_end_the_run(asyncio.get_running_loop().time()):
                    raise _Killed from None  # another process resumes the run
                self.outcome.wrong.append(f"the run ended: {error}")
            except TimeoutError:
                self.outcome.wrong.append("no update within an hour of the last resume")
            except Exception as error:  # noqa: BLE001 - whatever it is, it should not happen
                self.outcome.wrong.append(f"the run broke: {error!r}")

        try:
            with ungrouped(_Killed):
                async with asyncio.TaskGroup() as tasks:
                    beside = [tasks.create_task(self._happen(one)) for one in planned]
                    beside.append(tasks.create_task(self._look()))
                    await work()
                    for task in beside:
                        task.cancel()
        finally:
            self.links.close()
            text = "\n".join(f"{at:.6f} {kind} {fields}" for at, kind, fields in self._events)
            text = text.replace(str(self.folder.parent), "")  # checkpoint names contain it
            self.outcome.decisions = hashlib.sha256((self.outcome.decisions + text).encode()).hexdigest()

    async def _look(self) -> None:
        """Check the invariants that can be seen from outside at any moment."""
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            validate(self.run.replicas)
            silent, progress = now - max(self._progress_at, began), self.run.progress
            slowest = max(progress.slowest_trajectory, progress.slowest_update)
            if silent > SILENT_SECONDS + WATCHDOG_FACTOR * slowest:
                spoke = any(kind == "stalled" and at > now - silent for at, kind, _ in self._events)
                if not spoke:
                    self.outcome.wrong.append(f"no progress for {silent:.0f} s at {now - self._began:.0f}, unreported")

    # ---- faults ----

    async def _happen(self, planned: Planned) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._began + planned.at - loop.time()))
        self.outcome.faults[planned.fault] += 1
        self._events.append((loop.time(), "fault", planned.fault))
        link = self._link(planned) if planned.fault in ROLES else None
        lasts = FAILING_SECONDS if planned.fault is Fault.TRAINER_FAILS else planned.seconds
        self._harms.happened(planned, link.name if link else EVERYBODY, loop.time(), lasts)
        ends = planned.fault in ENDS_THE_PROCESS
        if ends:
            self.outcome.open.append((planned.fault, loop.time()))
        if link is None:
            await self._to_coordinator(planned)
        elif planned.fault is not Fault.TWIN:
            await befall(link, planned.fault, lasts)
        elif wrong := twin_admitted(link):
            self.outcome.wrong.append(f"{wrong} at {planned.at:.0f}")
        if not ends:
            self.outcome.open.append((planned.fault, loop.time()))

    def _link(self, planned: Planned) -> Link:
        names = [name for name in sorted(self.links.of) if name.split("-")[0] in ROLES[planned.fault]]
        return self.links.of[names[int(planned.draw * len(names))]]

    async def _to_coordinator(self, planned: Planned) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_time.VirtualLoop)
        match planned.fault:
            case Fault.COORDINATOR_KILLED:
                self.killed_at, self.dead = loop.time(), True
                _copy(self.folder, self.folder.with_name(self.folder.name + "+"))
                raise _Killed
            case Fault.SLOW_DISK:
                self._slow_until = max(self._slow_until, loop.time() + planned.seconds)
                await asyncio.sleep(planned.seconds)
            case Fault.NO_FILES | Fault.DISK_FULL:
                self._short = planned.fault
                await asyncio.sleep(planned.seconds)
                self._short = None
            case Fault.CLOCK:
                loop.stand_still(planned.seconds)
            case Fault.WALL_CLOCK:
                seconds = (planned.draw - 0.5) * WALL_CLOCK_SECONDS
                self.outcome.wall_clock_ahead += seconds
                loop.set_wall_clock(seconds)
            case _:
                raise AssertionError(planned.fault)

    def _may_be_slow(self, database: Database) -> None:
        """While the disk is slow, each transaction takes seconds."""
        chance, write = random.Random(self.outcome.seed), database.write

        async def slow(work: object) -> object:
            if asyncio.get_running_loop().time() < self._slow_until:
                await asyncio.sleep(chance.uniform(0.1, 3.0))
            return await write(self._tried(work))

        database.write = slow  # type: ignore[method-assign,assignment]

    def _tried(self, work: Any) -> Any:
        """A transaction that fails a few times first while the machine is short of something: no virtual time passes in
        a thread."""
        left = TRIES if self._short else 0
        full = self._short is Fault.DISK_FULL

        def tried(connection: object) -> object:
            nonlocal left
            if left:
                left -= 1
                error = sqlite3.OperationalError("database or disk is full" if full else "unable to open database file")
                error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_CANTOPEN
                raise OperationalError("", None, error)
            return work(connection)

        return tried

    def _may_be_full(self) -> None:
        """While the disk is full, metrics.jsonl takes no line."""
        write = self.run.journal.flush_lines

        def flush_lines() -> None:
            if self._short is Fault.DISK_FULL:
                raise OSError(errno.ENOSPC, "No space left on device")
            write()

        self.run.journal.flush_lines = flush_lines  # type: ignore[method-assign]


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


async def _one_life(life: _Life, planned: list[Planned], timings: Timings, resume: bool) -> tuple[bool, float]:
    """(whether a fault ended it, when)."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, virtual_time.VirtualLoop)
    loop.set_wall_clock(life.outcome.wall_clock_ahead)
    try:
        await life.live(planned, timings, resume)
    except _Killed:
        return True, min(life.killed_at, asyncio.get_running_loop().time())
    return False, asyncio.get_running_loop().time()


def chaos(
    seed: int,
    planned: list[Planned],
    hours: float,
    folder: Path,
    timings: Timings,
    cluster: Cluster = Cluster(),
    curve: Curve | None = None,
) -> Outcome:
    """One run of `hours` virtual hours, in as many coordinator processes as it takes.

    `curve`: of a run without faults (`undisturbed`), to check the throughput; None: it is not checked.
    """
    outcome, began, at = Outcome(seed, hours), virtual_time.START, folder / "run"
    now, until = began, began + 3600 * hours
    planned = [*planned, Planned(Fault.COORDINATOR_KILLED, 3600 * hours, 0.0, 0.0)]
    at.mkdir(parents=True)
    witness = Witness(at / "run.db")
    harms = Harms(cluster.env_names, cluster.replica_names)
    while True:
        calm = now >= until
        life = _Life(outcome, cluster, at, began, until, harms, witness.updates() + 1 if calm else None)
        left, start = [one for one in planned if began + one.at > now], now
        with patch.object(engine, "_AWAY_SECONDS", 0.0):  # which a thread sleeps in real time
            killed, now = virtual_time.run(_one_life(life, left, timings, now > began), now)
        if not calm:
            harms.process_ended(start, now)
        if (copied := at.with_name(at.name + "+")).exists():
            at = copied
        witness.database = at / "run.db"
        witness.look()
        outcome.wrong += [f"{name} was stored, and is gone" for name in sorted(outcome.stored - witness.trajectories)]
        if not killed:
            break
        witness.resumed()
        outcome.resumes += 1
        now += RESTART_SECONDS
    outcome.wrong += witness.verdict()
    if curve is not None:
        outcome.worth = harms.worth(curve)
        made = sum(at <= 3600 * hours for at in outcome.finished)
        if made < SLACK * outcome.worth:
            worth = f"less than {SLACK:.0%} of the {outcome.worth:.0f} that the healthy time is worth"
            outcome.wrong.append(f"{made} trajectories were finished, {worth}")
    outcome.trajectories, outcome.updates = len(witness.trajectories), witness.updates()
    return outcome


def undisturbed(hours: float, folder: Path, timings: Timings, cluster: Cluster = Cluster()) -> Curve:
    """The trajectories of a run without faults. Always of the same seed, so that each other seed replays alone."""
    outcome = chaos(0, [], hours, folder, timings, cluster)
    return Curve([at for at in outcome.finished if at <= 3600 * hours], 3600 * hours)


def _config(cluster: Cluster, seed: int, updates: int | None) -> config.Config:
    return config.parse(
        {
            "run": {"seed": seed},
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": [f"task-{number:03d}" for number in range(cluster.tasks)]}},
            "rollout": {"replicas": cluster.replicas},
            "curation": {"rollouts": 8, "step_limit": 30, "max_staleness": 4},
            "trainer": {"trajectories_per_update": 32},
            "evaluation": {"episodes": 0},
            "checkpoint": {"every_updates": 3},
            "sync": {"timeout_seconds": 60.0},
            "stop": {"updates": updates or 1_000_000},
            "server": {"lost_after_seconds": 15.0, "reply_timeout_seconds": 180.0},
            "watchdog": {
                "start_seconds": 300.0,
                "sampling_seconds": 300.0,
                "update_seconds": 300.0,
                "factor": WATCHDOG_FACTOR,
            },
        }
    )
