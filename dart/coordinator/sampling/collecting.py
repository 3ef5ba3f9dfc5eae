"""`dart collect`: successes for the experience pool from the scripted oracle, an endpoint or the policy itself.

`Collection` is the run's source of orders: it tries each task until it has its successes or its attempts are spent
(`core.evaluation.quota`), stores the trajectories that succeeded, and counts the rest. `teacher` returns what writes
the turns. Whatever it is, episodes are as in training: the same prompts and grammar, and tokens that a replica made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dart.agent.grammar import Grammar, make_grammar
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool, EnvSession
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import InfrastructureError, SetUpFailed
from dart.coordinator.sampling.endpoint import Endpoint, EndpointTurns
from dart.coordinator.sampling.episodes import Writer
from dart.core.curation.orders import Attempt, Failures, Order
from dart.core.evaluation.quota import Quota
from dart.core.types import Generation, Prompt, Trajectory
from dart.errors import UserError
from dart.job import Collect, Teacher
from dart.store.database import Database
from dart.store.records import GroupKind, GroupState
from dart.wire.capabilities import FORCED_TEXT, ORACLE

log = logging.getLogger(__name__)

CAPABILITIES: dict[Teacher, dict[str, str]] = {
    "oracle": {"env": ORACLE, "rollout": FORCED_TEXT},
    "endpoint": {"rollout": FORCED_TEXT},
    "policy": {},
}
"""The capabilities that workers need: teacher → role → capability."""


class Collection:
    """The source of orders (`coordinator.sampling.episodes.EpisodeSource`). Only successes are stored."""

    def __init__(self, collect: Collect, config: Config, database: Database, envs: EnvPool, failures: Failures) -> None:
        self._collect, self._database, self._envs, self._failures = collect, database, envs, failures
        self._config, tasks = config, config.environment.tasks
        self._quota = Quota(
            config.environment.kind, tasks.training, collect.seeds, collect.per_task, collect.most_attempts,
            collect.samples, tasks.single_instance,
        )  # fmt: skip
        self.temperature = collect.temperature
        self._again: deque[Order] = deque()
        self._opened: set[str] = set()
        self._changed = asyncio.Event()

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {tally.kept}/{self._collect.per_task} in {tally.finished}"
            for name, tally in self._quota.tallies.items()
        )

    @property
    def finished_attempts(self) -> int:
        return sum(tally.finished for tally in self._quota.tallies.values())

    async def next(self) -> Order | None:
        while True:
            self._failures.environments(self._envs.slots)
            # New attempts come first, so that an outage is met by many of them and not by one again and again.
            if begun := self._quota.next():
                task, sample = begun
                group = f"collect-{task.name}-{task.seed}"
                return Order(f"{group}-{sample}", group, task, self._config.step_limit(task.name))
            while self._again:
                order = self._again.popleft()
                if not self._quota.enough(order.task.name):
                    return order
                self._quota.given_up(order.task.name, "its task had enough successes before it was tried again")
            if self._quota.done:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        with self._quota.finishing(order.task.name, trajectory.success) as keep:
            if keep:
                await self._store(order, trajectory)
        self._failures.finished(order.task.name)
        self._changed.set()

    async def _store(self, order: Order, trajectory: Trajectory) -> None:
        if order.group_id not in self._opened:
            self._opened.add(order.group_id)
            await self._database.open_group(
                order.group_id, order.task, self._collect.samples, time.time(), kind=GroupKind.COLLECTED
            )
        await self._database.add_trajectory(trajectory, order.attempt)

    def failed(self, order: Order, error: InfrastructureError) -> None:
        """Raises UserError when nothing works."""
        set_up, name = isinstance(error, SetUpFailed), order.task.name
        if error.certain:
            self._give_up(order, error, task=name in self._config.environment.tasks.single_instance)
            return
        again = self._failures.again(order, time.monotonic())
        if again is Attempt.NOTHING_WORKS:
            raise UserError(
                f"collect: {self._failures.in_a_row} attempts in a row failed, the last with: {error}: "
                "look at the workers' logs in the run directory, and run `dart doctor`"
            )
        if isinstance(again, Attempt) and self.finished_attempts:
            # Others finish meanwhile, so this one is to blame: a task with a page that does not load, say.
            self._give_up(order, error, task=set_up and not self._quota.tallies[name].finished)
        else:
            self._again.append(again if isinstance(again, Order) else order.again())
            self._changed.set()

    def _give_up(self, order: Order, error: InfrastructureError, *, task: bool) -> None:
        """Do without this attempt. `task`: and without further ones at its task, which has never been set up."""
        what = f"task {order.task.name}" if task else order.trajectory_id
        log.warning("%s is given up after %d attempts: %s", what, order.attempt, error)
        self._quota.given_up(order.task.name, str(error), task=task)
        self._changed.set()

    async def close(self) -> dict[str, Any]:
        """The results, per task."""
        over = GroupState.COLLECTED
        for group in self._opened:
            await self._database.close_group(group, over, over, over, {}, time.time())
        return {
            "teacher": self._collect.teacher,
            "wanted": self._collect.per_task,
            "samples": self._collect.samples,
            "seeds": list(self._collect.seeds),
            "per_task": {
                name: {
                    "kept": tally.kept,
                    "attempts": tally.finished,
                    "successes": tally.successes,
                    "failures": tally.finished - tally.successes,
                    "given_up": tally.given_up,
                    "why": tally.why,
                }
                for name, tally in self._quota.tallies.items()
            },
        }


@asynccontextmanager
async def teacher(collect: Collect, policy: RolloutPool, config: Config) -> AsyncIterator[Writer | None]:
    """What writes the turns; None if the policy samples them."""
    limit, grammar = config.rollout.max_tokens, make_grammar(config.agent)
    if collect.teacher == "oracle":
        yield lambda env: OracleTurns(env, policy, grammar, limit)
    elif collect.endpoint is not None:
        async with Endpoint(collect.endpoint, collect.temperature, limit, grammar.as_written) as endpoint:
            yield lambda env: EndpointTurns(endpoint, policy, limit)
    else:
        yield None


class OracleTurns:
    """`dart.agent.episode.Policy`: what the oracle does, in the grammar's words."""

    def __init__(self, env: EnvSession, policy: RolloutPool, grammar: Grammar, max_tokens: int) -> None:
        self._env, self._policy, self._grammar, self._max_tokens = env, policy, grammar, max_tokens
        self._replica: str | None = None

    async def generate(self, prompt: Prompt) -> Generation:
        action, seen, text = await self._env.suggest(), prompt.images[-1], ""
        if action is not None:  # None: it knows no next action, and an empty turn ends the episode as a failure
            try:
                text = self._grammar.format(action, seen.width, seen.height)
            except ValueError as error:
                # This environment may be wrong about it; if all are, no attempt at this task ever ends.
                raise InfrastructureError(
                    f"agent.grammar cannot express the oracle's next action ({error}): "
                    "choose another grammar, or leave the task out of environment.tasks.names",
                    self._env.worker,
                ) from None
        generation, self._replica = await self._policy.generate(prompt, 0.0, self._max_tokens, self._replica, text)
        return generation
