"""The oracle does every task that it claims, by the environment's own verdict."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from dart.core.action import Click
from dart.core.types import Task
from dart.errors import UserError
from dart.workers.env import miniwob_oracle, oracle
from dart.workers.env.browser import Browser
from dart.workers.env.miniwob import MiniWobEnv, MiniWobOptions

pytestmark = pytest.mark.browser
SEEDS = 4  # 100 of each were seen to pass


async def test_every_task_it_claims() -> None:
    tasks = [Task("miniwob", name, seed) for name in miniwob_oracle.TASKS for seed in range(SEEDS)]
    failed: list[str] = []
    lengths: Counter[str] = Counter()

    async def work(env: MiniWobEnv) -> None:
        while tasks:
            task = tasks.pop()
            rng = random.Random(task.seed) if task.seed % 2 else None
            done = await oracle.demonstrate(env, task, rng)
            lengths[task.name] = max(lengths[task.name], len(done.steps))
            if done.reward != 1.0:
                failed.append(f"{task.id}: {done.instruction}: {done.reward}")
            for step in done.steps:
                assert step.observation.image.data
                assert (step.target is not None) == isinstance(step.action, Click)
                if step.target is not None and isinstance(step.action, Click):
                    assert step.action.at in step.target.points
                    assert all(
                        step.target.left <= p.x <= step.target.right and step.target.top <= p.y <= step.target.bottom
                        for p in step.target.points
                    )

    async with Browser.launch() as browser, asyncio.TaskGroup() as group:
        for env in [await MiniWobEnv.open(browser, MiniWobOptions(), (160, 210)) for _ in range(4)]:
            group.create_task(work(env))
    assert failed == []
    assert lengths["login-user"] == 5 and lengths["click-test"] == 1


async def test_a_task_it_does_not_know() -> None:
    async with Browser.launch() as browser:
        env = await MiniWobEnv.open(browser, MiniWobOptions(), (160, 210))
        with pytest.raises(UserError, match="does not know task 'click-pie'"):
            await oracle.demonstrate(env, Task("miniwob", "click-pie"))
