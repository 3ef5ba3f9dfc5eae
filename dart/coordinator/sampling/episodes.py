"""Sampling: one coroutine per trajectory; a free environment takes the next order at once.

`sample` waits for: a free environment (unblocked when an episode ends), then an order (unblocked by the source:
budget, schedule, pause, the end of an evaluation). An episode waits for: its environment's replies, and a replica with
capacity. Infrastructure failures end an attempt, never the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from dart.agent.episode import ContextFull, EpisodeSpec, Policy, WrongTask, run_episode
from dart.agent.grammar import make_grammar
from dart.config import Config
from dart.coordinator.fleet.environments import EnvPool, EnvSession
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import InfrastructureError, SetUpFailed, Worker, WorkerLost
from dart.core.curation.orders import Order
from dart.core.types import Generation, Prompt, Trajectory
from dart.store.blobs import BlobError

log = logging.getLogger(__name__)


class EpisodeSource(Protocol):
    """Gives out orders and takes results. `next` returns None when there is nothing more to sample."""

    temperature: float

    async def next(self) -> Order | None: ...

    async def finished(self, order: Order, trajectory: Trajectory) -> None: ...

    def failed(self, order: Order, error: InfrastructureError) -> None: ...


class _Turns:
    """`dart.agent.episode.Policy` over the pool: a trajectory's turns prefer the replica of the turn before."""

    def __init__(self, env: EnvSession, pool: RolloutPool, temperature: float, max_tokens: int) -> None:
        self._env, self._pool, self._temperature, self._max_tokens = env, pool, temperature, max_tokens
        self.replica = ""
        """The replica that made the last turn."""

    async def generate(self, prompt: Prompt) -> Generation:
        try:
            generation, self.replica = await self._pool.generate(
                prompt, self._temperature, self._max_tokens, self.replica or None, enter=self._env.enter
            )
        except InfrastructureError as error:
            if not error.worker:  # no replica is at fault
                self._env.answer_for(prompt.images)
            raise
        return generation


Writer = Callable[[EnvSession], Policy]
"""Returns what writes the turns of an episode in this environment."""


def _close(env: EnvSession, _: asyncio.Task[None]) -> None:
    env.close()


def _told(error: InfrastructureError | ContextFull | WrongTask, worker: Worker) -> InfrastructureError:
    """What ended an attempt in this worker's environment, and who is to blame for it: this worker unless known."""
    if isinstance(error, SetUpFailed):
        return error
    if isinstance(error, ContextFull):  # at its first turn, which has no history that could be shorter
        remedy = "raise rollout.max_model_len, or lower agent.shown_characters, max_pixels or goal_images"
        return SetUpFailed(f"the first prompt does not fit: {remedy} ({error})", worker.id, certain=True)
    if isinstance(error, WrongTask):
        return SetUpFailed(str(error), worker.id, certain=True)
    culprit = error.worker if isinstance(error, InfrastructureError) else ""
    told = InfrastructureError(str(error), culprit or worker.id)
    told.at_verdict = isinstance(error, InfrastructureError) and error.at_verdict
    return told


def _size_watch(expected: tuple[int, int]) -> Callable[[Trajectory, Worker], None]:
    """What warns, once for each size, of screenshots of another size than `environment.viewport` says."""
    known = {expected}

    def look_at(trajectory: Trajectory, worker: Worker) -> None:
        shot = trajectory.steps[0].images[-1]
        if (size := (shot.width, shot.height)) not in known:
            known.add(size)
            log.warning(
                "%s sends screenshots of %d x %d, and environment.viewport says %d x %d, from which memory and context "
                "were planned: set environment.viewport to what is sent",
                worker.id, *size, *expected,
            )  # fmt: skip

    return look_at


def _spec(order: Order, config: Config, *, writes: bool) -> EpisodeSpec:
    return EpisodeSpec(
        trajectory_id=order.trajectory_id,
        group_id=order.group_id,
        task=order.task,
        step_limit=order.step_limit,
        success_threshold=config.curation.success_threshold,
        agent=config.agent,
        max_tokens=0 if writes else config.rollout.max_tokens,
    )


async def sample(
    source: EpisodeSource, envs: EnvPool, policy: RolloutPool, config: Config, writer: Writer | None = None
) -> None:
    """Run orders until the source has no more and all episodes have ended. Without `writer`, the policy samples."""
    grammar = make_grammar(config.agent)
    look_at = _size_watch(config.environment.viewport)

    async def episode(env: EnvSession, worker: Worker, order: Order) -> None:
        spec = _spec(order, config, writes=writer is not None)
        failed: bool | None = None
        turns = writer(env) if writer else _Turns(env, policy, source.temperature, config.rollout.max_tokens)
        try:
            trajectory = await run_episode(env, turns, spec, grammar)
            failed = False
            look_at(trajectory, worker)
        except (InfrastructureError, ContextFull, WrongTask) as error:
            log.warning("attempt %d of %s failed: %s", order.attempt, order.trajectory_id, error)
            told = _told(error, worker)
            own = isinstance(error, InfrastructureError) and error.worker == worker.id
            told.by_environment = own and not isinstance(error, WorkerLost)
            # A task that is wrong itself says nothing about the environment.
            failed = True if told.worker == worker.id and not told.certain else None
            if not isinstance(error, WorkerLost):
                envs.attempts.failed(str(told))
            source.failed(order.failed(told.worker), told)
            return
        finally:
            env.close(failed)
        envs.attempts.finished(trajectory, time.monotonic())
        try:
            await source.finished(order, trajectory)
        except BlobError as error:
            log.warning("%s cannot be stored: %s", order.trajectory_id, error)
            source.failed(order.failed(worker.id), InfrastructureError(str(error), worker.id))
            with contextlib.suppress(InfrastructureError):
                env.answer_for(trajectory.images)

    async def underway(env: EnvSession, worker: Worker, order: Order) -> None:
        with envs.underway.episode():
            await episode(env, worker, order)

    async with asyncio.TaskGroup() as episodes:
        while True:
            worker = await envs.acquire()
            try:
                order = await source.next()
            except asyncio.CancelledError:
                envs.give_back(worker)
                raise
            if order is None:
                envs.give_back(worker)
                return
            env = EnvSession(envs, worker, order)
            task = episodes.create_task(underway(env, worker, order))
            task.add_done_callback(partial(_close, env))  # a task cancelled before it began runs no `finally`
