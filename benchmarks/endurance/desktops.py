"""Do desktops leave anything behind? `python -m benchmarks.endurance.desktops --episodes 100 --desktops 16`.

Real: the env worker's role with the world `desktop`, applications, input and the oracle; there is no coordinator and no
gRPC. Episodes of all light tasks run on so many desktops at once, each on a desktop of its own. Writes
results/desktops.json: rewards, seconds per reset, steps per second, memory of a desktop by its processes' proportional
share. Exits with 1 if a process, folder, X socket, thread or open file is left, or if the oracle failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from benchmarks.results import write
from dart.config import Environment, EnvWorkerConfig, TaskSet
from dart.core.action import Finish
from dart.core.types import Task
from dart.v1 import session_pb2 as pb
from dart.wire.convert import action_from_proto, action_to_proto, task_to_proto
from dart.wire.role import CommandError
from dart.workers.env.desktop.tasks import load, task_names
from dart.workers.env.role import EnvRole

RESULT = Path(__file__).parents[1] / "results" / "desktops.json"
LARGE = {"chromium", "soffice", "gimp"}
MOST_STEPS = 20


@dataclass
class Seen:
    """What was seen of the episodes."""

    rewards: list[float] = field(default_factory=list)
    resets: list[float] = field(default_factory=list)
    """Seconds."""
    steps: list[float] = field(default_factory=list)
    """Seconds."""
    megabytes: list[float] = field(default_factory=list)
    """Of all desktops together, during the run."""
    failed: list[str] = field(default_factory=list)


def light_tasks() -> tuple[str, ...]:
    return tuple(name for name in task_names() if not LARGE & set(load(name).needs))


async def run(episodes: int, desktops: int, names: Sequence[str], size: tuple[int, int]) -> tuple[Seen, float]:
    """The episodes on an env worker of their own; what was seen, and the seconds that they took."""
    seen, role, said = Seen(), EnvRole(), asyncio.Queue[pb.Slots]()
    environment = Environment(kind="desktop", viewport=size, slots=desktops, tasks=TaskSet(names=tuple(names)))
    await role.prepare(EnvWorkerConfig(environment=environment).model_dump_json())
    running = asyncio.create_task(role.run(said.put_nowait))
    try:
        while (await said.get()).count < desktops:
            pass
        role.patience = 600.0
        left = iter(range(episodes))
        began = time.perf_counter()

        async def work() -> None:
            for number in left:
                await _episode(role, number, names[number % len(names)], seen)

        async with asyncio.TaskGroup() as tasks:
            weighing = tasks.create_task(_weigh(seen))
            await asyncio.gather(*(work() for _ in range(desktops)))
            seconds = time.perf_counter() - began
            weighing.cancel()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await role.close()
    return seen, seconds


async def _episode(role: EnvRole, number: int, name: str, seen: Seen) -> None:
    """One episode by the oracle; a failure of the environment is counted, not repeated."""
    assignment = pb.Assignment(assignment_id=str(number), attempt=1)
    task = task_to_proto(Task("desktop", name, number))
    try:
        began = time.perf_counter()
        await role.handle(pb.Reset(assignment=assignment, task=task))
        seen.resets.append(time.perf_counter() - began)
        for _ in range(MOST_STEPS):
            suggested = await role.handle(pb.Suggest(assignment=assignment))
            assert isinstance(suggested, pb.Suggested)
            action = action_from_proto(suggested.action) if suggested.HasField("action") else Finish()
            began = time.perf_counter()
            observed = await role.handle(pb.Act(assignment=assignment, action=action_to_proto(action)))
            assert isinstance(observed, pb.Observed)
            if observed.done:
                seen.rewards.append(observed.reward)
                if observed.reward < 1:
                    seen.failed.append(f"{name}#{number}: {observed.evidence_json}")
                break
            seen.steps.append(time.perf_counter() - began)
    except CommandError as error:
        seen.failed.append(f"{name}#{number}: {error}")
    finally:
        await role.handle(pb.Release(assignment=assignment))


async def _weigh(seen: Seen) -> None:
    while True:
        await asyncio.sleep(2.0)
        seen.megabytes.append(await asyncio.to_thread(_megabytes))


def _megabytes() -> float:
    """The proportional share of this process's descendants, in MB."""
    total = 0
    for one in psutil.Process().children(recursive=True):
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total / 1e6


def left_over(folder: Path, sockets: set[str], threads: int, files: int) -> dict[str, list[str] | int]:
    """What is there that was not before: processes, folders, sockets, threads, open files."""
    itself = psutil.Process()
    return {
        "processes": [" ".join(one.cmdline()) or one.name() for one in itself.children(recursive=True)],
        "folders": [one.name for one in folder.iterdir()],
        "sockets": sorted(dead_sockets() - sockets),
        "threads": max(0, threading.active_count() - threads),
        "open_files": max(0, itself.num_fds() - files),
    }


def dead_sockets() -> set[str]:
    """X sockets on which nobody listens."""
    found = set()
    for one in Path("/tmp/.X11-unix").glob("X*"):
        with socket.socket(socket.AF_UNIX) as knocking, contextlib.suppress(FileNotFoundError):
            try:
                knocking.connect(str(one))
            except ConnectionRefusedError:
                found.add(one.name)
    return found


def row(desktops: int, seen: Seen, seconds: float) -> dict[str, float]:
    return {
        "desktops": desktops,
        "episodes": len(seen.rewards),
        "reward": round(statistics.fmean(seen.rewards or [0.0]), 3),
        "failed": len(seen.failed),
        "episodes_per_minute": round(60 * len(seen.rewards) / seconds, 1),
        "reset_seconds_median": round(statistics.median(seen.resets), 2),
        "step_seconds_median": round(statistics.median(seen.steps), 3),
        "steps_per_second": round(len(seen.steps) / seconds, 2),
        "mb_per_desktop": round(statistics.median(seen.megabytes or [0.0]) / desktops, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--desktops", type=int, default=16)
    parser.add_argument("--size", type=int, nargs=2, default=(640, 480), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    size = (given.size[0], given.size[1])
    names, rows, failed = light_tasks(), list[dict[str, float]](), list[str]()
    with tempfile.TemporaryDirectory(prefix="desks-") as folder:
        tempfile.tempdir = folder  # so that no other worker's desktops are counted
        uvloop.run(run(1, 1, names, size))  # loads what every run needs
        sockets, threads, files = dead_sockets(), threading.active_count(), psutil.Process().num_fds()
        for desktops, episodes in ((1, len(names)), (given.desktops, given.episodes)):
            seen, seconds = uvloop.run(run(episodes, desktops, names, size))
            rows.append(row(desktops, seen, seconds))
            failed += seen.failed
            print(rows[-1], flush=True)
        left = left_over(Path(folder), sockets, threads, files)
    print("left over:", left)
    print("\n".join(failed))
    write(
        given.out,
        "desktops",
        "real env worker, desktops and applications; no coordinator, no gRPC",
        rows,
        load_average=round(psutil.getloadavg()[0], 1),
        left_over=left,
        failed=failed,
    )
    sys.exit(1 if failed or any(left.values()) else 0)


if __name__ == "__main__":
    main()
