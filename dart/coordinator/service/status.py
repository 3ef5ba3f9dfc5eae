"""Builds the run's status from the coordinator's parts; nothing else does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dart import config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.coordinator.service.accounting import Accounting
from dart.coordinator.service.watching import Watch
from dart.core.curation.quarantine import TaskQuarantine
from dart.core.fleet.health import Condition
from dart.core.fleet.replicas import Replicas
from dart.core.progress import Progress
from dart.core.status import Figures, Quarantined, Status, WorkerStatus
from dart.v1 import session_pb2 as pb
from dart.wire.role import ROLE_NAMES


@dataclass(frozen=True, slots=True)
class Activity:
    """How far a phase other than training has come. `share`: from 0 to 1; None if unknown."""

    text: str = ""
    share: float | None = None


class StatusBoard:
    """`figures`, `activity`, `address`: called for what only the run knows."""

    def __init__(
        self,
        run_id: str,
        stop: config.Stop,
        progress: Progress,
        accounting: Accounting,
        fleet: Fleet,
        envs: EnvPool,
        replicas: Replicas[Worker],
        *,
        figures: Callable[[], Figures],
        activity: Callable[[], Activity],
        address: Callable[[], str],
        watch: Watch,
        tasks: TaskQuarantine,
    ) -> None:
        self._run_id, self._stop, self._progress, self._accounting = run_id, stop, progress, accounting
        self._fleet, self._envs, self._replicas = fleet, envs, replicas
        self._figures, self._activity, self._address = figures, activity, address
        self._watch, self._tasks = watch, tasks
        self._began = time.monotonic()

    def status(self) -> Status:
        now, figures, activity = time.monotonic(), self._figures(), self._activity()
        times = self._accounting.times(now)
        return Status(
            run_id=self._run_id,
            phase=self._progress.phase,
            figures=figures,
            paused=self._progress.paused,
            elapsed_seconds=now - self._began,
            activity=activity.text,
            share_done=self._way(figures) if activity.share is None else activity.share,
            env_time=times.env,
            rollout_time=times.rollout,
            trainer_time=times.trainer,
            workers=self._workers(now),
            doing={name: self._accounting.all_doing(role) for role, name in ROLE_NAMES.items()},
            control_address=self._address(),
            quiet=self._watch.quiet(),
            stalls=self._watch.stalls,
            quarantined=self._quarantined(now),
        )

    def _quarantined(self, now: float) -> tuple[Quarantined, ...]:
        tasks = [Quarantined("task", one.name, one.seconds_left, one.why) for one in self._tasks.resting(now)]
        slots = [(worker.id, worker.offered) for worker in self._fleet.of_role(pb.ROLE_ENV) if worker.offered]
        environments = [Quarantined("environments", name, 0.0, one.reason) for name, one in slots if one.quarantined]
        return *self._fleet.boundary.without_work(now), *tasks, *environments

    def _way(self, figures: Figures) -> float:
        """The share of the way to the nearest stop condition, from 0 to 1."""
        stop = self._stop
        shares = (
            figures.counts.updates / stop.updates if stop.updates else 0.0,
            figures.train_seconds / stop.train_seconds if stop.train_seconds else 0.0,
            figures.counts.env_steps / stop.env_steps if stop.env_steps else 0.0,
        )
        return min(1.0, max(shares))

    def _workers(self, now: float) -> tuple[WorkerStatus, ...]:
        ordered = sorted(self._fleet.workers.values(), key=lambda worker: (ROLE_NAMES[worker.role], worker.id))

        def told(worker: Worker) -> WorkerStatus:
            busy, state, version = 0, worker.state, worker.ready.weight_version
            if worker.role == pb.ROLE_ENV:
                busy = self._envs.usage.busy(worker.id)
            elif worker.role == pb.ROLE_TRAIN:
                version = self._progress.counts.version
            elif replica := self._replicas.get(worker.id):
                busy, state, version = replica.busy, replica.condition, replica.version
            return WorkerStatus(
                worker_id=worker.id,
                role=ROLE_NAMES[worker.role],
                state=state,
                slots=worker.slots,
                busy=busy,
                weight_version=version,
                seconds_since_heard=now - worker.last_heard,
                doing=self._doing(worker),
            )

        return tuple([told(worker) for worker in ordered])

    def _doing(self, worker: Worker) -> str:
        doing, failed, replica = self._accounting.doing(worker), worker.last_failure, self._replicas.get(worker.id)
        if worker.offered is not None and worker.offered.count < worker.ready.slots and worker.offered.reason:
            doing = f"{doing}; {worker.offered.reason}"
        if conduct := self._fleet.boundary.told(worker.role_and_id):
            return f"{doing}; {conduct}"
        resting = worker.role == pb.ROLE_ENV and failed and self._envs.failures(worker.id)
        if resting:
            return f"{doing}; the last attempt failed with: {failed}"
        if worker.role == pb.ROLE_ROLLOUT and replica and replica.health.condition is not Condition.HEALTHY:
            return f"{doing}; the last request failed with: {replica.health.last_failure}"
        return doing
