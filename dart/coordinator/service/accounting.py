"""The ledgers of a run's environments, replicas and trainer, read together.

Utilisation is the share of slot-seconds since training began that were within an episode (environments), with at least
one request (replicas) or in an update (trainer). docs/efficiency.md says how the paper's figures compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import Worker
from dart.coordinator.training.ranks import TRAINER, TrainerRanks
from dart.core.json_text import JSON
from dart.core.progress import Counts
from dart.core.status import TimeSpent, Usage
from dart.core.usage import EnvState, Ledger, State
from dart.v1 import session_pb2 as pb


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time of each kind of worker went."""

    env: TimeSpent
    rollout: TimeSpent
    trainer: TimeSpent

    def to_json(self) -> dict[str, JSON]:
        """The form in a summary. Only environments have causes."""
        return {
            "env": {
                "seconds": dict(self.env.seconds),
                "idle_because": dict(self.env.idle_because),
                "queued_because": dict(self.env.queued_because),
            },
            "rollout": {"seconds": dict(self.rollout.seconds)},
            "trainer": {"seconds": dict(self.trainer.seconds)},
        }


class Accounting:
    def __init__(self, envs: EnvPool, policy: RolloutPool, ranks: TrainerRanks) -> None:
        self.environments, self.replicas, self.trainer = envs.usage, policy.usage, ranks.usage

    def restart(self, now: float) -> None:
        for ledger in (self.environments, self.replicas, self.trainer):
            ledger.restart(now)

    def utilisation(self, now: float) -> tuple[float, float, float]:
        """Utilisation of environments, replicas and the trainer, each from 0 to 1."""
        ledgers = (self.environments, self.replicas, self.trainer)
        environments, replicas, trainer = (round(ledger.utilisation(now), 4) for ledger in ledgers)
        return environments, replicas, trainer

    def usage(self, counts: Counts, train_seconds: float, now: float) -> Usage:
        """Utilisation, and throughput per minute of training."""
        environments, replicas, trainer = self.utilisation(now)
        minutes = max(train_seconds, 1e-9) / 60
        return Usage(
            env_utilisation=environments,
            rollout_utilisation=replicas,
            trainer_utilisation=trainer,
            trained_actions_per_minute=round(counts.trained_steps / minutes, 2),
            sampled_actions_per_minute=round(counts.env_steps / minutes, 2),
            trained_tokens_per_minute=round(counts.trained_tokens / minutes, 1),
        )

    def times(self, now: float) -> Times:
        """Slot-seconds by state, and what idle and queued time was due to."""
        causes = self.environments.causes
        return Times(
            TimeSpent(
                _seconds(self.environments, now),
                _rounded(causes(EnvState.IDLE, now)),
                _rounded(causes(EnvState.QUEUED, now)),
            ),
            TimeSpent(_seconds(self.replicas, now)),
            TimeSpent(_seconds(self.trainer, now)),
        )

    def doing(self, worker: Worker) -> str:
        """What a worker's slots do now, and why some wait: "12 acting, 4 idle: the run is paused"."""
        ledger = self._ledger(worker.role)
        counts = ledger.counts(TRAINER if ledger is self.trainer else worker.id)
        return _told(ledger, counts, counted=worker.role == pb.ROLE_ENV)

    def all_doing(self, role: int) -> str:
        """The same for all workers of the role together."""
        ledger = self._ledger(role)
        return _told(ledger, ledger.counts(), counted=ledger is not self.trainer)

    def _ledger(self, role: int) -> Ledger:
        ledgers: dict[int, Ledger] = {pb.ROLE_ENV: self.environments, pb.ROLE_ROLLOUT: self.replicas}
        return ledgers.get(role, self.trainer)


def _told(ledger: Ledger, counts: Mapping[State, int], *, counted: bool) -> str:
    told = []
    # Causes come last, because a cause may contain commas and colons.
    for state, count in sorted(counts.items(), key=lambda item: (bool(ledger.cause(item[0])), item[0])):
        what = f"{count} {state}" if counted else str(state)
        told.append(f"{what}: {cause}" if (cause := ledger.cause(state)) else what)
    return ", ".join(told)


def _seconds(ledger: Ledger, now: float) -> dict[str, float]:
    return _rounded({str(state): seconds for state, seconds in ledger.seconds(now).items()})


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in sorted(seconds.items())}
