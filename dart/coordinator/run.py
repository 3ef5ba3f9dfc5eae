"""A run's life: start → workers → evaluation → training → evaluation → summary, or an interruption at any moment.

`Run` puts the coordinator's parts together and owns the run's phase. `execute` returns the summary; it raises
`Interrupted` when `stop` was set, and UserError when the run cannot go on. Whatever happens, the database says how it
ended, and every worker is told goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dart.config import Config, EnvWorkerConfig, RolloutWorkerConfig, TrainWorkerConfig
from dart.coordinator.collecting import CAPABILITIES, Collect, Collection, teacher
from dart.coordinator.control import ControlService, worker_statuses
from dart.coordinator.data import DataManager
from dart.coordinator.episodes import EpisodeSource, sample
from dart.coordinator.evaluation import Evaluation
from dart.coordinator.metrics import Metrics
from dart.coordinator.pools import EnvPool, RolloutPool
from dart.coordinator.server import ROLE_NAMES, CoordinatorService, Rejected, Server
from dart.coordinator.sessions import Fleet
from dart.coordinator.summary import machine, software, write_json, write_summary
from dart.coordinator.syncing import WeightSync
from dart.coordinator.training import TrainerLost, TrainerRanks, timed
from dart.core.feed import ReleasedGroup
from dart.core.types import Task
from dart.errors import UserError
from dart.store.database import Database
from dart.store.records import CheckpointRecord, RunState
from dart.v1 import control_pb2 as cpb
from dart.v1 import session_pb2 as pb
from dart.wire.channel import read_token

GOODBYE_SECONDS = 4.0
INTERRUPT_CHECKPOINT_SECONDS = 3.0


class Interrupted(Exception):
    """The run was stopped from outside; it can be resumed."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from: weights, version and counters of an earlier process, or nothing."""

    checkpoint: Path | None = None
    version: int = 0
    update: int = 0
    totals: dict[str, Any] | None = None
    first_group: int = 1
    first_event: int = 1


