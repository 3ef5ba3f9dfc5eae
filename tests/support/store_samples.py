"""Trajectories for the store's tests, and a writer process that they kill: store_samples.py DATABASE BLOBS."""

from __future__ import annotations

import asyncio
import itertools
import sys
from array import array
from collections import Counter

from sqlalchemy import URL, create_engine, inspect

from dart.core.action import Click, Point
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan
from dart.store.database import Database, Reader

TASK = Task("miniwob", "click-color", 17)


def image(text: str, size: int = 1000) -> Image:
    return Image.of(text.encode().ljust(size, b"."), "image/png", 160, 210)


async def fates(database: Reader) -> dict[str, int]:
    """Fate → number of trajectories."""
    return Counter(row.fate for row in await database.list_trajectories(limit=10_000))


def shape(url: URL) -> dict[str, object]:
    """Tables with their columns, keys and indexes, as the database itself tells."""
    engine = create_engine(url)
    there = inspect(engine)
    found = {
        name: (
            # In PostgreSQL, columns that a migration adds have the server's collation: none of them is ordered by.
            {
                column["name"]: (str(column["type"]).removesuffix(' COLLATE "C"'), column["nullable"])
                for column in there.get_columns(name)
            },
            there.get_pk_constraint(name)["constrained_columns"],
            sorted((one["name"], tuple(one["column_names"])) for one in there.get_indexes(name)),
            sorted((tuple(one["constrained_columns"]), one["referred_table"]) for one in there.get_foreign_keys(name)),
        )
        for name in there.get_table_names()
        if name != "alembic_version"
    }
    engine.dispose()
    return found


def trajectory(name: str, group: str, task: Task = TASK, finished: float = 2.0, steps: int = 3) -> Trajectory:
    images = tuple(image(f"{name}-{index}") for index in range(steps))
    made = tuple(
        Step(
            index,
            images[: index + 1],
            Generation(
                array("I", (1, 2, 151_655)),
                array("I", (7, 8)),
                array("f", (-0.5, -0.25)),
                (VersionSpan(3, 0, 2),),
                "click(1, 2)",
            ),
            Click(Point(0.25, 0.5)),
        )
        for index in range(steps)
    )
    return Trajectory(name, group, task, "Click red", made, Termination.ENVIRONMENT, 1.0, True, 10, 1.0, finished)


async def write_for_ever(database_url: str, blobs: str) -> None:
    """Prints the id of every trajectory that was confirmed."""
    async with await Database.open(database_url, blobs) as database:
        await database.start_run("run-1", "killed", {}, started=1.0)
        await database.open_group("group-1", TASK, 8, 1.0)

        async def write(writer: int) -> None:
            for number in itertools.count():
                name = f"t-{writer}-{number}"
                await database.add_trajectory(trajectory(name, "group-1"))
                print(name, flush=True)

        async with asyncio.TaskGroup() as group:
            for writer in range(4):
                group.create_task(write(writer))


if __name__ == "__main__":
    asyncio.run(write_for_ever(*sys.argv[1:]))
