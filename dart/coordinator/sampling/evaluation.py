"""Held-out evaluation: the same workers and episodes as in training, on seeds that training never sees.

Instances go round the tasks in turn, each with the next held-out seed. Every episode counts, however it ends; an
attempt that infrastructure ended is made again, and an outage is waited out (`core.curation.orders.Failures`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean

from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.core.curation.orders import Attempt, Failures, Order
from dart.core.evaluation.documents import Document, Interval, Rate, Success
from dart.core.evaluation.outcomes import Estimate, Failure, Outcome, pass_curve, success_rate
from dart.core.types import Task, Trajectory
from dart.errors import UserError
from dart.store.database import Database
from dart.store.records import EVALUATED, GroupKind, GroupState


def instances(config: Config, number: int) -> list[Task]:
    """The first `number` held-out instances. The config has checked that there are enough seeds."""
    tasks = config.environment.tasks
    names = list(dict.fromkeys(tasks.names))  # a name listed twice would give the same instances twice
    first = tasks.eval_seeds[0]
    return [Task(config.environment.kind, names[i % len(names)], first + i // len(names)) for i in range(number)]


class Evaluation:
    """A source of orders (`coordinator.sampling.episodes.EpisodeSource`) that collects the outcomes.

    `evaluation.episodes` instances, `samples` episodes of each. Only outcomes are kept here; trajectories are in the
    database.
    """

    def __init__(
        self,
        label: str,
        config: Config,
        database: Database,
        envs: EnvPool,
        failures: Failures,
        temperature: float,
        samples: int = 1,
    ) -> None:
        """`temperature`: 0 is greedy."""
        self._envs, self._failures = envs, failures
        self._database, self._config, self._samples = database, config, samples
        self.temperature = temperature
        self._instances = instances(config, config.evaluation.episodes)
        limit = config.curation.step_limit
        self._orders = deque(
            Order(name, f"eval-{label}-{task.name}", task, limit)
            for task in self._instances
            for name in _names(f"eval-{label}-{task.name}-{task.seed}", samples)
        )
        self._tasks = {order.group_id: order.task for order in self._orders}
        self._planned = Counter(order.group_id for order in self._orders)
        self._open: list[str] = []
        self.outcomes: list[Outcome] = []
        self.total = len(self._orders)
        self._running = 0
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Load what an earlier process of the run has finished of this evaluation."""
        for group, task in self._tasks.items():
            if (stored := await self._database.group(group)) is None:
                planned = self._planned[group]
                await self._database.open_group(group, task, planned, time.time(), kind=GroupKind.EVALUATION)
                self._open.append(group)
                continue
            if stored.state is GroupState.OPEN:
                self._open.append(group)
            self.outcomes += [Outcome.of(one.trajectory, one.attempt) for one in stored.trajectories]
        for outcome in self.outcomes:
            self._failures.finished(outcome.task.name)
        there = {outcome.trajectory_id for outcome in self.outcomes}
        self._orders = deque(order for order in self._orders if order.trajectory_id not in there)

    async def next(self) -> Order | None:
        """Also waits while one of the last attempts may still fail and have to be made again."""
        while not self._orders and self._running:
            self._changed.clear()
            await self._changed.wait()
        if not self._orders:
            return None
        self._running += 1
        self._failures.environments(self._envs.slots)
        return self._orders.popleft()

    def _ended(self) -> None:
        self._running -= 1
        self._changed.set()

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await self._database.add_trajectory(trajectory, order.attempt)
        self._failures.finished(order.task.name)
        self.outcomes.append(Outcome.of(trajectory, order.attempt))
        self._ended()

    def failed(self, order: Order, error: InfrastructureError) -> None:
        again = self._failures.again(order, time.monotonic())
        if isinstance(again, Attempt):
            raise UserError(
                f"evaluation: {order.task.id} failed {order.attempt} times, the last with: {error} "
                f"({self._failures.in_a_row} attempts in a row have failed): look at what failed; for workers their "
                "logs are in the run directory, and `dart doctor` knows what is missing"
            )
        self._orders.append(again)
        self._ended()

    async def close(self) -> None:
        """Mark its groups in the database as evaluated."""
        for group in self._open:
            await self._database.close_group(group, GroupState.EVALUATED, EVALUATED, EVALUATED, {}, time.time())

    def result(self) -> Success:
        """Success with its 95 % interval, overall and per task; lengths of episodes and causes of failure."""
        return {
            **_rate(self.outcomes),
            "steps": fmean(o.steps for o in self.outcomes) if self.outcomes else 0.0,
            "seconds": fmean(o.seconds for o in self.outcomes) if self.outcomes else 0.0,
            "terminations": dict(sorted(Counter(o.termination.value for o in self.outcomes).items())),
            "failures": {kind.value: sum(o.failure is kind for o in self.outcomes) for kind in Failure},
            "infrastructure_attempts": sum(o.attempts - 1 for o in self.outcomes),
            "temperature": self.temperature,
            "per_task": {
                name: _rate([o for o in self.outcomes if o.task.name == name])
                for name in sorted({o.task.name for o in self.outcomes})
            },
        }

    def document(self, run: str, policy: str | None = None) -> Document:
        """evaluation.json (docs/evaluation.md). `policy`: what acted, if it was not config.model.

        It resamples, which takes a second if there are many instances.
        """
        by_instance: dict[str, list[Outcome]] = {task.id: [] for task in self._instances}
        for outcome in sorted(self.outcomes, key=lambda o: o.trajectory_id):
            by_instance[outcome.task.id].append(outcome)
        curve = pass_curve([[o.success for o in outcomes] for outcomes in by_instance.values()])
        return {
            "run": run,
            "checkpoint": policy or self._config.model.path,
            "protocol": {
                "tasks": list(dict.fromkeys(task.name for task in self._instances)),
                "seeds": [self._instances[0].seed, self._instances[-1].seed + 1],
                "episodes": len(self._instances),
                "samples": self._samples,
                "temperature": self.temperature,
                "step_limit": self._config.curation.step_limit,
            },
            "success": self.result(),
            "pass_at_k": {str(k): _interval(estimate) for k, estimate in curve.items()},
            "instances": [
                {
                    "id": task.id,
                    "task": task.name,
                    "seed": task.seed,
                    "samples": [
                        {
                            "trajectory": o.trajectory_id,
                            "success": o.success,
                            "failure": o.failure,
                            "steps": o.steps,
                            "seconds": round(o.seconds, 3),
                        }
                        for o in by_instance[task.id]
                    ],
                }
                for task in self._instances
            ],
        }


def _names(instance: str, samples: int) -> list[str]:
    """Trajectory ids of an instance's samples."""
    width = len(str(samples))
    return [instance] if samples == 1 else [f"{instance}-{number:0{width}d}" for number in range(1, samples + 1)]


def _interval(estimate: Estimate) -> Interval:
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}


def _rate(outcomes: Sequence[Outcome]) -> Rate:
    return {**_interval(success_rate([o.success for o in outcomes])), "episodes": len(outcomes)}
