"""What one env worker does with a world, and what its environments cost: `python -m benchmarks.learning.worlds`.

Real: the env worker's role with its environments, browsers, desktops, input and screenshots; commands and answers are
the protocol's messages. There is no coordinator and no gRPC. For each world and number of environments:

- starts per second: an episode is begun and given back at once, by each environment as soon as it is ready again. A
  desktop is booted anew for each.
- steps per second: each environment gets the next click as soon as it has answered. Clicks are at random places on the
  ladder, where an episode that a lucky one ends is begun anew; elsewhere beside the task, which they do not end.
- processor time of the worker and all its processes; memory of all these processes by their proportional share, less
  what the worker had before the world started.

Rows that are measured replace the same rows in the file, so that one run can add to another's. BrowserGym's (its sleeps
are off, docs/worlds.md#gym) need the extra `browsergym`; a row for which there is not enough memory is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop
from pydantic import BaseModel

from benchmarks import results
from dart.config import Environment, EnvWorkerConfig, TaskSet
from dart.core.action import Click, Point
from dart.core.types import Task
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.workers.env.ladder_layout import task_names
from dart.workers.env.role import EnvRole

RESULT = Path(__file__).parent.parent / "results" / "worlds.json"
MINIWOB = ("click-color", "click-dialog", "focus-text-2", "enter-text")
BOOT_SECONDS = 1800.0
PATIENCE_SECONDS = 600.0
SPARE_BYTES = 2 << 30
"""Memory that is left to everything else."""


@dataclass(frozen=True, slots=True)
class Subject:
    kind: str
    tasks: tuple[str, ...]
    viewport: tuple[int, int]
    place: Callable[[random.Random], Point]
    """Where a step clicks."""
    options: Mapping[str, object] = field(default_factory=dict)


PATIENT = {"step_timeout_seconds": 120.0}  # 64 pages that open at once on two busy cores are late, not broken
SUBJECTS = {
    "miniwob": Subject("miniwob", MINIWOB, (160, 224), lambda rng: Point(0.5, 0.02), PATIENT),
    "browsergym": Subject(
        "gym",
        MINIWOB,
        (332, 214),
        lambda rng: Point(0.9, 0.9),
        {"id": "browsergym/miniwob.{task}", "page_timeout_seconds": 120.0},
    ),
    "ladder": Subject("ladder", task_names(), (96, 96), lambda rng: Point(rng.random(), rng.random()), PATIENT),
    "desktop": Subject("desktop", ("dialog-type", "dialog-check"), (320, 240), lambda rng: Point(0.99, 0.5)),
}


class Row(BaseModel):
    """One world with so many environments; each pair is the least and the most of the rounds, the rest medians."""

    world: str
    environments: int
    rounds: int
    boot_seconds: float
    """Until all environments had booted."""
    starts_per_second: float
    starts_range: tuple[float, float]
    processor_ms_per_start: float
    steps_per_second: float
    steps_range: tuple[float, float]
    processor_ms_per_step: float
    mb_per_environment: float
    load_average: float
    """Of the machine, before the first round."""


@dataclass(slots=True)
class Round:
    boot: float
    starts: float
    start_ms: float
    steps: float
    step_ms: float
    megabytes: float
    """Of all environments."""


@asynccontextmanager
async def worker(subject: Subject, environments: int) -> AsyncIterator[EnvRole]:
    """An env worker whose environments have all booted."""
    environment = Environment(
        kind=subject.kind, viewport=subject.viewport, slots=environments, tasks=TaskSet(names=subject.tasks),
        options=dict(subject.options),
    )  # fmt: skip
    role, said = EnvRole(), asyncio.Queue[pb.Slots]()
    role.patience = PATIENCE_SECONDS
    running: asyncio.Task[None] | None = None
    try:
        await role.prepare(EnvWorkerConfig(environment=environment).model_dump_json())
        running = asyncio.create_task(role.run(said.put_nowait))
        async with asyncio.timeout(BOOT_SECONDS):
            while (await said.get()).count < environments:
                pass
        yield role
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await role.close()


class Episodes:
    """What the environments of a worker are told to do."""

    def __init__(self, role: EnvRole, subject: Subject) -> None:
        self._role, self._subject, self._rng = role, subject, random.Random(1)

    async def begin(self, slot: int) -> None:
        task = Task(self._subject.kind, self._rng.choice(self._subject.tasks), self._rng.randrange(1_000_000))
        await self._role.handle(pb.Reset(assignment=_assignment(slot), task=task_to_proto(task)))

    async def start(self, slot: int) -> None:
        await self.begin(slot)
        await self._role.handle(pb.Release(assignment=_assignment(slot)))

    async def step(self, slot: int) -> None:
        action = action_to_proto(Click(self._subject.place(self._rng)))
        observed = await self._role.handle(pb.Act(assignment=_assignment(slot), action=action))
        if isinstance(observed, pb.Observed) and observed.done:
            await self.begin(slot)


async def measure(subject: Subject, environments: int, seconds: float) -> Round:
    """One round."""
    before, began = _megabytes(), time.perf_counter()
    async with worker(subject, environments) as role:
        boot = time.perf_counter() - began
        episodes, slots = Episodes(role, subject), range(environments)
        await asyncio.gather(*(episodes.start(slot) for slot in slots))  # warm
        starts, start_ms = await _rate(episodes.start, slots, seconds)
        await asyncio.gather(*(episodes.begin(slot) for slot in slots))
        steps, step_ms = await _rate(episodes.step, slots, seconds)
        megabytes = await asyncio.to_thread(_megabytes) - before
    return Round(boot, starts, start_ms, steps, step_ms, megabytes)


async def _rate(command: Callable[[int], Awaitable[None]], slots: Sequence[int], seconds: float) -> tuple[float, float]:
    """Commands per second, and processor milliseconds per command."""
    began, used = time.perf_counter(), _processor_seconds()

    async def repeat(slot: int) -> int:
        count = 0
        while time.perf_counter() < began + seconds:
            await command(slot)
            count += 1
        return count

    counts = await asyncio.gather(*(repeat(slot) for slot in slots))
    wall = time.perf_counter() - began
    return sum(counts) / wall, 1000 * (_processor_seconds() - used) / sum(counts)


def _assignment(slot: int) -> pb.Assignment:
    return pb.Assignment(assignment_id=f"slot-{slot}", attempt=1)


def _processes() -> list[psutil.Process]:
    itself = psutil.Process()
    return [itself, *itself.children(recursive=True)]


def _processor_seconds() -> float:
    """Of the worker and all its processes, those that have ended included."""
    total = 0.0
    for one in _processes():
        try:
            spent = one.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += float(spent.user + spent.system + spent.children_user + spent.children_system)
    return total


def _megabytes() -> float:
    """The proportional share of the worker and all its processes."""
    total = 0
    for one in _processes():
        try:
            total += int(one.memory_full_info().pss)
        except psutil.Error:
            continue
    return total / 1e6


def summarise(world: str, environments: int, rounds: Sequence[Round], load: float) -> Row:
    def median(name: str) -> float:
        return round(float(statistics.median(getattr(one, name) for one in rounds)), 2)

    def ends(name: str) -> tuple[float, float]:
        values = [round(getattr(one, name), 2) for one in rounds]
        return min(values), max(values)

    return Row(
        world=world, environments=environments, rounds=len(rounds), boot_seconds=median("boot"),
        starts_per_second=median("starts"), starts_range=ends("starts"), processor_ms_per_start=median("start_ms"),
        steps_per_second=median("steps"), steps_range=ends("steps"), processor_ms_per_step=median("step_ms"),
        mb_per_environment=round(median("megabytes") / environments, 1), load_average=round(load, 1),
    )  # fmt: skip


def too_little_memory(rows: Sequence[Row], world: str, environments: int) -> str:
    """Why so many environments would not fit, judged by the largest row of the same world; empty if they would."""
    known = [row for row in rows if row.world == world and row.environments < environments]
    if not known:
        return ""
    each = max(known, key=lambda row: row.environments).mb_per_environment
    free = (psutil.virtual_memory().available - SPARE_BYTES) / 1e6
    return f"{environments} x {each:.0f} MB do not fit into {free:,.0f} MB" if environments * each > free else ""


def recorded(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row.model_validate(row) for row in json.loads(path.read_text(encoding="utf-8"))["results"]]


def write(path: Path, rows: Sequence[Row], left_out: Mapping[str, str]) -> None:
    """The rows, instead of those that the file has of the same worlds and numbers."""
    new = {(row.world, row.environments): row for row in [*recorded(path), *rows]}
    order = sorted(new.values(), key=lambda row: (list(SUBJECTS).index(row.world), row.environments))
    what = "real env worker, browsers and desktops; no coordinator, no gRPC"
    results.write(path, "worlds", what, [row.model_dump() for row in order], left_out=dict(left_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", choices=list(SUBJECTS), default=["miniwob", "ladder", "desktop"])
    parser.add_argument("--environments", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each figure is taken")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rows, left_out = list[Row](), dict[str, str]()
    for world in given.worlds:
        for environments in sorted(given.environments):
            if why := too_little_memory(rows, world, environments):
                left_out[f"{world} {environments}"] = why
                print(f"{world} {environments}: {why}", flush=True)
                continue
            load = os.getloadavg()[0]
            rounds = [uvloop.run(measure(SUBJECTS[world], environments, given.seconds)) for _ in range(given.rounds)]
            rows.append(summarise(world, environments, rounds, load))
            print(rows[-1], flush=True)
            write(given.out, rows, left_out)


if __name__ == "__main__":
    main()
