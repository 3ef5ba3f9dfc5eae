"""Held-out evaluation: the same workers and the same episode, on seeds that training never sees, no training.

Episodes go round the tasks in turn, each with the next held-out seed; every one counts, whatever it ends with, and
an attempt that infrastructure ended is made again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from dart.config import Config
from dart.coordinator.sessions import InfrastructureError
from dart.core.groups import Order
from dart.core.types import Task, Trajectory
from dart.errors import UserError
from dart.store.database import Database
from dart.store.records import GroupState

MOST_ATTEMPTS = 5


def wilson(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % Wilson score interval of a success rate (E. B. Wilson 1927, eq. in JASA 22, 209-212)."""
    if episodes == 0:
        return 0.0, 1.0
    p = successes / episodes
    scale = 1 + z * z / episodes
    centre = (p + z * z / (2 * episodes)) / scale
    half = z * math.sqrt(p * (1 - p) / episodes + z * z / (4 * episodes * episodes)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


class Evaluation:
    """A source of orders (`coordinator.episodes.EpisodeSource`) that collects what comes back."""

    def __init__(self, label: str, config: Config, database: Database, suite: str, episodes: int) -> None:
        self._database, self._label = database, label
        self.temperature = config.evaluation.temperature or config.rollout.temperature
        names, first = config.environment.tasks.names, config.environment.tasks.eval_seeds[0]
        limit = config.curation.step_limit
        tasks = [Task(suite, names[i % len(names)], first + i // len(names)) for i in range(episodes)]
        if tasks and tasks[-1].seed >= config.environment.tasks.eval_seeds[1]:
            raise UserError(
                f"evaluation.episodes: {episodes} episodes of {len(names)} tasks need {tasks[-1].seed - first + 1} "
                "held-out seeds: widen environment.tasks.eval_seeds or evaluate fewer"
            )
        self._orders = deque(
            Order(f"eval-{label}-{task.name}-{task.seed}", f"eval-{label}-{task.name}", task, limit) for task in tasks
        )
        self._tasks = {order.group_id: order.task for order in self._orders}
        self._planned = {group: sum(o.group_id == group for o in self._orders) for group in self._tasks}
        self.trajectories: list[Trajectory] = []
        self.total = len(tasks)

    async def open(self) -> None:
        for group, task in self._tasks.items():
            await self._database.open_group(group, task, self._planned[group], time.time())

    async def next(self) -> Order | None:
        return self._orders.popleft() if self._orders else None

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await self._database.add_trajectory(trajectory, order.attempt)
        self.trajectories.append(trajectory)

    def failed(self, order: Order, error: InfrastructureError) -> None:
        if order.attempt >= MOST_ATTEMPTS:
            raise UserError(
                f"evaluation: {order.task.id} failed {MOST_ATTEMPTS} times, the last with: {error}: "
                "look at the workers' logs in the run directory, and run `dart doctor`"
            )
        again = Order(order.trajectory_id, order.group_id, order.task, order.step_limit, order.attempt + 1)
        self._orders.append(again)

    async def close(self) -> dict[str, Any]:
        for group in self._tasks:
            await self._database.close_group(group, GroupState.DROPPED, "evaluated", {}, time.time())
        return self.result()

    def result(self) -> dict[str, Any]:
        """{mean, low, high, episodes, steps, terminations, per_task}: success with its 95 % interval."""
        return {
            **_rate(self.trajectories),
            "steps": sum(len(t.steps) for t in self.trajectories) / max(len(self.trajectories), 1),
            "terminations": {
                kind: sum(t.termination == kind for t in self.trajectories)
                for kind in sorted({t.termination.value for t in self.trajectories})
            },
            "temperature": self.temperature,
            "per_task": {
                name: _rate([t for t in self.trajectories if t.task.name == name])
                for name in sorted({t.task.name for t in self.trajectories})
            },
        }


def _rate(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    wins = sum(t.success for t in trajectories)
    low, high = wilson(wins, len(trajectories))
    return {
        "mean": wins / len(trajectories) if trajectories else 0.0,
        "low": low,
        "high": high,
        "episodes": len(trajectories),
    }
