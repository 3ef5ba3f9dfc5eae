"""One simulated training run under planned faults: the real coordinator, scheduler, store and session machines.

When a coordinator is killed, its directory stays as it is at that moment (a copy is taken, and whatever the dying
process would still write is thrown away); the next one resumes it. After the planned time the coordinator is killed
once more, and the last process, under no faults, must make an update. `Outcome.wrong` lists every broken invariant.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.endurance.witness import Witness
from benchmarks.simulation import virtual_time
from benchmarks.simulation.cluster import SLOTS_PER_WORKER
from benchmarks.simulation.faults import ENDS_THE_PROCESS, Fault, Planned
from benchmarks.simulation.garbage import garbled
from benchmarks.simulation.links import Link, Links
from benchmarks.simulation.timings import Timings
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config
from dart.coordinator.job import Train
from dart.coordinator.run import Run
from dart.coordinator.start import Start, starting_point
from dart.coordinator.training.ranks import TrainerLost
from dart.core.types import Trajectory
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.database import Database, sqlite_url
from dart.v1 import session_pb2 as pb
from dart.wire.channel import PROTOCOL_VERSION

LOOK_SECONDS = 60.0
SILENT_SECONDS = 1200.0
"""After this long without a finished group or an update, and `WATCHDOG_FACTOR` times the duration of the slowest
trajectory or update of late, the watchdog must have reported a stall."""
WATCHDOG_FACTOR = 2.0
RESUMED_SECONDS = 3600.0
"""The last process must make its update within this time."""

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
    decisions: str = ""
    """A digest of every event that the run recorded."""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cluster:
    environments: int = 40
    replicas: int = 4
    tasks: int = 40


_FAILING = {
    Fault.REPLICA_FAILS: ("rollout", pb.FAILURE_CODE_ENGINE),
    Fault.ENVIRONMENTS_FAIL: ("env", pb.FAILURE_CODE_ENVIRONMENT),
    Fault.TRAINER_FAILS: ("train", pb.FAILURE_CODE_TRAINER),
}
_HANGING = {Fault.REPLICA_HANGS: "rollout", Fault.ENVIRONMENTS_HANG: "env", Fault.TRAINER_HANGS: "train"}


class _Killed(Exception):
    """The coordinator's process ends here."""


