"""The training phase: sampling and updates run side by side until a stop condition holds or a drain is requested.

Sampling never waits for the trainer, nor updates for sampling to end or for checkpoints to be written, unless
`schedule.training` says so; what couples them is the data manager's budget and its batches. `Training` owns the count
of updates, the time spent and the checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from dart import manifest
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.sampling.demonstrations import Demonstrations
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.service.accounting import Accounting, Times
from dart.coordinator.service.journal import Journal
from dart.coordinator.start import Start, go_back
from dart.coordinator.training.meter import Meter
from dart.coordinator.training.ranks import NotSaved, TrainerLost, TrainerRanks, UnusableGroup, UpdateRefused, timed
from dart.coordinator.training.syncing import WeightSync
from dart.coordinator.training.uploads import Uploads
from dart.core.curation.batches import ReleasedGroup, samples_of
from dart.core.progress import Progress
from dart.core.status import Figures, Usage
from dart.errors import UserError, ungrouped
from dart.failpoints import failpoint
from dart.store.database import Database
from dart.store.patience import patiently
from dart.store.records import CheckpointRecord
from dart.v1 import session_pb2 as pb
from dart.wire.convert import entropies_from_proto

T = TypeVar("T")
log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""The time between two checks of the stop conditions while no batch is complete."""
STARVED_SECONDS = 60.0
LAST_SAVES, LAST_SAVE_SECONDS = 10, 60.0
"""How often the last checkpoint is tried, and the time between two tries."""
TURN_SECONDS = 0.01
MOST_REMARKS = 20
"""The most remarks of the trainer that are recorded for one update."""
STILL_SAVING = "the one before is still being saved: look at the trainer's log and at its disk"
SKIPPED = "no gradient of its update was finite, so the trainer skipped it"