class Run:
    """One run in one directory. `training` False: an evaluation of `config.model` alone, or what `collect` says."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        database: Database,
        *,
        training: bool,
        start: Start,
        collect: Collect | None = None,
    ) -> None:
        self.config, self.directory, self.database = config, directory, database
        self._training = training
        self._collect = collect
        self._start = start
        self.fleet = Fleet(config.server.lost_after_seconds)
        self.envs = EnvPool(self.fleet)
        self.policy = RolloutPool(self.fleet)
        self.ranks = TrainerRanks(self.fleet, config.trainer.ranks)
        self.metrics = Metrics(directory / "metrics.jsonl", config.stop.window, start.first_event)
        self.sync = WeightSync(config.sync, self.fleet, self.policy, self.ranks, database, self.metrics, start.version)
        self.data = DataManager(config, database, self.metrics, config.environment.kind, start.first_group)
        self.server = Server(config.server)
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Known once the server listens."""
        self.evaluations: dict[str, dict[str, Any]] = {}
        self.evaluation: Evaluation | None = None
        """The one that is under way."""
        self.collection: Collection | None = None
        """Likewise."""
        self.last_update: dict[str, float] = {}
        self._in_flight: list[ReleasedGroup] | None = None
        """The batch that is being trained on."""
        self._stop = asyncio.Event()
        self._drain = asyncio.Event()
        self._fleet_changed = asyncio.Event()
        self._began = time.monotonic()
        self._trained_seconds = 0.0
        self._training_since: float | None = None
        self._tensors_versions: dict[str, str] = {}
        self.fleet.on_ready.append(self._note_worker)
        self.fleet.on_lost.append(self._note_worker)

    # ---- levers ----

    def interrupt(self) -> None:
        """End the run now, in order; it can be resumed."""
        self._stop.set()

    def pause(self, paused: bool) -> None:
        self.data.pause(paused)
        self.metrics.event("paused" if paused else "resumed")

    def drain(self) -> None:
        """End as after the last update."""
        self._drain.set()

    def submit(self, task: Task) -> None:
        self.data.submit(task)

    async def checkpoint(self) -> tuple[str, int]:
        """Save the weights now. Raises UserError while there is no trainer."""
        if self.metrics.phase != "training":
            raise UserError(f"the run is {self.metrics.phase}: a checkpoint can be made while it trains")
        return await self._save()

    @property
    def train_seconds(self) -> float:
        live = time.monotonic() - self._training_since if self._training_since is not None else 0.0
        return self._trained_seconds + live

    def status(self) -> cpb.GetStatusResponse:
        busy = {w.id: self.envs.busy_at.get(w.hello.instance_id, 0) for w in self.fleet.of_role(pb.ROLE_ENV)}
        busy |= {name: replica.busy for name, replica in self.policy.router.replicas.items()}
        syncing = {name for name, replica in self.policy.router.replicas.items() if not replica.serving}
        now = time.monotonic()
        return cpb.GetStatusResponse(
            run_id=self.directory.name,
            phase=self.metrics.phase,
            update=self.metrics.updates,
            weight_version=self.metrics.version,
            trajectories=self.metrics.trajectories,
            env_steps=self.metrics.env_steps,
            success_rate=self.metrics.success_rate,
            env_utilisation=self.envs.usage.utilisation(now),
            rollout_utilisation=self.policy.usage.utilisation(now),
            fates=self.metrics.fates,
            workers=worker_statuses(self.fleet, busy, self.sync.versions, syncing),
            elapsed_seconds=now - self._began,
        )

    # ---- life ----

    async def execute(self, launch: Coroutine[Any, Any, None] | None = None) -> dict[str, Any]:
        """Run to the end and return the summary. `launch`: starts local workers and watches them, until cancelled."""
        control = self.config.server.tokens.get("control")
        service = ControlService(
            self, self.metrics, self.database, read_token(control, "server.tokens.control") if control else None
        )
        sessions = CoordinatorService(self.fleet, self.config.server, self.directory.name, self._welcome)
        try:
            await self.server.start(sessions, service)
            self.address.set_result(self.server.address)
            await self.database.set_control_address(self.server.address)
            return await self._beside(launch) if launch else await self._to_its_end()
        finally:
            self.address.cancel()
            await self.metrics.flush(self.database)
            self.metrics.close()
            await self.server.stop()

    async def _beside(self, launch: Coroutine[Any, Any, None]) -> dict[str, Any]:
        """The run with its launcher, which ends after the run has told the workers goodbye."""
        try:
            async with asyncio.TaskGroup() as tasks:
                launching = tasks.create_task(launch)
                summary = await self._to_its_end()
                launching.cancel()
        except* (Interrupted, UserError) as errors:
            raise _leaf(errors) from None
        return summary

    async def _to_its_end(self) -> dict[str, Any]:
        """The phases, then the last entries and goodbyes, however they ended."""
        try:
            summary = await self._with_background()
        except Interrupted:
            await self._end(RunState.INTERRUPTED)
            raise
        except (UserError, asyncio.CancelledError) as error:
            # Cancelled: the launcher could not go on, and says why.
            self.metrics.event("failed", why=str(error))
            await self._end(RunState.FAILED)
            raise
        self._phase("finished")
        await self.database.finish_run(summary, time.time())
        await self._goodbye()
        return summary

    async def _with_background(self) -> dict[str, Any]:
        work = [self.fleet.reap(), self.metrics.write_events(self.database), self.sync.run(), self._watch_stop()]
        if self._training:
            work.append(self._watch_trainer())
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(each) for each in work]
                summary = await self._phases()
                for task in background:
                    task.cancel()
        except* (Interrupted, UserError) as errors:
            raise _leaf(errors) from None
        return summary

    async def _phases(self) -> dict[str, Any]:
        await self._workers_ready()
        if self._collect:
            return self._common() | {"collected": await self._collected(self._collect)}
        episodes = self.config.evaluation.episodes
        if not self._training:
            source = await self._evaluate("eval", episodes, self.config.evaluation.samples)
            document = await asyncio.to_thread(source.document, self.directory.name)
            write_json(self.directory / "evaluation.json", document)
            return self._summary()
        if episodes and not self._start.update:
            await self._evaluate("before", episodes)
        await self.ranks.complete()
        await self._train()
        if episodes:
            await self.sync.settled()
            await self._evaluate("after", episodes)
        summary = self._summary()
        write_summary(self.directory, summary)
        return summary

    async def _workers_ready(self) -> None:
        """At least one environment and every replica; the trainer may still be loading."""
        self._phase("starting")
        while not (self.envs.slots and len(self.policy.router.replicas) >= self.config.rollout.replicas):
            await self._fleet_changed.wait()

    async def _evaluate(self, label: str, episodes: int, samples: int = 1) -> Evaluation:
        self._phase("evaluating")
        source = Evaluation(label, self.config, self.database, episodes, samples)
        self.evaluation = source
        await source.open()
        await sample(source, self.envs, self.policy, self.config)
        self.evaluations[label] = await source.close()
        self.evaluation = None
        self.metrics.event("evaluation", label=label, **self.evaluations[label])
        return source

    async def _collected(self, collect: Collect) -> dict[str, Any]:
        self._phase("collecting")
        source = Collection(collect, self.config, self.database)
        self.collection = source
        async with teacher(collect, self.policy, self.config) as writer:
            await sample(source, self.envs, self.policy, self.config, writer)
        result = await source.close()
        self.collection = None
        self.metrics.event("collected", **result)
        return result

    # ---- training ----

    async def _train(self) -> None:
        await self._take_up()
        now = time.monotonic()
        self.envs.usage.restart(now)
        self.policy.usage.restart(now)
        self._training_since = now
        self._phase("training")
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample(self.data))
            updates = tasks.create_task(self._updates())
            drained = tasks.create_task(self._drain.wait())
            await asyncio.wait({updates, drained}, return_when=asyncio.FIRST_COMPLETED)
            for task in (sampling, updates, drained):
                task.cancel()
        now = time.monotonic()
        self._utilisation = self.envs.usage.utilisation(now), self.policy.usage.utilisation(now)
        self._trained_seconds = self.train_seconds
        self._training_since = None
        if self.metrics.updates > self._start.update:
            await self._save()

    async def _sample(self, source: EpisodeSource) -> None:
        await sample(source, self.envs, self.policy, self.config)

    async def _take_up(self) -> None:
        """Counters and groups of the process that this one resumes."""
        self.metrics.updates, self.metrics.version = self._start.update, self._start.version
        if self._start.totals:
            self.metrics.restore(self._start.totals)
            self._trained_seconds = self._start.totals.get("train_seconds", 0.0)
        await self.data.prepare()

    async def _updates(self) -> None:
        while not self._done():
            batch = await self.data.next_batch(self.metrics.version)
            number, begun = self.metrics.updates + 1, time.monotonic()
            self._in_flight = batch
            trained = await self.ranks.update(number, batch)
            await self._updated(batch, trained.weight_version, timed(trained, begun))
            self.sync.publish(trained.weight_version, trained.tensors)
            if number % self.config.checkpoint.every_updates == 0:
                await self._save()

    async def _updated(self, batch: list[ReleasedGroup], made: int, metrics: dict[str, float]) -> None:
        """The next update has trained on the batch and made version `made`."""
        self._in_flight = None
        before = self.metrics.version
        self.metrics.updates, self.metrics.version, self.last_update = self.metrics.updates + 1, made, metrics
        await self.data.consumed(batch, self.metrics.updates, before)
        await self.database.add_version(made, self.metrics.updates, metrics, time.time())
        self._log_update(batch)

    def _done(self) -> bool:
        stop, metrics = self.config.stop, self.metrics
        return bool(
            (stop.updates and metrics.updates >= stop.updates)
            or (stop.train_seconds and self.train_seconds >= stop.train_seconds)
            or (stop.success_rate and metrics.window_full and metrics.success_rate >= stop.success_rate)
        )

    def _log_update(self, batch: list[ReleasedGroup]) -> None:
        now = time.monotonic()
        self.metrics.event(
            "update",
            **self.metrics.totals(),
            train_seconds=round(self.train_seconds, 2),
            batch_groups=len(batch),
            success_rate=round(self.metrics.success_rate, 4),
            success_by_task=self.metrics.success_by_task,
            env_utilisation=round(self.envs.usage.utilisation(now), 4),
            rollout_utilisation=round(self.policy.usage.utilisation(now), 4),
            replica_versions=self.sync.versions,
            waiting_groups=self.data.waiting_groups,
            trainer=self.last_update,
        )

    async def _save(self) -> tuple[str, int]:
        # A save waits for the update in flight, and holds it.
        version = self.metrics.version + (self._in_flight is not None)
        path = self.directory / "checkpoints" / f"v{version:06d}"
        saved = await self.ranks.save(path.resolve())
        record = CheckpointRecord(str(path), saved.weight_version, time.time(), self.metrics.success_rate)
        await self.database.add_checkpoint(record)
        self.metrics.event("checkpoint", path=str(path), version=saved.weight_version)
        for old in (await self.database.checkpoints())[self.config.checkpoint.keep :]:
            await self.database.drop_checkpoint(old.path)
            await asyncio.to_thread(_remove, Path(old.path))
        return str(path), saved.weight_version

    # ---- workers ----

    def _welcome(self, hello: pb.Hello) -> str:
        config = self.config
        model = config.model
        if self._start.checkpoint:
            model = model.model_copy(update={"path": str(self._start.checkpoint.resolve())})
        wanted = CAPABILITIES[self._collect.teacher].get(ROLE_NAMES[hello.role]) if self._collect else None
        if wanted and wanted not in hello.capabilities:
            raise Rejected(f"this run needs the capability {wanted}", "update dart on the worker's machine")
        if hello.role == pb.ROLE_ENV:
            return EnvWorkerConfig(environment=config.environment).model_dump_json()
        if hello.role == pb.ROLE_ROLLOUT:
            return RolloutWorkerConfig(
                model=model,
                rollout=config.rollout,
                sync=config.sync,
                max_images=config.agent.history_screenshots,
                seed=config.run.seed,
                weight_version=self._start.version,
            ).model_dump_json()
        if not self._training:
            raise Rejected("this run does not train", "start it with `dart train` to use a trainer")
        if hello.world_size != config.trainer.ranks or hello.rank >= config.trainer.ranks:
            raise Rejected(
                f"rank {hello.rank} of {hello.world_size} does not fit trainer.ranks {config.trainer.ranks}",
                f"launch {config.trainer.ranks} ranks, or set trainer.ranks: {hello.world_size}",
            )
        return TrainWorkerConfig(
            model=config.model,
            trainer=config.trainer,
            sync=config.sync,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            total_updates=config.stop.updates,
            resume_from=self._start.checkpoint.resolve() if self._start.checkpoint else None,
        ).model_dump_json()

    def _note_worker(self, worker: Any) -> None:
        self.metrics.event("worker", worker=worker.id, state=worker.state, slots=worker.slots)
        self._tensors_versions |= dict(worker.ready.versions)
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        raise Interrupted

    async def _watch_trainer(self) -> None:
        await self.ranks.lost.wait()
        raise TrainerLost(
            "the trainer is gone: look at logs/train-*.log in the run directory, then go on with --resume"
        )

    async def _goodbye(self) -> None:
        """Tell every worker to end, and wait until they have."""
        self.fleet.send_all(pb.SessionResponse(bye=pb.Bye(reason=f"the run is {self.metrics.phase}")))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                while self.fleet.workers:
                    await self._fleet_changed.wait()

    async def _end(self, state: RunState) -> None:
        was = self.metrics.phase
        self._phase(state.value)
        if state is RunState.INTERRUPTED and was == "training":
            with contextlib.suppress(TimeoutError, TrainerLost):
                async with asyncio.timeout(INTERRUPT_CHECKPOINT_SECONDS):
                    _, saved = await self._save()
                    if self._in_flight and saved > self.metrics.version:
                        # The trainer finished the update that was cut off here before it saved: its batch is trained.
                        await self._updated(self._in_flight, saved, {})
        await self.database.set_run_state(state, time.time())
        await self._goodbye()

    def _phase(self, phase: str) -> None:
        self.metrics.phase = phase
        self.metrics.event("phase", phase=phase)

    def _common(self) -> dict[str, Any]:
        return {
            "run": self.directory.name,
            "config": json.loads(self.config.model_dump_json()),
            "machine": machine(),
            "versions": software() | self._tensors_versions,
        }

    def _summary(self) -> dict[str, Any]:
        common = self._common()
        if not self._training:
            return {**common, "evaluation": self.evaluations["eval"]}
        totals = self.metrics.totals()
        environment, rollout = self._utilisation
        return {
            **common,
            "success_before": self.evaluations.get("before"),
            "success_after": self.evaluations.get("after"),
            "train_seconds": round(self.train_seconds, 2),
            "trajectories": totals["trajectories"],
            "env_steps": totals["env_steps"],
            "updates": totals["updates"],
            "weight_syncs": totals["weight_syncs"],
            "env_utilisation": round(environment, 4),
            "rollout_utilisation": round(rollout, 4),
            "staleness": totals["staleness"],
            "dropped": {k.removeprefix("dropped: "): n for k, n in totals["fates"].items() if k.startswith("dropped")},
            "trained": totals["fates"].get("trained", 0),
            "infrastructure_failures": totals["infrastructure_failures"],
            "unparsable": totals["unparsable"],
            "pooled": totals["pooled"],
            "wall_seconds": round(time.monotonic() - self._began, 2),
        }


def _leaf(errors: BaseException) -> BaseException:
    """The first error that is not a group."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


async def starting_point(database: Database) -> Start:
    """Where a resumed run goes on. Raises UserError when there is nothing to go on from."""
    run = await database.run()
    if run.state == RunState.FINISHED:
        raise UserError(f"run {run.id} is finished: start a new one without --resume")
    if run.state == RunState.RUNNING and run.pid and process_runs(run.pid):
        raise UserError(f"run {run.id} is running as process {run.pid}: stop it first")
    events = [event for event in await database.events_since(1, 1_000_000) if event.kind == "update"]
    totals = json.loads(events[-1].json) if events else None
    # Numbers go on behind everything that was given out, also where a group or an event was lost with the process.
    group, event = await database.group_count() + 1, await database.last_sequence() + 1
    checkpoint = await database.latest_checkpoint()
    if checkpoint is None:
        return Start(totals=totals, first_group=group, first_event=event)
    # One update makes one version, so the checkpoint's version is also the number of its update.
    return Start(Path(checkpoint.path), checkpoint.version, checkpoint.version, totals, group, event)


def process_runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


__all__ = ["Interrupted", "Run", "Start", "process_runs", "starting_point"]
