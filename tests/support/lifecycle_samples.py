"""Groups, orders and trajectories for the tests of the lifecycle machine."""

from __future__ import annotations

import random
from dataclasses import replace

from dart.core.curation.judging import Stage, Verdict
from dart.core.curation.lifecycle import Lifecycle, Rules
from dart.core.curation.orders import Failures, Order
from dart.core.curation.planning import Plan
from dart.core.curation.sampling import TaskSampler
from dart.core.curation.schedule import Sampling, Schedule
from dart.core.types import Generation, Image, Step, Termination, Trajectory, VersionSpan

IMAGE = Image.of(b"x", "image/png", 2, 2)
ENVIRONMENTS = 6


def trajectory(order: Order, reward: float = 0.0, version: int = 0) -> Trajectory:
    generation = Generation((1, 2), (3, 4, 5), (-0.5,) * 3, (VersionSpan(version, 0, 3),), "t")
    steps = tuple(Step(index, (IMAGE,), generation, None) for index in range(2))
    return Trajectory(order.trajectory_id, order.group_id, order.task, "do", steps, Termination.ENVIRONMENT,
                      reward, reward >= 1.0, order.step_limit, 0.0, 1.0)  # fmt: skip


def machine(
    rollouts: int = 3,
    size: int = 6,
    sampling: Sampling = "rollout",
    *,
    synchronous: bool = False,
    first: int = 1,
    failures: Failures | None = None,
) -> Lifecycle:
    sampler = TaskSampler("s", ["a", "b", "c"], (0, 100), random.Random(0))
    rules = Rules(Schedule(sampling, synchronous, rollouts, size), max_staleness=1)
    return Lifecycle(rules, sampler, lambda task: Plan(rollouts, 5, "because"), first, failures)


def stage(groups: Lifecycle, group_id: str) -> Stage | None:
    """The group's stage; None if it is consumed, dropped or unknown."""
    group = groups._groups.get(group_id)
    return group.stage if group else None


def begin(groups: Lifecycle, number: int) -> list[Order]:
    return [groups.next(ENVIRONMENTS)[0] for _ in range(number)]


def verdicts(groups: Lifecycle, *, stored: bool = True) -> list[Verdict]:
    """Judge what is there to judge; `stored`: the verdicts are durable."""
    made = []
    while group := groups.to_judge():
        made.append(groups.judge(group))
        if stored:
            groups.decided(made[-1])
        groups.validate()
    return made


def released(groups: Lifecycle, version: int = 0, rollouts: int = 3) -> str:
    """A group goes through to where it waits for the trainer; its id."""
    orders = begin(groups, rollouts)
    for order in orders:
        groups.finished(trajectory(order, float(order is orders[0]), version))
    (verdict,) = verdicts(groups)
    assert verdict.released
    return verdict.group_id


# ---- roll-outs ----


def hopeless(order: Order) -> Order:
    return replace(order, attempt=5, failed_on=frozenset({"env-0", "env-1"}))
