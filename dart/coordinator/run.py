"""A run's life: start → workers → evaluation → training → evaluation → summary, or an interruption at any moment.

`Run` puts the coordinator's parts together and owns the run's phase. `execute` returns the summary; it raises
`Interrupted` when `stop` was set, and UserError when the run cannot go on. Whatever happens, the database says how it
ended, and every worker is told goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from dart.agent.vocabulary import vocabulary_size
from dart.config import Config
from dart.coordinator.ending import Interrupted, saved_in_time
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.roster import Roster
from dart.coordinator.fleet.server import CoordinatorService, Server
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.fleet.welcome import welcome
from dart.coordinator.sampling.collecting import Collection, teacher
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.sampling.demonstrations import Demonstrations
from dart.coordinator.sampling.episodes import sample
from dart.coordinator.sampling.evaluations import Evaluations
from dart.coordinator.service.accounting import Accounting
from dart.coordinator.service.control import ControlService
from dart.coordinator.service.housekeeping import Housekeeping
from dart.coordinator.service.journal import Journal
from dart.coordinator.service.status import Activity, StatusBoard
from dart.coordinator.service.watching import Sampled, Stalled, Watch
from dart.coordinator.start import Start
from dart.coordinator.summary import Summary, about, training_summary, write_json
from dart.coordinator.training.meter import Meter
from dart.coordinator.training.ranks import TrainerLost, TrainerRanks
from dart.coordinator.training.syncing import WeightSync
from dart.coordinator.training.updates import Training
from dart.coordinator.training.uploads import Uploads
from dart.core.curation.orders import Failures
from dart.core.fleet.health import Condition
from dart.core.fleet.replica import Replica
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.core.status import Status
from dart.core.types import Task
from dart.core.usage import EnvState
from dart.errors import MAY_PASS, USER_ERROR, ProcessLost, UserError, first_of, ungrouped
from dart.job import Collect, Evaluate, Job, Train
from dart.rundir import Guard, RunDirectory
from dart.screenshots.stored import StoredScreenshots
from dart.shortage import shortage, spare
from dart.store.database import Database
from dart.store.records import RunState
from dart.v1 import session_pb2 as pb
from dart.wire.role import goodbye
from dart.wire.rules import Limits

GOODBYE_SECONDS = 4.0
ENDING_PATIENCE_SECONDS = 10.0
"""How long to wait, when the run ends, for a database that another program has locked, or a store that is away."""


class Run:
    """One run in one directory."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        database: Database,
        job: Job,
        start: Start,
        guard: Guard | None = None,
        trainer_peak: float | None = None,
    ) -> None:
        """`guard`: protects the directory that this process holds. `trainer_peak`: as the `peak` of `Meter`."""
        self.config, self.directory, self.database = config, directory, database
        self._job, self._start, self._trains = job, start, isinstance(job, Train)
        self.replicas_wanted = job.replicas(config)
        self.fleet = Fleet(config.server.lost_after_seconds, config.server.reply_timeout_seconds)
        screenshots = StoredScreenshots(database.blobs)
        self._shared = screenshots.share() if config.server.share_screenshots else None
        self.fleet.boundary.limits = Limits(start.version, vocabulary_size(config.model.folder))
        self.envs = EnvPool(self.fleet)
        self.replicas: Replicas[Worker] = Replicas(
            time.monotonic(), start.version, config.sync.max_unavailable, together=config.schedule.sync == "all",
            every_updates=config.sync.every_updates, max_staleness=config.curation.max_staleness,
        )  # fmt: skip
        self.policy = RolloutPool(self.fleet, screenshots, self.replicas)
        self.ranks = TrainerRanks(self.fleet, config.trainer.ranks, screenshots)
        self.accounting = Accounting(self.envs, self.policy, self.ranks)
        self.progress = Progress(config.stop.window)
        self.journal = Journal(directory.metrics, start.first_event)
        self.sync = WeightSync(config.sync, self.replicas, self.ranks, database, self.progress, self.journal)
        self._failures = Failures()
        self.data = self._data_source()
        self.replicas.on_change += [self._note_version, self._blame_queue]
        self.replicas.on_condition.append(self._note_condition)
        self._blame_queue()
        self.server = Server(config.server)
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Known once the server listens."""
        self.evaluations = Evaluations(
            config, database, self.envs, self.policy, self.journal, self._failures, start.evaluations
        )
        self.collection: Collection | None = None
        self._training = Training(
            config, start, directory.checkpoints, database, self.progress, self.journal,
            self.envs, self.policy, self.ranks, self.sync, self.data, self.accounting, Meter(config, trainer_peak),
            Uploads(directory.uploads(config), config.checkpoint.keep, self.journal, start.version),
        )  # fmt: skip
        self._watch = self._make_watch()
        self._board = StatusBoard(
            directory.name, config.stop, self.progress, self.accounting, self.fleet, self.envs, self.replicas,
            figures=self._training.figures, activity=self._activity, address=self._known_address, watch=self._watch,
            tasks=self.data.quarantine,
        )  # fmt: skip
        self._guard, self._housekeeping = guard, self._make_housekeeping(guard)
        self._stop, self.hurry = asyncio.Event(), asyncio.Event()
        self._launcher_failed: Exception | None = None
        self._began, self._roster = time.monotonic(), Roster(self.fleet, self.journal)

    def _data_source(self) -> Demonstrations | DataManager:
        config, start = self.config, self._start
        if config.algorithm == "sft":
            return Demonstrations(config, self.progress, self.journal)
        return DataManager(
            config, self.database, self.progress, self.journal, config.environment.kind, start.first_group, self.envs,
            self._failures,
        )  # fmt: skip

    def _make_watch(self) -> Watch:
        config, ranks = self.config, self.config.trainer.ranks if self._trains else 0
        wanted = {"env": min(1, self._job.environments(config)), "rollout": self.replicas_wanted, "train": ranks}
        return Watch(
            config, wanted, self.fleet, self.envs, self.replicas, self.accounting, self.progress, self.journal,
            sampled=self._sampled, status=self.status, health=self.server.serving,
            unstored=lambda: self._housekeeping.unstored if self._housekeeping else (0.0, ""),
        )  # fmt: skip

    def _make_housekeeping(self, guard: Guard | None) -> Housekeeping | None:
        if guard is None:
            return None
        pool = self.config.curation.pool
        return Housekeeping(
            self.config.retention, guard, self.database, self.journal, self.envs.underway,
            pooled=pool.per_task if pool.enabled else 0, checkpoints=self.config.checkpoint.keep, bounded=self._trains,
        )  # fmt: skip

    # ---- levers ----

    def interrupt(self, by_hand: bool = False) -> None:
        """Stop the run cleanly now; it can be resumed. A second time `by_hand`, wait for nothing more."""
        (self.hurry if by_hand and self._stop.is_set() else self._stop).set()

    def _while_training(self, lever: str) -> None:
        """Raises UserError unless the run is in its training phase."""
        if self.progress.phase != "training" or not self._training.taken_up:
            doing = "about to train" if self.progress.phase == "training" else self.progress.phase
            raise UserError(f"the run is {doing}: {lever} works only while it is training")

    def pause(self, paused: bool) -> None:
        """Raises UserError while the run is not training; so do the methods below."""
        self._while_training("pause" if paused else "resume")
        self._training.pause(paused)

    def drain(self) -> None:
        """End the run as if its last update were done."""
        self._while_training("drain")
        self._training.drain()

    async def submit(self, tasks: Sequence[Task]) -> None:
        """Put tasks at the head of the queue, all of them or none. When this returns, they also outlive the process.

        Raises NotWanted.
        """
        self._while_training("tasks")
        self.data.submit(tasks)
        await self.journal.flush(self.database)

    async def checkpoint(self) -> tuple[str, int]:
        """Save the weights now."""
        self._while_training("checkpoint")
        return await self._training.checkpoint()

    def status(self) -> Status:
        return self._board.status()

    def _known_address(self) -> str:
        """Where Control is reached; empty before the server listens."""
        return self.address.result() if self.address.done() and not self.address.cancelled() else ""

    def _sampled(self) -> Sampled:
        evaluated = self.evaluations.finished_episodes
        collected = self.collection.finished_attempts if self.collection else 0
        beside = self.evaluations.current is not None or self.collection is not None
        return Sampled(beside or self._training.sampling, evaluated + collected, self.progress.paused)

    def _activity(self) -> Activity:
        if self.progress.phase == "starting":
            ready = f"{self.envs.slots} environments, {len(self.replicas)} of {self.replicas_wanted} replicas"
            if self._trains:
                ready += f", {len(self.ranks)} of {self.config.trainer.ranks} trainer ranks"
            return Activity(f"{ready} are ready")
        if (evaluation := self.evaluations.current) is not None:
            finished, total = evaluation.ended, evaluation.total
            return Activity(f"{finished}/{total} episodes", finished / max(total, 1))
        return Activity(str(self.collection)) if self.collection is not None else Activity()

    # ---- life ----

    async def execute(self, launch: Coroutine[Any, Any, None] | None = None) -> Summary:
        """Run to the end and return the summary. `launch`: starts local workers and watches them, until cancelled."""
        service = ControlService(self, self.journal, self.database)
        sessions = CoordinatorService(self.fleet, self.config.server, self.directory.name, self._welcome)
        try:
            try:
                await self.server.start(sessions, service)
                self.address.set_result(self.server.address)
                await self.database.set_control_address(self.server.address)
            except UserError as error:
                await self._failed(error)
                raise
            return await self._beside(launch) if launch else await self.work()
        finally:
            if launch:
                launch.close()  # Python warns of one that was never started
            self.address.cancel()
            try:
                await self.server.stop()
            finally:  # what a worker says until then is still an event
                with contextlib.suppress(UserError, OSError):  # a full disk has been reported already
                    await self.journal.flush(self.database)
                    self.journal.close()

    async def _beside(self, launch: Coroutine[Any, Any, None]) -> Summary:
        """The run with its launcher, which ends after the run has sent the workers Bye."""
        try:
            with ungrouped(Interrupted, UserError):
                async with asyncio.TaskGroup() as tasks:
                    launching = tasks.create_task(self._launched(launch))
                    summary = await self.work()
                    launching.cancel()
        except ProcessLost as error:
            if self._stop.is_set():  # before or after that, so that nobody wants new processes
                raise Interrupted from error
            raise
        return summary

    async def _launched(self, launch: Coroutine[Any, Any, None]) -> None:
        try:
            await launch
        except Exception as error:
            self.launcher_failed(error)
            raise

    def launcher_failed(self, error: Exception) -> None:
        """This is why the run ends: the work sees only that workers leave, or that it is cancelled."""
        self._launcher_failed = error

    async def work(self) -> Summary:
        """The phases and, however they end, the last journal entries and Byes. It needs no listening server."""
        try:
            summary = await self._with_background()
        except Interrupted:
            await self._end(RunState.INTERRUPTED, save=True)
            raise
        except (Exception, asyncio.CancelledError) as error:
            await self._failed(self._launcher_failed or error)
            if self._launcher_failed and isinstance(error, Exception):
                raise self._launcher_failed from error
            raise
        await self._goodbye()
        return summary

    async def _with_background(self) -> Summary:
        work = [self.fleet.reap(), self.journal.write_events(self.database), self.sync.run(), self._watch.run()]
        work += [self._watch_stop(), *([self._watch_trainer()] if self._trains else [])]
        if self._housekeeping:
            work.append(self._housekeeping.run())
        try:
            with ungrouped(Interrupted, UserError, OSError):
                async with asyncio.TaskGroup() as tasks:
                    background = [tasks.create_task(each) for each in work]
                    summary = await self._phases()
                    for task in background:
                        task.cancel()
                await self._finish(summary)
        except Exception as error:
            if self._guard is not None:
                self._guard.look()  # a database that was removed fails in many ways: say what happened
            short = shortage(first_of(error))
            if short or isinstance(error, OSError):
                raise UserError(
                    f"the run cannot continue: {short or error}: all finished work is kept; fix it, then continue with "
                    "--resume",
                    exit_code=MAY_PASS if short else USER_ERROR,
                ) from error
            raise
        return summary

    async def _finish(self, summary: Mapping[str, object]) -> None:
        self._phase("finished")
        await self.database.finish_run(summary, time.time())
        if self._trains:  # the file says that nothing is left to do, so it comes last
            write_json(self.directory.summary, summary)

    async def _phases(self) -> Summary:
        await self._workers_ready()
        match self._job:
            case Collect():
                return self._common() | {"collected": await self._collected(self._job)}
            case Evaluate(endpoint, trained):
                self._phase("evaluating")
                source = await self.evaluations.alone(endpoint)
                policy, tasks = str(endpoint) if endpoint else None, self.config.environment.tasks
                seen = list(tasks.not_held_out_from(trained or tasks.training))
                document = source.document(self.directory.name, policy, seen)
                write_json(self.directory.evaluation, document)
                return self._common() | {"evaluation": document["success"], "evaluated_on_training_tasks": seen}
            case Train():
                return await self._trained()

    async def _trained(self) -> Summary:
        episodes = self.config.evaluation.episodes
        if episodes and self.config.evaluation.before and not self._start.update:
            await self._evaluate("before")
        if not self.ranks.are_complete:
            self._phase("starting")
        await self.ranks.complete()
        self._phase("training")
        await self._training.run()
        if episodes:
            await self.sync.settle_or_exclude()
            await self._evaluate("after")
        return self._summary()

    async def _workers_ready(self) -> None:
        """Wait for the replicas and at least one environment that the job needs; the trainer may still be loading."""
        self._phase("starting", begins=True)  # this process of the run
        if self._trains:
            await self._training.restore()
        none, patience = not self._job.environments(self.config), self.config.rollout.wait_for_all_seconds
        await self._roster.gather(lambda: none or bool(self.envs.slots), self.replicas, self.replicas_wanted, patience)

    async def _evaluate(self, label: str) -> None:
        self._phase("evaluating")
        await self.evaluations.trained(label, self.progress.counts.version)

    async def _collected(self, collect: Collect) -> Summary:
        self._phase("collecting")
        source = self.collection = Collection(collect, self.config, self.database, self.envs, self._failures)
        async with teacher(collect, self.policy, self.config) as writer:
            await sample(source, self.envs, self.policy, self.config, writer)
        result = await source.close()
        self.collection = None
        self.journal.event("collected", **result)
        return result

    def _blame_queue(self) -> None:
        """Record why no replica has capacity: all are full, one is in quarantine, or one takes weights."""
        cause = "the replicas are full"
        if any(replica.health.condition is not Condition.HEALTHY for replica in self.replicas):
            cause = "a replica is in quarantine"
        if not all(replica.serving for replica in self.replicas):
            cause = "a replica takes new weights"
        self.envs.usage.blame(EnvState.QUEUED, cause, time.monotonic())

    def _note_condition(self, replica: Replica[Worker]) -> None:
        """It is quarantined, probed or trusted again."""
        health = replica.health
        self.journal.event(
            "replica_health", replica=replica.name, state=str(health.condition), failures=health.failures,
            why=health.last_failure,
        )  # fmt: skip

    def _note_version(self) -> None:
        """No worker has a newer version than the one that the trainer has staged last."""
        self.fleet.boundary.limits.version = self.replicas.newest

    def _welcome(self, hello: pb.Hello) -> str:
        return welcome(self.config, self._start, hello, self._job, self._shared)

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        raise Interrupted

    async def _watch_trainer(self) -> None:
        await self.ranks.lost.wait()
        raise TrainerLost("the trainer is gone: look at logs/train*.log in the run directory")

    async def _goodbye(self) -> None:
        """Tell every worker to end, and wait up to GOODBYE_SECONDS until all have."""
        self.fleet.say_goodbye(goodbye(self.progress.phase))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                for worker in list(self.fleet.workers.values()):
                    await worker.lost.wait()

    async def _failed(self, error: BaseException) -> None:
        first = first_of(error)
        why = str(first)
        if not isinstance(first, UserError | asyncio.CancelledError):
            why = shortage(first) or f"{type(first).__name__}: {first}"
        with contextlib.suppress(OSError):
            if isinstance(first, ProcessLost):
                self._training.lost(first.why)
            self.journal.event("failed", why=why)
        await self._end(RunState.FAILED, save=isinstance(first, Stalled) and self.ranks.idle)

    async def _end(self, state: RunState, *, save: bool) -> None:
        """Record the end and say goodbye, whatever happens to the last checkpoint."""
        was = self.progress.phase
        with contextlib.suppress(OSError):  # the rest has to be done even when the disk is full
            self._phase(state.value)
        spare.release()
        self.database.wait_at_most(ENDING_PATIENCE_SECONDS)
        try:
            if save and was == "training":
                await self._save_last()
        finally:  # the launcher may fail meanwhile, which cancels this
            self._training.give_up()
            with contextlib.suppress(UserError):
                await self.database.set_run_state(state, time.time())
            await self._goodbye()

    async def _save_last(self) -> None:
        seconds = self.config.checkpoint.interrupt_seconds
        if why := await saved_in_time(self._training.save(), self.fleet.reap(), self.hurry, seconds):
            with contextlib.suppress(OSError):
                self.journal.event("checkpoint_failed", version=self.progress.counts.version, why=why)

    def _phase(self, phase: str, **more: bool) -> None:
        self.progress.phase_changed(phase)
        self.journal.event("phase", phase=phase, **more)

    def _common(self) -> Summary:
        return about(self.directory.name, self.config, self._roster.versions)

    def _summary(self) -> Summary:
        figures, times = self._training.figures(), self._training.times
        assert times is not None, "the training phase has ended"
        return {
            **self._common(),
            "success_before": self.evaluations.results.get("before"),
            "success_after": self.evaluations.results.get("after"),
            "evaluated_on_training_tasks": list(self.config.environment.tasks.not_held_out),
            **training_summary(figures, times),
            "wall_seconds": round(time.monotonic() - self._began, 2),
        }
