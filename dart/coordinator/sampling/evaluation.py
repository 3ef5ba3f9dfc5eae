"""Held-out evaluation: the same workers and episodes as in training, on seeds that training never sees.

Instances go round the tasks in turn, each with the next held-out seed. Every episode counts, however it ends; an
attempt that infrastructure ended is made again, and an outage is waited out (`core.curation.orders.Failures`). What
cannot be begun or brought to an end while others can is *not evaluated*: it is named with its reason and in no mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from statistics import fmean
from typing import Any

from dart.agent.templates import digest_of
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool
from dart.coordinator.fleet.sessions import InfrastructureError, SetUpFailed
from dart.core.curation.orders import Attempt, Failures, Order
from dart.core.evaluation.documents import Document, Instance, Interval, NotEvaluated, Protocol, Rate, Success
from dart.core.evaluation.outcomes import Estimate, Failure, Outcome, Undone, clustered_rate, pass_curve
from dart.core.json_text import JSON
from dart.core.types import Task, Trajectory
from dart.errors import UserError
from dart.store.database import Database
from dart.store.records import GroupKind, GroupState

log = logging.getLogger(__name__)


def instances(config: Config, number: int) -> list[Task]:
    """The first `number` held-out instances. The config has checked that there are enough."""
    suite, tasks = config.environment.kind, config.environment.tasks
    many = [name for name in tasks.evaluation if name not in tasks.single_instance]
    first = [Task(suite, name, tasks.eval_seeds[0] if name in many else 0) for name in tasks.evaluation]
    later = (Task(suite, name, seed) for seed in range(tasks.eval_seeds[0] + 1, tasks.eval_seeds[1]) for name in many)
    return list(islice(chain(first, later), number))


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
        self._orders = deque(
            Order(name, f"eval-{label}-{task.name}", task, config.step_limit(task.name))
            for task in self._instances
            for name in _names(f"eval-{label}-{task.name}-{task.seed}", samples)
        )
        self._tasks = {order.group_id: order.task for order in self._orders}
        self._planned = Counter(order.group_id for order in self._orders)
        self._open: list[str] = []
        self.outcomes: list[Outcome] = []
        self.undone: list[Undone] = []
        """Episodes that could not be run."""
        self._unjudged = Counter[str]()
        """Attempts of each task that ended for the lack of a verdict."""
        self.total = len(self._orders)
        self._running = 0
        self._changed = asyncio.Event()

    @property
    def ended(self) -> int:
        """Episodes that have an outcome, or never will."""
        return len(self.outcomes) + len(self.undone)

    async def open(self) -> None:
        """Load what an earlier process of the run has finished of this evaluation."""
        planned_ids = {order.trajectory_id for order in self._orders}
        for group, task in self._tasks.items():
            if (stored := await self._database.group(group)) is None:
                planned = self._planned[group]
                await self._database.open_group(group, task, planned, time.time(), kind=GroupKind.EVALUATION)
                self._open.append(group)
                continue
            # Not those of a config with other seeds, or more episodes.
            ours = [one for one in stored.trajectories if one.trajectory.id in planned_ids]
            lacks = len(ours) < self._planned[group]
            if lacks and stored.state is not GroupState.OPEN:
                # A restart closes what it finds open (`DataManager.prepare`), but this is not over.
                await self._database.reopen_evaluation(group)
            if lacks or stored.state is GroupState.OPEN:
                self._open.append(group)
            self.outcomes += [Outcome.of(one.trajectory, one.attempt) for one in ours]
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
        """Raises UserError when nothing works."""
        self._unjudged[order.task.name] += error.at_verdict
        again = Attempt.GIVEN_UP if error.certain else self._failures.again(order, time.monotonic())
        if again is Attempt.NOTHING_WORKS:
            raise UserError(
                f"evaluation: {self._failures.in_a_row} attempts in a row have failed, the last of them of "
                f"{order.task.id} with: {error}: look at the workers' logs in the run directory, and run `dart doctor`"
            )
        if again is Attempt.GIVEN_UP and not error.certain and not self._failures.ever_worked:
            again = order.again()  # nothing tells this episode from all others yet
        if isinstance(again, Order):
            self._orders.append(again)
        else:
            self._without([order], str(error))
            never = order.task.name not in {outcome.task.name for outcome in self.outcomes}
            if never and isinstance(error, SetUpFailed) and not error.certain:
                # It has never been set up, and this took many attempts: its other episodes would take as many.
                same = [one for one in self._orders if one.task.name == order.task.name]
                self._orders = deque(one for one in self._orders if one.task.name != order.task.name)
                self._without(same, str(error))
        self._ended()

    def _without(self, orders: Sequence[Order], why: str) -> None:
        for order in orders:
            log.warning("%s is not evaluated, after %d attempts: %s", order.trajectory_id, order.attempt, why)
            self.undone.append(Undone(order.trajectory_id, order.task, why))

    async def close(self) -> None:
        """Mark its groups in the database as evaluated."""
        over = GroupState.EVALUATED
        for group in self._open:
            await self._database.close_group(group, over, over, over, {}, time.time())

    def result(self) -> Success:
        """Success with its 95 % interval, overall and per task; lengths of episodes and causes of failure."""
        return {
            **self._rate(self.outcomes),
            "steps": fmean(o.steps for o in self.outcomes) if self.outcomes else 0.0,
            "seconds": fmean(o.seconds for o in self.outcomes) if self.outcomes else 0.0,
            "terminations": dict(sorted(Counter(o.termination.value for o in self.outcomes).items())),
            "failures": {kind.value: sum(o.failure is kind for o in self.outcomes) for kind in Failure},
            "infrastructure_attempts": sum(o.attempts - 1 for o in self.outcomes),
            "temperature": self.temperature,
            "by_state": _interval(self._estimate(self.outcomes, lambda outcome: outcome.state_success)),
            "reward": fmean(o.reward for o in self.outcomes) if self.outcomes else 0.0,
            "per_task": {
                name: self._rate([o for o in self.outcomes if o.task.name == name])
                for name in sorted({o.task.name for o in self.outcomes})
            },
            "not_evaluated": self._not_evaluated(),
            "unjudged_attempts": {name: times for name, times in sorted(self._unjudged.items()) if times},
        }

    def _rate(self, outcomes: Sequence[Outcome]) -> Rate:
        return {**_interval(self._estimate(outcomes, lambda outcome: outcome.success)), "episodes": len(outcomes)}

    def _estimate(self, outcomes: Sequence[Outcome], success: Callable[[Outcome], bool]) -> Estimate:
        instances: dict[str, list[bool]] = defaultdict(list)
        for one in outcomes:
            instances[one.task.id].append(success(one))
        return clustered_rate(list(instances.values()))

    def _not_evaluated(self) -> list[NotEvaluated]:
        """The instances of the episodes that could not be run, with the last reason of each."""
        why = {one.task: one.why for one in self.undone}
        episodes = Counter(one.task for one in self.undone)
        return [
            {"id": task.id, "task": task.name, "episodes": episodes[task], "why": why[task]}
            for task in sorted(why, key=lambda task: (task.name, task.seed))
        ]

    def document(self, run: str, policy: str | None = None, seen: Sequence[str] = ()) -> Document:
        """evaluation.json (docs/evaluation.md). `policy`: what acted, if it was not config.model. `seen`: tasks that
        are not held out."""
        by_instance: dict[str, list[Outcome]] = {task.id: [] for task in self._instances}
        for outcome in sorted(self.outcomes, key=lambda o: o.trajectory_id):
            by_instance[outcome.task.id].append(outcome)
        whole = [outcomes for outcomes in by_instance.values() if len(outcomes) == self._samples]
        curve = pass_curve([[o.success for o in outcomes] for outcomes in whole])
        return {
            "run": run,
            "checkpoint": policy or self._config.model.path,
            "protocol": self._protocol(seen),
            "success": self.result(),
            "pass_at_k": {str(k): _interval(estimate) for k, estimate in curve.items()},
            "instances": [_instance(task, by_instance[task.id]) for task in self._instances],
        }

    def _protocol(self, seen: Sequence[str]) -> Protocol:
        tasks, cap = self._config.environment.tasks, self._config.curation.step_limit
        names = list(dict.fromkeys(task.name for task in self._instances))
        seeds = [task.seed for task in self._instances if task.name not in tasks.single_instance] or [0]
        limits = {name: limit for name in names if (limit := self._config.step_limit(name)) < cap}
        return {
            "tasks": names,
            "seeds": [min(seeds), max(seeds) + 1],
            "episodes": len(self._instances),
            "samples": self._samples,
            "temperature": self.temperature,
            "step_limit": cap,
            "step_limits": limits,
            "not_held_out": [name for name in names if name in seen],
            "settings": settings_of(self._config.as_json()) | {"prompt": digest_of(self._config.agent)},
        }


def settings_of(written: Mapping[str, Any]) -> dict[str, JSON]:
    """The main settings that success depends on besides tasks, seeds, step limits and temperature, from the config as
    JSON: two evaluations that are compared should have them in common."""
    environment = {name: written["environment"][name] for name in ("kind", "options", "viewport")}
    rollout = {name: written["rollout"][name] for name in ("max_tokens", "max_model_len", "quantization")}
    curation = {"success_threshold": written["curation"]["success_threshold"]}
    sections = {"agent": written["agent"], "environment": environment, "rollout": rollout, "curation": curation}
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}


def _instance(task: Task, outcomes: Sequence[Outcome]) -> Instance:
    return {
        "id": task.id,
        "task": task.name,
        "seed": task.seed,
        "samples": [
            {
                "trajectory": o.trajectory_id,
                "success": o.success,
                "reward": o.reward,
                "failure": o.failure,
                "steps": o.steps,
                "seconds": round(o.seconds, 3),
            }
            for o in outcomes
        ],
    }


def _names(instance: str, samples: int) -> list[str]:
    """Trajectory ids of an instance's samples."""
    width = len(str(samples))
    return [instance] if samples == 1 else [f"{instance}-{number:0{width}d}" for number in range(1, samples + 1)]


def _interval(estimate: Estimate) -> Interval:
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