class Training:
    def __init__(
        self,
        config: Config,
        start: Start,
        checkpoints: Path,
        database: Database,
        progress: Progress,
        journal: Journal,
        envs: EnvPool,
        policy: RolloutPool,
        ranks: TrainerRanks,
        sync: WeightSync,
        data: DataManager | Demonstrations,
        accounting: Accounting,
        meter: Meter,
        uploads: Uploads,
    ) -> None:
        self._config, self._start, self._checkpoints = config, start, checkpoints
        self._database, self._progress, self._journal = database, progress, journal
        self._envs, self._policy, self._ranks, self._sync, self._data = envs, policy, ranks, sync, data
        self._accounting, self._meter, self._uploads = accounting, meter, uploads
        self._drained = False
        self.sampling = False
        """Roll-outs are wanted."""
        self._in_flight: list[ReleasedGroup] | None = None
        """The batch that is being trained on."""
        self._recording: asyncio.Task[None] | None = None
        """The task that records the last update."""
        self._interrupted = False
        """Nobody waits for the update in progress any more, which the trainer may finish all the same."""
        self._last_update: dict[str, float] = {}
        every = config.checkpoint.every_updates
        self._next_save, self._late_save = (start.update // every + 1) * every, 0
        self._saved: int | None = None
        """The version of the newest checkpoint of this process."""
        self._abandoned: set[str] = set()
        """Checkpoints newer than the one that this process resumed from, which stay for people to look at."""
        self._saving = asyncio.Lock()
        """One checkpoint at a time: the trainer writes them one after the other."""
        self._writing: set[asyncio.Task[Any]] = set()
        """Saves, which go on when whoever waits for them is cancelled, because the trainer does; and copies."""
        self.taken_up = False
        """What earlier processes left is read, and Control may change it."""
        self._seconds = 0.0
        self._since: float | None = None
        self.usage: Usage | None = None
        """Over the whole phase; None until it has ended. The same holds for `times`."""
        self.times: Times | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent in this phase, including earlier processes of the run."""
        return self._seconds + (time.monotonic() - self._since if self._since is not None else 0.0)

    def drain(self) -> None:
        """End the phase once the update in progress, if any, is finished."""
        self._drained = True

    async def run(self) -> None:
        """Run the phase to its end, then save the weights. Raises TrainerLost."""
        await self._take_up()
        now = time.monotonic()
        self._accounting.restart(now)
        self._since = now
        try:
            await self._sample_and_update()
        finally:
            await self._data.close()
        if self._progress.counts.updates > self._start.update and self._saved != self._progress.counts.version:
            await self._save_at_last()
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def _sample_and_update(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            sampling = None
            if isinstance(self._data, DataManager):
                sampling = tasks.create_task(sample(self._data, self._envs, self._policy, self._config))
            self.sampling = sampling is not None
            await self._updates(tasks)
            self.sampling = False
            if sampling is not None:
                sampling.cancel()
            self._account()  # before a checkpoint is written to the end, and copied, while everybody else is idle

    def _account(self) -> None:
        """The phase is over."""
        now = time.monotonic()
        self.usage = self._accounting.usage(self._progress.counts, self.seconds, now)
        self.times = self._accounting.times(now)
        self._seconds = self.seconds
        self._since = None

    def give_up(self) -> None:
        """Nobody waits any more for the last update and checkpoints to be recorded, or for copies."""
        for task in (self._recording, *self._writing):
            if task is not None:
                task.cancel()

    def pause(self, paused: bool) -> None:
        """Let no further roll-out begin, or let them again."""
        self._progress.paused = paused
        self._data.pause(paused)
        self._journal.event("paused" if paused else "resumed")

    async def save(self) -> tuple[str, int]:
        """Save the current weights: (folder, version). If the caller is cancelled, they are saved all the same.

        Raises TrainerLost, NotSaved.
        """
        return await asyncio.shield(self._begun(self._save_alone()))

    async def _save_alone(self) -> tuple[str, int]:
        async with self._saving:
            return await self._save()

    def _begun(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a checkpoint was not saved or copied: %s", error)  # also where nobody waited for it

    async def checkpoint(self) -> tuple[str, int]:
        """As `save`, for somebody who asks for it: it is then copied elsewhere, too, if that is wanted."""
        path, version = await self.save()
        self._begun(self._copy(path))
        return path, version

    async def _copy(self, path: str) -> None:
        await self._uploads.copy(self._checkpoints / Path(path).name)
        async with self._saving:
            await self._remove_old()  # those that stayed because they were being copied

    async def _save_and_copy(self) -> None:
        """Save the current weights, and copy them elsewhere if that is wanted. Raises TrainerLost, NotSaved."""
        await self._copy((await self.save())[0])

    async def _save_at_last(self) -> None:
        """The weights at the end, which are lost with the trainer: a disk that is full has some time to be emptied.

        Raises TrainerLost, NotSaved.
        """
        for _ in range(LAST_SAVES - 1):
            try:
                return await self._save_and_copy()
            except NotSaved as error:
                if not error.may_pass:
                    raise
                self._not_saved(error)
                await asyncio.sleep(LAST_SAVE_SECONDS)
        await self._save_and_copy()

    def _not_saved(self, error: NotSaved) -> None:
        self._journal.event("checkpoint_failed", version=self._progress.counts.version, why=str(error))
        log.warning("%s", error)

    async def _save(self) -> tuple[str, int]:
        await self._recorded()
        # A save waits for the update in progress, and includes it; those that follow do not wait for the save.
        now = self._progress.counts.version
        path = self._checkpoints / f"v{now + (self._in_flight is not None):06d}"
        if self._saved == now and self._in_flight is None:
            return str(path), now
        success = self._progress.success_rate
        saved = await self._ranks.save(path.resolve(), now)
        failpoint("checkpoint-saved")
        version = saved.weight_version
        while self._in_flight and not self._interrupted and version > self._progress.counts.version:  # noqa: ASYNC110
            await asyncio.sleep(TURN_SECONDS)  # the answer to that update is here, and is about to be taken up
        if self._interrupted and self._in_flight and saved.weight_version > self._progress.counts.version:
            # The trainer finished the interrupted update before it saved. Its batch is marked as trained on before a
            # resumed run can find the checkpoint; one that does not find it releases the batch again.
            await self._updated(self._in_flight, saved.weight_version, {})
        await self._recorded()
        record = CheckpointRecord(str(path), saved.weight_version, time.time(), success)
        await self._database.add_checkpoint(record)
        failpoint("checkpoint-recorded")
        self._saved = saved.weight_version
        self._journal.event("checkpoint", path=str(path), version=saved.weight_version)
        await self._remove_old()
        return str(path), saved.weight_version

    async def _recorded(self) -> None:
        """Wait until the last update is recorded: a run that is resumed from a checkpoint which knows a batch would
        train on it again if the database did not know it."""
        if self._recording is not None:
            await asyncio.shield(self._recording)

    async def _remove_old(self) -> None:
        """Remove the checkpoints beyond `checkpoint.keep`, but for those that somebody reads, or is about to; and older
        folders that no process has recorded."""
        loaded = self._start.checkpoint and self._start.checkpoint.name  # by replicas that restart
        kept = await self._database.checkpoints()
        for old in kept[self._config.checkpoint.keep :]:
            if (name := Path(old.path).name) == loaded or self._uploads.needs(name):
                continue
            await self._database.drop_checkpoint(old.path)
            failpoint("checkpoint-dropped")
            await self._remove(name)
        # Of a save that was given up too early, or of a process that was killed before it recorded or removed one.
        recorded = {Path(one.path).name for one in kept} | {loaded} | self._abandoned
        for folder in sorted(self._checkpoints.glob("v??????")):
            if folder.name not in recorded and folder.name < f"v{self._saved or 0:06d}":
                await self._remove(folder.name)

    async def _remove(self, name: str) -> None:
        await patiently(lambda: asyncio.to_thread(manifest.remove, self._checkpoints / name), self._database.patience)

    async def restore(self) -> None:
        """Load the counters of the earlier process that this one resumes, before anybody asks for them."""
        self._progress.resumed(self._start.update, self._start.version)
        if isinstance(self._data, Demonstrations):  # it makes no groups: the database has nothing of what it trained on
            self._progress.restore_imitation(self._start.counts)
            self._seconds = self._start.train_seconds
        elif self._start.first_group > 1 or self._start.counts is not None:
            recent = await self._database.recent_outcomes(self._progress.window)
            self._progress.restore(await self._database.totals(), self._start.counts, recent)
            self._seconds = self._start.train_seconds

    async def _take_up(self) -> None:
        """Load statistics and groups of the earlier process that this one resumes."""
        # Not before: a run that fails until its trainer has loaded a checkpoint may still be resumed from a newer one.
        self._abandoned, again = await go_back(self._start, self._database, self._journal)
        if again:
            self._progress.restore(await self._database.totals(), self._start.counts)
        await self._remove_old()  # a lower checkpoint.keep makes room before the next save needs it
        await self._data.prepare()
        if await self._was_paused():
            self.pause(True)
        self.taken_up = True

    async def _was_paused(self) -> bool:
        """Whether somebody paused the run, and nobody has resumed it since."""
        paused, resumed = [await self._database.newest_events(kind) for kind in ("paused", "resumed")]
        return bool(paused) and (not resumed or paused[0].sequence > resumed[0].sequence)

    async def _updates(self, tasks: asyncio.TaskGroup) -> None:
        while not self._done() and (batch := await self._next_batch()):
            number, begun = self._progress.counts.updates + 1, time.monotonic()
            if (trained := await self._train(number, batch)) is None:
                continue
            for remark in trained.remarks[:MOST_REMARKS]:
                self._journal.event("trainer_remark", update=number, why=remark)
            await self._updated(batch, trained.weight_version, timed(trained, begun))
            self._sync.staged(trained.weight_version, trained.tensors)
            if trained.step_entropies:
                seen = entropies_from_proto(trained.step_entropies, samples_of(batch))
                await self._database.add_entropies(number, seen)
            if self._config.schedule.training == "synchronous" and isinstance(self._data, DataManager):
                await self._settled()
                self._data.update_over()
            if number >= self._next_save + self._config.checkpoint.every_updates and self._saving.locked():
                if self._late_save != self._next_save:  # told once: it is made as soon as that one has ended
                    self._late_save = self._next_save
                    self._journal.event("checkpoint_failed", version=trained.weight_version, why=STILL_SAVING)
            elif number >= self._next_save and not self._saving.locked():
                tasks.create_task(self._save_or_later(number))
                await asyncio.sleep(0)  # it asks the trainer before the next update does

    async def _train(self, number: int, batch: list[ReleasedGroup]) -> pb.Trained | None:
        """The trainer's reply; None if it refused groups of the batch, which are then dropped, and made no update.

        Raises TrainerLost.
        """
        self._in_flight = batch
        try:
            return await self._ranks.update(number, batch)
        except UnusableGroup as error:
            culprits, why = [error.group], str(error)
        except UpdateRefused as error:
            culprits, why = batch, str(error)
        except (TrainerLost, asyncio.CancelledError):
            self._interrupted = True
            raise
        self._in_flight = None
        await self._data.unusable(culprits, why)
        return None

    def lost(self, why: str) -> None:
        """The trainer is lost, or hangs. Records the batch that it has, if it has one, as a suspect."""
        if self._in_flight is not None:
            self._data.trainer_lost(self._in_flight, why)

    async def _save_or_later(self, number: int) -> None:
        """Save a checkpoint. The run goes on without one that cannot be written, and tries again after the next update.
        One that is not seen here takes up space elsewhere: the next try is when the next one is due."""
        every = self._config.checkpoint.every_updates
        again, self._next_save = number + 1, (number // every + 1) * every
        try:
            await self._save_and_copy()
        except NotSaved as error:
            self._not_saved(error)
            self._next_save = again if error.may_pass else self._next_save

    async def _settled(self) -> None:
        """Wait until every replica that can be sent the newest weights has them, or the phase is over."""
        while not self._done():
            try:
                with ungrouped(UserError):
                    async with asyncio.TaskGroup() as tasks:
                        waiting = tasks.create_task(self._sync.wait_or_exclude())
                        while not waiting.done() and not self._done():
                            await asyncio.wait({waiting}, timeout=LOOK_SECONDS)
                        waiting.cancel()
                return
            except UserError as error:  # no replica took them: the watchdog tells it, and it is tried again
                log.warning("%s", error)

    async def _next_batch(self) -> list[ReleasedGroup] | None:
        """The next batch; None when the phase ends before there is one, because every group may be dropped."""
        told = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self._data.next_batch(self._progress.counts.version))
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=LOOK_SECONDS)
                if not waiting.done() and self._done():
                    waiting.cancel()
                    break
                if not waiting.done() and time.monotonic() - told > STARVED_SECONDS:
                    told = time.monotonic()
                    self._journal.event(
                        "starved", reason="no batch is complete", fates=dict(self._progress.counts.fates)
                    )
        return None if waiting.cancelled() else waiting.result()

    async def _updated(self, batch: list[ReleasedGroup], made: int, metrics: dict[str, float]) -> None:
        """The next update has trained on the batch and made version `made`. If the caller is cancelled, it is recorded
        all the same."""
        self._in_flight = None
        self._recording = asyncio.create_task(self._record(batch, made, metrics))
        await asyncio.shield(self._recording)

    async def _record(self, batch: list[ReleasedGroup], made: int, metrics: dict[str, float]) -> None:
        before = self._progress.counts.version
        metrics = metrics | self._meter.measured(batch, metrics)
        self._progress.version_made(made, metrics.get("round_trip_seconds"), metrics)
        self._last_update, update = metrics, self._progress.counts.updates
        failpoint("batch-trained")
        if metrics.get("steps_taken") == 0:
            await self._data.skipped(batch, SKIPPED)
        else:
            await self._data.consumed(batch, update, before)
        failpoint("batch-consumed")
        await self._database.add_version(made, update, metrics, time.time())
        self._log_update(batch)

    def _done(self) -> bool:
        stop, progress, counts = self._config.stop, self._progress, self._progress.counts
        success = progress.success_rate if progress.window_full else None
        if (
            self._drained
            or (stop.updates and counts.updates >= stop.updates)
            or (stop.train_seconds and self.seconds >= stop.train_seconds)
        ):
            return True
        if self._repeats:
            return False
        return bool(
            (stop.env_steps and counts.env_steps >= stop.env_steps)
            or (stop.success_rate and success is not None and success >= stop.success_rate)
        )

    @property
    def _repeats(self) -> bool:
        """Whether an update is due that an earlier process had made and not saved: it is made again before the run may
        be stopped by steps or success, or it would end with the weights of an old checkpoint."""
        made = self._start.counts.updates if self._start.counts else 0
        due = self._config.trainer.trajectories_per_update
        return (
            self._progress.counts.updates < made
            and isinstance(self._data, DataManager)
            and self._data.waiting_trajectories >= due
        )

    def figures(self) -> Figures:
        """The run in numbers, as of now; once the phase has ended, usage is as of its end."""
        progress, seconds = self._progress, self.seconds
        usage = self.usage or self._accounting.usage(progress.counts, seconds, time.monotonic())
        return Figures(progress.counts, usage, progress.success_rate, progress.success_by_task, seconds)

    def _log_update(self, batch: list[ReleasedGroup]) -> None:
        self._journal.event(
            "update",
            **self.figures().to_json(),
            batch_groups=len(batch),
            replica_versions=self._policy.replicas.versions,
            waiting_groups=self._data.waiting_groups,
            trainer=self._last_update,
            env_seconds=dict(self._accounting.times(time.monotonic()).env.seconds),
        )