class _Life:
    """One coordinator process, from its start to its death or to the end of the run."""

    def __init__(
        self, outcome: Outcome, cluster: Cluster, folder: Path, began: float, until: float, updates: int | None = None
    ) -> None:
        """`updates`: the run ends in order with this update; None: it goes on until it is killed."""
        self.outcome, self.cluster, self.folder, self.updates = outcome, cluster, folder, updates
        self._began = began
        """When the run began, in virtual seconds."""
        self._events: list[tuple[float, str, str]] = []
        self._progress_at = began
        self.killed_at = until
        self.dead = False

    async def live(self, planned: list[Planned], timings: Timings, resume: bool) -> None:
        """Run until the run is over, or until a fault ends this process. Raises _Killed."""
        directory = RunDirectory(self.folder)
        async with await Database.open(sqlite_url(directory.database), directory.blobs) as database:
            settings = _config(self.cluster, self.outcome.seed, self.updates)
            self._note_stored(database)
            if resume:
                start = await starting_point(database, directory)
                await database.resume_run()
            else:
                start = Start()
                await database.start_run(directory.name, "chaos", {}, started=self._began)
            self.run = Run(settings, directory, database, Train(), start)
            self._listen()
            self.links = Links(self.run.fleet, random.Random(f"links/{self.outcome.seed}/{self.outcome.resumes}"))
            self._workers(settings, timings, start.version)
            await self._with_faults(planned)

    def _note_stored(self, database: Database) -> None:
        store = database.add_trajectory

        async def stored(trajectory: Trajectory, attempt: int = 1) -> None:
            await store(trajectory, attempt)
            if not self.dead:
                self.outcome.stored.add(trajectory.id)

        database.add_trajectory = stored  # type: ignore[method-assign]

    def _workers(self, settings: config.Config, timings: Timings, version: int) -> None:
        names, seed = list(settings.environment.tasks.names), self.outcome.seed
        SimulatedTrainer(self.links, timings, version).checkpoints = True
        for number in range(self.cluster.replicas):
            SimulatedReplica(self.links, f"rollout-{number}", timings, seed, version)
        for number in range(self.cluster.environments // SLOTS_PER_WORKER):
            SimulatedEnvs(self.links, f"env-{number}", SLOTS_PER_WORKER, timings, names, seed)

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
            record(kind, **fields)

        self.run.journal.event = event  # type: ignore[method-assign]

    async def _with_faults(self, planned: list[Planned]) -> None:
        async def work() -> None:
            try:
                async with asyncio.timeout(None if self.updates is None else RESUMED_SECONDS):
                    await self.run.work()
            except TrainerLost:
                raise _Killed from None
            except UserError as error:
                self.outcome.wrong.append(f"the run ended: {error}")
            except TimeoutError:
                self.outcome.wrong.append("no update within an hour of the last resume")
            except Exception as error:  # noqa: BLE001 - whatever it is, it should not happen
                self.outcome.wrong.append(f"the run broke: {error!r}")

        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._happen(one)) for one in planned]
                beside.append(tasks.create_task(self._look()))
                await work()
                for task in beside:
                    task.cancel()
        except* _Killed:
            raise _Killed from None
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
            self.run.replicas.validate()
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
        if planned.fault in ENDS_THE_PROCESS:
            self.outcome.open.append((planned.fault, loop.time()))
            self._end(planned.fault)
        else:
            await self._do(planned)
            self.outcome.open.append((planned.fault, loop.time()))

    def _link(self, planned: Planned, *roles: str) -> Link:
        names = [name for name in sorted(self.links.of) if name.split("-")[0] in roles]
        return self.links.of[names[int(planned.draw * len(names))]]

    async def _do(self, planned: Planned) -> None:
        fault, seconds = planned.fault, planned.seconds
        if fault in _FAILING:
            role, code = _FAILING[fault]
            await self._failing(self._link(planned, role), code, seconds or 30.0)
        elif fault in _HANGING:
            await self._hanging(self._link(planned, _HANGING[fault]), seconds)
        elif fault in (Fault.DUPLICATES, Fault.LATE):
            await self._disturbed(self._link(planned, "env", "rollout", "train"), fault, seconds)
        else:
            await self._other(planned)

    async def _other(self, planned: Planned) -> None:
        match planned.fault:
            case Fault.STREAM_CUT:
                self._link(planned, "env", "rollout", "train").cut(planned.seconds)
            case Fault.STREAM_LOST:
                self._link(planned, "env", "rollout").cut(planned.seconds)
            case Fault.WORKER_KILLED:
                self._link(planned, "env", "rollout").die(planned.seconds, f"again-{planned.at:.3f}")
            case Fault.GARBAGE:
                self._link(planned, "env", "rollout").trouble.garbled = garbled
            case Fault.TWIN:
                self._twin(self._link(planned, "env", "rollout", "train"))
            case Fault.SLOW_DISK:
                await self._slow(planned.seconds)
            case _:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, virtual_time.VirtualLoop)
                loop.stand_still(planned.seconds)

    async def _disturbed(self, link: Link, fault: Fault, seconds: float) -> None:
        name = "late" if fault is Fault.LATE else "duplicated"
        setattr(link.trouble, name, 0.5)
        await asyncio.sleep(seconds)
        setattr(link.trouble, name, 0.0)

    async def _failing(self, link: Link, code: pb.FailureCode, seconds: float) -> None:
        link.trouble.failing = code
        await asyncio.sleep(seconds)
        link.trouble.failing = pb.FAILURE_CODE_UNSPECIFIED

    async def _hanging(self, link: Link, seconds: float) -> None:
        link.trouble.hung = True
        await asyncio.sleep(seconds)
        link.go_on()

    async def _slow(self, seconds: float) -> None:
        """Make each transaction take seconds."""
        database, chance = self.run.database, random.Random(self.outcome.seed)
        write = database.write

        async def late(work: object) -> object:
            await asyncio.sleep(chance.uniform(0.1, 3.0))
            return await write(work)  # type: ignore[arg-type]

        database.write = late  # type: ignore[method-assign,assignment]
        await asyncio.sleep(seconds)
        database.write = write  # type: ignore[method-assign]

    def _twin(self, link: Link) -> None:
        """A worker with a live one's name must not take its place."""
        if link.worker is None or not link.up or link.worker.state == "lost":
            return
        live = link.worker.hello
        hello = pb.Hello(
            worker_id=live.worker_id, instance_id="a-twin", role=live.role, world_size=1,
            protocol_version=PROTOCOL_VERSION,
        )  # fmt: skip
        if self.run.fleet.rival(hello) is None:
            self.outcome.wrong.append(f"a twin of {live.worker_id} would be admitted")

    def _end(self, fault: Fault) -> None:
        if fault is Fault.TRAINER_KILLED:
            self._link(Planned(fault, 0.0, 0.0, 0.0), "train").die(1e9, "gone")
            return  # the coordinator notices its silence and ends in order, and another one resumes the run
        self.killed_at, self.dead = asyncio.get_running_loop().time(), True
        _copy(self.folder, self.folder.with_name(self.folder.name + "+"))
        raise _Killed


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


async def _one_life(life: _Life, planned: list[Planned], timings: Timings, resume: bool) -> tuple[bool, float]:
    """(whether a fault ended it, when)."""
    try:
        await life.live(planned, timings, resume)
    except _Killed:
        return True, min(life.killed_at, asyncio.get_running_loop().time())
    return False, asyncio.get_running_loop().time()


def chaos(
    seed: int, planned: list[Planned], hours: float, folder: Path, timings: Timings, cluster: Cluster = Cluster()
) -> Outcome:
    """One run of `hours` virtual hours, in as many coordinator processes as it takes."""
    outcome, began, at = Outcome(seed, hours), virtual_time.START, folder / "run"
    now, until = began, began + 3600 * hours
    planned = [*planned, Planned(Fault.COORDINATOR_KILLED, 3600 * hours, 0.0, 0.0)]
    at.mkdir(parents=True)
    witness = Witness(at / "run.db")
    while True:
        calm = now >= until
        life = _Life(outcome, cluster, at, began, until, witness.updates() + 1 if calm else None)
        left = [one for one in planned if began + one.at > now]
        killed, now = virtual_time.run(_one_life(life, left, timings, now > began), now)
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
    outcome.trajectories, outcome.updates = len(witness.trajectories), witness.updates()
    return outcome


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
