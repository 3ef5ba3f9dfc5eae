"""A training run that a test kills: the real coordinator on a real run directory, with workers that take no time.

    killed_run.py DIRECTORY UPDATES

It begins the run or goes on with it until it has made so many updates, and then prints its summary. DART_FAILPOINT
says where it is to fail. What its workers were told is in DIRECTORY/told.jsonl, a line for each, on the disk
before the coordinator hears of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.simulation.timings import EnvTimes, Lengths, ReplicaTimes, SyncTimes, Timings, TrainerTimes
from benchmarks.simulation.workers import SimulatedEnvs, SimulatedReplica, SimulatedTrainer
from dart import config, manifest
from dart.coordinator.run import Run
from dart.coordinator.service import housekeeping
from dart.coordinator.start import Start, starting_point
from dart.coordinator.training import updates
from dart.core.types import Image, Trajectory
from dart.failpoints import VARIABLE
from dart.job import Train
from dart.rundir import Guard, RunDirectory
from dart.screenshots.shared import SharedScreenshots
from dart.store import engine
from dart.store.database import Database
from dart.v1 import session_pb2 as pb
from dart.wire.convert import image_to_proto

ROOT = Path(__file__).parents[3]
HANG_SECONDS = 240
KEEPS_LOG = "keeps-log"
TASKS = ["task-0", "task-1", "task-2"]
TIMINGS = Timings(
    EnvTimes((0.0, 0.002), (0.0, 0.002), (0.0, 0.002), (0.0, 0.001)),
    Lengths(median=3.0, least=2, most=5),
    ReplicaTimes(0.00001, 0.00001, 0.0, (1, 2)),
    TrainerTimes(0.0, 0.02),
    SyncTimes(0.00001, 1.0, 0.001),
    failures_per_step=0.01,
)
PICTURE_BYTES = 2_000


def settings(updates: int, upload: str | None = None) -> config.Config:
    made = config.parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "environment": {"tasks": {"names": TASKS}},
            "rollout": {"replicas": 2},
            "curation": {"rollouts": 4, "step_limit": 6, "max_staleness": 50},
            "trainer": {"trajectories_per_update": 8},
            "evaluation": {"episodes": 0},
            "checkpoint": {"every_updates": 2, "keep": 2, "upload": upload},
            "stop": {"updates": updates},
            "server": {"lost_after_seconds": 1e9},
        }
    )
    # A bound smaller than a config may have, so that screenshots are removed in such a short run.
    small = made.retention.model_copy(update={"screenshot_bytes": 100 * PICTURE_BYTES, "unused_seconds": 0.3})
    return made.model_copy(update={"retention": small})


class Ledger:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, **fields: object) -> None:
        os.write(self._file, (json.dumps(fields) + "\n").encode())


class Envs(SimulatedEnvs):
    """Each screenshot is another one, and is written into the run's directory, if it has one, as real env workers
    do."""

    def __init__(self, run: Run, name: str, seed: int) -> None:
        directory = run.database.blobs.directory
        self._screenshots = SharedScreenshots(directory) if directory else None
        super().__init__(run.fleet, name, 8, TIMINGS, TASKS, seed)

    def answer(self, command: Any, seconds: float, **reply: Any) -> None:
        if observed := reply.get("observed"):
            observed.image.CopyFrom(self._picture())
        super().answer(command, seconds, **reply)

    def send(self, message: pb.SessionRequest, command: Any, seconds: float) -> None:
        if message.HasField("observed"):
            message.observed.image.CopyFrom(self._picture())
        super().send(message, command, seconds)

    def _picture(self) -> Any:
        image = Image.of(os.urandom(PICTURE_BYTES), "image/png", 1920, 1080)
        return image_to_proto(self._screenshots.put(image) if self._screenshots else image)


class Trainer(SimulatedTrainer):
    """Notes which groups each update has, and saves checkpoints as the real one does."""

    def __init__(self, run: Run, version: int, ledger: Ledger) -> None:
        self._ledger, self._groups = ledger, set[str]()
        self._begun: set[tuple[str, int, int]] = set()
        super().__init__(run.fleet, TIMINGS, version)

    def train_batch(self, command: pb.TrainBatch) -> None:
        page = command.assignment.assignment_id, command.assignment.attempt, command.page
        if page in self._begun:  # a reminder of what is under way, which a late answer to something else brings about
            return
        self._begun.add(page)
        self._groups |= {sample.group_id for sample in command.samples}
        if command.page + 1 == command.pages:
            self._ledger.note(trained=command.update, groups=sorted(self._groups))
            self._groups = set()
        super().train_batch(command)

    def save_checkpoint(self, command: pb.SaveCheckpoint) -> None:
        try:
            with manifest.written(Path(command.path)) as folder:
                (folder / "model.safetensors").write_bytes(os.urandom(5_000))
                (folder / "trainer_state.pt").write_text(str(self._version))
        except OSError as error:
            self.answer(command, 0.0, failure=pb.Failure(code=pb.FAILURE_CODE_TRAINER, message=str(error)))
            return
        saved = pb.CheckpointSaved(path=command.path, weight_version=self._version)
        self.answer(command, 0.0, checkpoint_saved=saved)


async def work(directory: RunDirectory, updates: int) -> dict[str, Any]:
    ledger = Ledger(directory.path / "told.jsonl")
    with directory.lock() as hold:
        async with await directory.open_to_work(create=True) as database:
            _note_stored(database, ledger)
            database.wait_at_most(HANG_SECONDS)  # as the command does
            if await database.runs():
                start = await starting_point(database, directory)
                await database.resume_run()
                ledger.note(resumed=start.version)
            else:
                start = Start()
                await database.start_run(directory.name, "killed", {}, started=time.time())
            # Where screenshots are in an object store, checkpoints are copied there, too.
            run = Run(
                settings(updates, directory.place.blobs), directory, database, Train(), start, Guard(directory, hold)
            )
            Trainer(run, start.version, ledger)
            for number in range(2):
                SimulatedReplica(run.fleet, f"rollout-{number}", TIMINGS, 0, start.version)
                Envs(run, f"env-{number}", start.first_event)
            try:
                return await run.work()
            finally:
                await run.journal.flush(database)
                run.journal.close()


def _note_stored(database: Database, ledger: Ledger) -> None:
    """Note each trajectory that the database has confirmed."""
    store = database.add_trajectory

    async def add_trajectory(trajectory: Trajectory, attempt: int = 1) -> None:
        await store(trajectory, attempt)
        ledger.note(stored=trajectory.id)

    database.add_trajectory = add_trajectory  # type: ignore[method-assign]


def told(run: RunDirectory) -> list[dict[str, Any]]:
    """What the run's workers were told, in order."""
    return [json.loads(line) for line in (run.path / "told.jsonl").read_text().splitlines()]


def process(run: RunDirectory, updates: int, failpoint: str = "", *more: str) -> subprocess.CompletedProcess[str]:
    """This script in a process of its own, with the faults of `dart.failpoints`, if any. `more`: KEEPS_LOG, so that
    everything since its start is in SQLite's log alone."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"
    return subprocess.run(
        [sys.executable, __file__, str(run.path), str(updates), *more],
        env={**os.environ, VARIABLE: failpoint, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    if KEEPS_LOG in sys.argv:
        engine._SQLITE_SETTINGS = (*engine._SQLITE_SETTINGS, "PRAGMA wal_autocheckpoint=0")
    housekeeping.SWEEP_SECONDS, housekeeping.SHARD_PAUSE_SECONDS = 0.05, 0.0
    housekeeping.LEAST_AGE_SECONDS = updates.LAST_SAVE_SECONDS = 0.05
    made = asyncio.run(work(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])))
    print(json.dumps({name: made[name] for name in ("updates", "trajectories", "trained", "pooled")}))
