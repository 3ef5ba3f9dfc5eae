"""Run directories for the tests of inspection and of the dashboard, and one evaluation more for such a run."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.dashboard.made_run import Shape, made_run
from dart.rundir import RunDirectory

SMALL = Shape(trajectories=203, steps=6, tasks=5, width=160, height=100)
CONFIG = Path("configs/ladder_demo.yaml")


def small_run(parent: Path, shape: Shape = SMALL) -> RunDirectory:
    return made_run(parent, shape, CONFIG)


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
