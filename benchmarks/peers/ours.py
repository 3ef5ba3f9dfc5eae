"""This project as a contender of `benchmarks.transport`, with every part of the coordinator that a step passes.

Real: server, sessions, pools, episodes, the data manager with its groups, curation and feed, SQLite and screenshots on
the disk, the trainer's pages. Simulated: what the workers answer, at once (`benchmarks.instant`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks import instant
from benchmarks.instant import coordinator, settings
from benchmarks.peers import shared
from benchmarks.step_path import Source
from dart import config
from dart.coordinator.fleet.environments import EnvSession
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.sampling.data import DataManager
from dart.coordinator.sampling.episodes import Writer, sample
from dart.coordinator.service.journal import Journal
from dart.core.curation.batches import ReleasedGroup
from dart.core.curation.orders import Order
from dart.core.fates import TRAINED
from dart.core.progress import Progress
from dart.core.types import Generation, Image, Prompt, Step, Task, Termination, Trajectory, VersionSpan
from dart.malloc import keep_memory
from dart.processes.settings import collect_seldom
from dart.store.blobs import BlobStore
from dart.store.database import Database, sqlite_url

SMALL_SLOTS = 64
LOOK_SECONDS = 0.05
# The defaults of a run.
HISTORY, IMAGE_CACHE_ENTRIES = config.Agent().history_screenshots, config.Rollout().image_cache_entries


def as_the_coordinator() -> None:
    """Give this process the settings of `dart train`."""
    collect_seldom()
    keep_memory()


class TimedTurns:
    """The policy's turns (`dart.agent.episode.Policy`), which report each step to the tally.

    A step is from one prompt to the next: generate, parse, act, observe.
    """

    def __init__(self, env: EnvSession, pool: RolloutPool, made: config.Config, tally: shared.Tally) -> None:
        self._env, self._pool, self._tally = env, pool, tally
        self._temperature, self._max_tokens = made.rollout.temperature, made.rollout.max_tokens
        self._replica: str | None = None
        self._began: float | None = None

    async def generate(self, prompt: Prompt) -> Generation:
        if self._began is not None:
            self._tally.ended(self._began, steps=1)
        self._began = time.perf_counter()
        generation, self._replica = await self._pool.generate(
            prompt, self._temperature, self._max_tokens, self._replica, enter=self._env.enter
        )
        return generation


def _timed(pool: RolloutPool, made: config.Config, tally: shared.Tally) -> Writer:
    return lambda env: TimedTurns(env, pool, made, tally)


class CountedData(DataManager):
    """Counts trajectories when they are stored. The environments' first ones are shortened by different numbers of
    steps, so that later ones do not all end at once."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tally: shared.Tally | None = None
        self.stored = self.stored_steps = 0
        self._first = itertools.count()

    async def next(self) -> Order | None:
        order = await super().next()
        number = next(self._first)
        if order is None or number >= shared.ENVIRONMENTS:
            return order
        return replace(order, step_limit=shared.STEPS - number * shared.STEPS // shared.ENVIRONMENTS)

    async def finished(self, order: Order, trajectory: Trajectory) -> None:
        await super().finished(order, trajectory)
        self.stored += 1
        self.stored_steps += len(trajectory.steps)
        if self.tally is not None:
            self.tally.ended(trajectories=1)


def _config() -> config.Config:
    """Always groups of 8 and 30 steps, batches of one group, and so many batches allowed that no environment waits
    for the trainer.

    By default a batch is 64 trajectories, and the coordinator keeps their screenshots in memory until it is trained
    on: here 576 MB, more than any peer has to hold.
    """
    return settings(
        agent={"history_screenshots": HISTORY},
        curation={
            "step_limit": shared.STEPS,
            "dynamic_rollouts": {"enabled": False},
            "dynamic_length": {"enabled": False},
            "pool": {"enabled": False},
            "task_preference": 0.0,
            "max_staleness": 8,
        },
        trainer={"trajectories_per_update": 8},
    )


def _fresh_workers() -> tuple[tuple[str, ...], tuple[str, ...]]:
    slots = ("--slots", str(shared.ENVIRONMENTS))
    return (
        ("fresh-env", *slots, "--image-bytes", str(shared.SCREENSHOT_BYTES)),
        ("rollout", *slots, "--image-cache-entries", str(IMAGE_CACHE_ENTRIES)),
    )


async def _steps(share: bool, warm: float, seconds: float) -> None:
    made = _config()
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        async with await Database.open(sqlite_url(folder / "run.db"), folder / "blobs") as database:
            await database.start_run("bench", "bench", {}, started=time.time())
            progress, journal = Progress(made.stop.window), Journal(folder / "metrics.jsonl")
            blobs = database.blobs if share else None
            async with coordinator(made, *_fresh_workers(), blobs=blobs) as parts:
                data = CountedData(made, database, progress, journal, "bench", 1, parts.envs)
                await data.prepare()
                tally = data.tally = shared.Tally(warm, seconds)
                writer = _timed(parts.policy, made, tally)
                async with _background(
                    sample(data, parts.envs, parts.policy, made, writer), _train(data), journal.write_events(database)
                ):
                    while not tally.over:  # noqa: ASYNC110 - a clock decides
                        await asyncio.sleep(tally.left or LOOK_SECONDS)
                    busy = parts.envs.usage.utilisation(time.monotonic())
            journal.close()
            # Trajectories that were running at the end may be stored as well.
            in_database = (await database.totals()).trajectories
            kept = sum(len(files) for _, _, files in os.walk(folder / "blobs"))
            if in_database < data.stored or kept < data.stored_steps:
                raise RuntimeError(
                    f"{data.stored} trajectories of {data.stored_steps} steps were counted as stored, and there are "
                    f"{in_database} and {kept} screenshots"
                )
            fates = progress.counts.fates
            trained = fates.get(TRAINED, 0)
            tally.report(
                stored_trajectories=in_database,
                stored_screenshots=kept,
                trained=trained,
                dropped=sum(fates.values()) - trained,
                environments_busy=round(busy, 3),
                trajectories_per_batch=made.trainer.trajectories_per_update,
            )


@asynccontextmanager
async def _background(*work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work in the background, cancelled at the end of the block; if any of it fails, the block ends."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


async def _train(data: DataManager) -> None:
    """Mark batch after batch as trained at once; no version is made."""
    for number in itertools.count(1):
        batch = await data.next_batch(0)
        await data.consumed(batch, number, 0)


async def _whole(history: int, share: bool, warm: float, seconds: float) -> None:
    """A batch is one group. Its screenshots are in memory, or, with `share`, in the store, as written by env
    workers."""
    group = _group(history)
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        blobs = BlobStore(name) if share else None
        if blobs:
            group = _stored(group, blobs)
        async with coordinator(settings(), ("train",), blobs=blobs) as parts:
            await parts.ranks.complete()
            tally = shared.Tally(warm, seconds)
            number = 0
            while not tally.over:
                number += 1
                began = time.perf_counter()
                await parts.ranks.update(number, [group])
                tally.ended(began, steps=shared.STEPS * len(group.trajectories), trajectories=len(group.trajectories))
            tally.report(trajectories_per_handover=len(group.trajectories))


def _stored(group: ReleasedGroup, blobs: BlobStore) -> ReleasedGroup:
    """The group as it looks once env workers have stored its screenshots: the images carry no bytes."""
    members = []
    for member in group.trajectories:
        blobs.put_many(image for step in member.steps for image in step.images)
        steps = (
            replace(step, images=tuple(replace(image, data=b"") for image in step.images)) for step in member.steps
        )
        members.append(replace(member, steps=tuple(steps)))
    return replace(group, trajectories=tuple(members))


def _group(history: int) -> ReleasedGroup:
    """`history`: screenshots in a prompt, the step's own included."""
    task = Task("bench", "instant")
    members = []
    for number, screenshots in enumerate(shared.trajectories(), 1):
        images = [Image.of(data, instant.MEDIA_TYPE, instant.WIDTH, instant.HEIGHT) for data in screenshots]
        generation = Generation(
            tuple(range(instant.PROMPT_TOKENS)),
            tuple(range(instant.TOKENS)),
            (-0.1,) * instant.TOKENS,
            (VersionSpan(0, 0, instant.TOKENS),),
            instant.TEXT,
        )
        steps = tuple(
            Step(index, tuple(images[max(0, index + 1 - history) : index + 1]), generation, None)
            for index in range(len(images))
        )
        members.append(
            Trajectory(
                id=f"g-{number}",
                group_id="g",
                task=task,
                instruction=instant.INSTRUCTION,
                steps=steps,
                termination=Termination.STEP_LIMIT,
                reward=float(number % 2),
                success=bool(number % 2),
                step_limit=shared.STEPS,
                started=0.0,
                finished=1.0,
            )
        )
    return ReleasedGroup.evenly("g", tuple(members), tuple(1.0 if one.success else -1.0 for one in members))


async def _small(warm: float, seconds: float) -> None:
    made = settings()
    slots = ("--slots", str(SMALL_SLOTS))
    env = ("env", *slots, "--image-bytes", str(shared.SMALL_BYTES))
    async with coordinator(made, env, ("rollout", *slots)) as parts:
        tally = shared.Tally(warm, seconds)
        source = Source(tally.left, shared.STEPS)
        await sample(source, parts.envs, parts.policy, made, _timed(parts.policy, made, tally))
        tally.report(round_trips_per_step=2)


def steps(variant: str, warm: float, seconds: float) -> None:
    """Trajectory after trajectory in 32 environments; each is stored, its group judged and marked as trained."""
    as_the_coordinator()
    uvloop.run(_steps(True, warm, seconds))


def steps_over_the_wire(variant: str, warm: float, seconds: float) -> None:
    """The same, but no worker sees the run's directory: every screenshot goes through the coordinator."""
    as_the_coordinator()
    uvloop.run(_steps(False, warm, seconds))


def whole(variant: str, warm: float, seconds: float) -> None:
    """Batches of 8 trajectories for the trainer; a prompt has only its step's screenshot, as with the peers."""
    as_the_coordinator()
    uvloop.run(_whole(1, True, warm, seconds))


def whole_over_the_wire(variant: str, warm: float, seconds: float) -> None:
    """The same, but the trainer does not see the run's directory."""
    as_the_coordinator()
    uvloop.run(_whole(1, False, warm, seconds))


def whole_with_history(variant: str, warm: float, seconds: float) -> None:
    """The same with the default number of screenshots in a prompt."""
    as_the_coordinator()
    uvloop.run(_whole(HISTORY, True, warm, seconds))


def small(variant: str, warm: float, seconds: float) -> None:
    """The step path of `benchmarks.step_path`, without a store."""
    as_the_coordinator()
    uvloop.run(_small(warm, seconds))


if __name__ == "__main__":
    shared.run(
        {
            "steps": steps,
            "steps_over_the_wire": steps_over_the_wire,
            "whole": whole,
            "whole_over_the_wire": whole_over_the_wire,
            "whole_with_history": whole_with_history,
            "small": small,
        }
    )
