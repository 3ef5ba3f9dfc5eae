"""How many finished trajectories a second a run can store: SQLite and a directory beside PostgreSQL and S3:
`python -m benchmarks.stores`.

What is timed is `Database.add_trajectory`, the write that the coordinator waits for, with 1 and with 32 writers at
once, for trajectories of 30 steps with a screenshot of 300 KB each, and for small ones. In a round each place has its
turn, so that what else the machine does reaches all of them; ratios are within a round. Servers are real and on this
machine: PostgreSQL with its own settings, so that it waits for the disk at every commit, and moto's, a server in Python
that keeps objects in memory, which says how dart copes with S3's protocol and nothing of a real store's speed. SQLite
does not wait for the disk, as in a run. Writes results/stores.json after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL

from benchmarks.stores.servers import no_object_store, no_postgresql, object_store, postgresql
from dart.coordinator.summary import machine, software
from dart.core.action import Click, Point
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan
from dart.store.database import Database, sqlite_url
from dart.store.elsewhere.place import Place

RESULT = Path(__file__).parents[1] / "results" / "stores.json"
TASK = Task("benchmark", "stores", 1)
PLACES = ("sqlite, directory", "postgresql, directory", "sqlite, s3", "postgresql, s3")


@dataclass(frozen=True, slots=True)
class Kind:
    """Of trajectories. `each`: how many are stored in a round with one writer, and with 32."""

    steps: int
    screenshot_bytes: int
    prompt_tokens: int
    tokens: int
    each: tuple[int, int]

    def make(self, number: int) -> Trajectory:
        return Trajectory(
            f"t{number}", "g", TASK, "Do it", tuple(map(self._step, range(self.steps))), Termination.ENVIRONMENT, 1.0,
            True, self.steps, 1.0, float(number),
        )  # fmt: skip

    def _step(self, index: int) -> Step:
        image = Image.of(os.urandom(self.screenshot_bytes), "image/png", 1920, 1080)
        generation = Generation(
            array("I", range(self.prompt_tokens)), array("I", range(self.tokens)), array("f", [-0.5] * self.tokens),
            (VersionSpan(1, 0, self.tokens),), "click(1, 2)",
        )  # fmt: skip
        return Step(index, (image,), generation, Click(Point(0.25, 0.5)))


KINDS = {
    "30 steps, 300 KB": Kind(30, 300_000, 4_000, 200, (4, 32)),
    "3 steps, 3 KB": Kind(3, 3_000, 200, 20, (60, 160)),
}


async def rate(database: URL | str, blobs: str, trajectories: Sequence[Trajectory], writers: int) -> float:
    """Trajectories stored per second."""
    async with await Database.open(database, blobs) as opened:
        await opened.start_run("r", "stores", {}, started=1.0)
        await opened.open_group("g", TASK, len(trajectories), 1.0)
        waiting = iter(trajectories)

        async def write() -> None:
            for one in waiting:
                await opened.add_trajectory(one)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(writers):
                tasks.create_task(write())
        return len(trajectories) / (time.perf_counter() - began)


def one_round(server: str, bucket: str, number: int) -> dict[str, dict[str, float]]:
    """Cell → place → trajectories per second. The places' order changes from round to round."""
    found: dict[str, dict[str, float]] = {}
    for name, kind in KINDS.items():
        for writers, count in zip((1, 32), kind.each, strict=True):
            rates = found.setdefault(f"{name}, {writers} writers", {})
            trajectories = [kind.make(one) for one in range(count)]
            for place in PLACES[number % len(PLACES) :] + PLACES[: number % len(PLACES)]:
                folder = Path(tempfile.mkdtemp(prefix="dart-stores-"))
                elsewhere = Place.of("benchmark", server, bucket)
                url = elsewhere.url() if place.startswith("postgresql") else sqlite_url(folder / "run.db")
                blobs = elsewhere.folder() if place.endswith("s3") else str(folder / "blobs")
                assert url is not None and blobs is not None
                rates[place] = asyncio.run(rate(url, blobs, trajectories, writers))
                shutil.rmtree(folder)
    return found


def summary(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Cell → place → median rate, and the median ratio to SQLite and a directory in the same round."""
    return {
        cell: {
            place: {
                "per_second": round(statistics.median(one[cell][place] for one in rounds), 2),
                "beside_sqlite": round(statistics.median(one[cell][place] / one[cell][PLACES[0]] for one in rounds), 3),
            }
            for place in PLACES
        }
        for cell in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if why := no_postgresql() or no_object_store():
        raise SystemExit(why)
    rounds: list[dict[str, dict[str, float]]] = []
    with postgresql() as server, object_store() as store:
        os.environ.update(store.environment)
        for number in range(options.rounds):
            rounds.append(one_round(server.url, store.url, number))
            write(options.output, rounds)


def write(output: Path, rounds: Sequence[dict[str, dict[str, float]]]) -> None:
    """After each round, so that an interruption loses one round."""
    written = {
        "what": "trajectories stored per second; beside_sqlite: median of the ratios within a round",
        "real": "SQLite, directory, PostgreSQL (its default settings, fsync on, by its Unix socket). The object store "
        "is moto's server on this machine: the protocol is real, its speed says nothing of a real store's.",
        "machine": machine() | {"load_average": round(os.getloadavg()[0], 1)},
        "versions": software(),
        "cells": summary(rounds),
        "rounds": rounds,
    }
    output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written["cells"], indent=1), flush=True)


if __name__ == "__main__":
    main()
