"""What one env worker does with the worlds that ship with dart: `python -m benchmarks.learning.worlds`.

Real: the env worker's role with its environments, Chromium, pages, input and screenshots; commands and answers are the
protocol's messages. There is no coordinator and no gRPC. Each environment is reset, or acted on, as soon as it has
answered. Steps are clicks: at random places on the ladder, where no wrong choice ends an episode; on MiniWoB beside the
task, because a click on it usually ends the episode. The worlds take turns, `--rounds` times; the result is the median
round, with the range. Processor time is that of the worker and all of Chromium's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from dart.config import Environment, EnvWorkerConfig, TaskSet
from dart.coordinator.summary import machine, software, write_json
from dart.core.action import Click, Point
from dart.core.types import Task
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_to_proto, task_to_proto
from dart.workers.env.ladder_layout import task_names
from dart.workers.env.role import EnvRole

RESULT = Path(__file__).parent.parent / "results" / "worlds.json"
Row = dict[str, float | list[float]]


@dataclass(frozen=True, slots=True)
class Subject:
    kind: str
    tasks: tuple[str, ...]
    viewport: tuple[int, int]
    place: Callable[[random.Random], Point]
    """Where a step clicks."""


SUBJECTS = (
    Subject(
        "miniwob",
        ("click-color", "click-dialog", "focus-text-2", "enter-text"),
        (160, 224),
        lambda rng: Point(0.5, 0.02),
    ),
    Subject("ladder", task_names(), (96, 96), lambda rng: Point(rng.random(), rng.random())),
)


@asynccontextmanager
async def worker(subject: Subject, slots: int) -> AsyncIterator[EnvRole]:
    """An env worker whose environments have all booted."""
    environment = Environment(
        kind=subject.kind, viewport=subject.viewport, slots=slots, tasks=TaskSet(names=subject.tasks)
    )
    role, said = EnvRole(), asyncio.Queue[pb.Slots]()
    try:
        await role.prepare(EnvWorkerConfig(environment=environment).model_dump_json())
        running = asyncio.create_task(role.run(said.put_nowait))
        while (await said.get()).count < slots:
            pass
        yield role
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        await role.close()


async def measure(subject: Subject, slots: int, seconds: float) -> dict[str, float]:
    """Resets and steps per second, and their processor milliseconds."""
    rng = random.Random(1)

    def reset(slot: int) -> pb.Reset:
        task = Task(subject.kind, rng.choice(subject.tasks), rng.randrange(1_000_000))
        return pb.Reset(assignment=_assignment(slot), task=task_to_proto(task))

    def act(slot: int) -> pb.Act:
        return pb.Act(assignment=_assignment(slot), action=action_to_proto(Click(subject.place(rng))))

    async with worker(subject, slots) as role:
        await _rate(role, reset, slots, 1.0)  # warm
        found = {}
        for name, command in (("reset", reset), ("step", act)):
            found[f"{name}s_per_second"], found[f"processor_ms_per_{name}"] = await _rate(role, command, slots, seconds)
    return found


async def _rate(
    role: EnvRole, command: Callable[[int], pb.Reset | pb.Act], slots: int, seconds: float
) -> tuple[float, float]:
    """Commands per second, and processor milliseconds per command."""
    began, used = time.perf_counter(), _processor_seconds()

    async def repeat(slot: int) -> int:
        count = 0
        while time.perf_counter() < began + seconds:
            await role.handle(command(slot))
            count += 1
        return count

    counts = await asyncio.gather(*(repeat(slot) for slot in range(slots)))
    wall = time.perf_counter() - began
    return sum(counts) / wall, 1000 * (_processor_seconds() - used) / sum(counts)


def _assignment(slot: int) -> pb.Assignment:
    return pb.Assignment(assignment_id=f"slot-{slot}", attempt=1)


def _processor_seconds() -> float:
    itself = psutil.Process()
    times = [one.cpu_times() for one in (itself, *itself.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def summarise(rounds: list[dict[str, float]]) -> Row:
    """The median of each figure, and its least and its most."""
    row: Row = {}
    for name in rounds[0]:
        values = sorted(one[name] for one in rounds)
        row[name] = round(statistics.median(values), 2)
        row[f"{name}_range"] = [round(values[0], 2), round(values[-1], 2)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {subject.kind: [] for subject in SUBJECTS}
    load = os.getloadavg()[0]
    for _ in range(given.rounds):
        for subject in SUBJECTS:
            rounds[subject.kind].append(uvloop.run(measure(subject, given.slots, given.seconds)))
    results = {kind: summarise(found) for kind, found in rounds.items()}
    record = {
        "name": "worlds",
        "real_or_simulated": "real env worker and Chromium; no coordinator, no gRPC",
        "machine": machine(),
        "versions": software(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average_before": round(load, 1),
        "slots": given.slots,
        "rounds": given.rounds,
        "results": results,
    }
    write_json(given.out, record)
    for kind, row in results.items():
        print(f"{kind:8s} " + ", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
