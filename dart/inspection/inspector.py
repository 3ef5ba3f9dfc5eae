"""One run to look at: a method for each page. Open it, ask, close it; nothing of the run is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import func, select

from dart.inspection import comparison, condition, curves, events, runs, tasks, timeline, trajectories
from dart.inspection import records as r
from dart.inspection.opening import RunFiles, told
from dart.rundir import RunDirectory
from dart.store import tables as t

Asked = ParamSpec("Asked")
Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Pulse:
    """How far a run has come: what has changed since another pulse can be told by comparing them."""

    last: int
    """The sequence number of its newest event."""
    updates: int
    trajectories: int
    state: str


def _of_files(
    read: Callable[Concatenate[RunFiles, Asked], Coroutine[Any, Any, Told]],
) -> Callable[Concatenate[Inspector, Asked], Coroutine[Any, Any, Told]]:
    """The method of `Inspector` that gives what `read` finds in its files."""

    @functools.wraps(read)
    async def method(self: Inspector, /, *asked: Asked.args, **named: Asked.kwargs) -> Told:
        with told(f"what is shown here ({read.__name__}) of run {self.files.id}"):
            return await read(self.files, *asked, **named)

    return method


class Inspector:
    """Methods raise UserError where the database cannot be read, and NotFound for what is not in the run."""

    def __init__(self, files: RunFiles) -> None:
        self.files = files
        self.run_id = files.run_id

    @classmethod
    async def open(cls, directory: RunDirectory, id: str | None = None) -> Inspector:
        """`id`: as in `RunFiles.open`. Raises UserError where there is no run that this dart can read."""
        return cls(await RunFiles.open(directory, id))

    async def close(self) -> None:
        await self.files.close()

    # A method with the name of a module hides the module from the lines below it, so it comes after its other methods.
    row = _of_files(runs.run_row)
    overview = _of_files(runs.overview)
    status = _of_files(condition.condition)
    curves = _of_files(curves.curves)
    episodes = _of_files(timeline.episodes)
    task = _of_files(tasks.task)
    tasks = _of_files(tasks.tasks)
    trajectory = _of_files(trajectories.trajectory)
    group = _of_files(trajectories.group)
    trajectories = _of_files(trajectories.trajectories)
    events = _of_files(events.events)
    sides = _of_files(comparison.sides)

    async def timeline(self, start: float | None = None, end: float | None = None) -> r.Timeline:
        with told(f"the timeline of run {self.files.id}"):
            return await timeline.timeline(self.files, start, end)

    async def image(self, sha256: str) -> tuple[bytes, str]:
        """A screenshot's bytes and media type."""
        return await self.files.image(sha256)

    async def pulse(self) -> Pulse:
        record = await self.files.record()
        v, c = t.versions.c, t.trajectories.c
        counted = select(
            # Not the largest: a run that resumed from an earlier checkpoint makes updates again.
            select(v.update)
            .where(v.run_id == self.run_id)
            .order_by(v.created.desc())
            .limit(1)
            .scalar_subquery()
            .label("updates"),
            select(func.count())
            .select_from(t.trajectories)
            .where(c.run_id == self.run_id)
            .scalar_subquery()
            .label("n"),
        )
        rows = await self.files.rows(counted)
        with told(f"the progress of run {self.files.id}"):
            return Pulse(
                await condition.last_sequence(self.files),
                int(rows[0]["updates"] or 0),
                int(rows[0]["n"]),
                str(self.files.directory.state(record)),
            )


async def compare(first: Inspector, first_evaluation: str, second: Inspector, second_evaluation: str) -> r.Comparison:
    """The second side against the first (`comparison.compare`)."""
    with told(f"run {first.files.id}, or {second.files.id},"):
        return await comparison.compare(first.files, first_evaluation, second.files, second_evaluation)
