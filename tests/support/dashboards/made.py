"""Run directories for the tests of inspection and of the dashboard, and one evaluation more for such a run."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from dashboards.made_run import Shape, made_run
from sqlalchemy import create_engine, select

from dart.config import load
from dart.inspection.inspector import Inspector
from dart.rundir import RunDirectory
from dart.store.tables import metadata, schema

SMALL = Shape(trajectories=203, steps=6, tasks=5, width=160, height=100)
CONFIG = Path("configs/ladder_demo.yaml")


def small_run(parent: Path, shape: Shape = SMALL) -> RunDirectory:
    return made_run(parent, shape, CONFIG)


async def in_postgresql(run: RunDirectory, parent: Path, url: str) -> RunDirectory:
    """The same run in a directory below `parent`, with its rows in a PostgreSQL database."""
    there = RunDirectory(parent / run.name)
    there.path.mkdir()
    there.settle(load(CONFIG, (f"run.database={url}",)))
    await (await there.open_to_work(create=True)).close()
    server = there.place.url()
    assert server is not None
    source, target = create_engine(f"sqlite:///{run.database}"), create_engine(server)
    with source.connect() as old, target.begin() as new:
        for table in metadata.sorted_tables:
            if table is not schema and (rows := [dict(row) for row in old.execute(select(table)).mappings()]):
                new.execute(table.insert(), rows)
    source.dispose()
    target.dispose()
    shutil.copytree(run.blobs, there.blobs, dirs_exist_ok=True)
    return there


def execute(run: RunDirectory, *statements: tuple[str, Sequence[object]]) -> None:
    """Change the run's database by hand."""
    with closing(sqlite3.connect(run.database)) as connection, connection:
        for statement, values in statements:
            connection.execute(statement, values)


def evaluate(run: RunDirectory, evaluation: str, outcomes: Sequence[bool], opened: float = 1.0) -> None:
    """Add an evaluation of the first task: one episode for each outcome, on seeds from 0."""
    group = f"eval-{evaluation}-task-0000"
    kept = {"run_id": run.name, "suite": "made", "task_name": "task-0000"}
    about = {**kept, "id": group, "kind": "evaluation", "seed": 0, "planned": len(outcomes), "plan": ""}
    insert(run, "groups", {**about, "state": "evaluated", "fate": "evaluated", "opened": opened, "closed": opened + 1})
    for seed, won in enumerate(outcomes):
        episode = {**kept, "id": f"{group}-{seed}", "group_id": group, "seed": seed, "attempt": 1, "steps": 0}
        result = {"termination": "environment", "reward": float(won), "success": won, "step_limit": 30}
        told = {"instruction": "Do it.", "fate": "evaluated", "pooled_from": "", "started": 1.0, "finished": 2.0}
        insert(run, "trajectories", {**episode, **result, **told})


def insert(run: RunDirectory, table: str, row: Mapping[str, object]) -> None:
    places = ", ".join("?" * len(row))
    execute(run, (f"insert into {table} ({', '.join(row)}) values ({places})", tuple(row.values())))


def event(run: RunDirectory, sequence: int, kind: str, data: str) -> None:
    execute(run, ("insert into events values (?, ?, ?, ?, ?)", (run.name, sequence, 1_790_000_000.0, kind, data)))


@asynccontextmanager
async def opened(run: RunDirectory) -> AsyncIterator[Inspector]:
    inspector = await Inspector.open(run)
    try:
        yield inspector
    finally:
        await inspector.close()
