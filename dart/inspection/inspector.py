"""One run to look at: a method for each page. Open it, ask, close it; nothing of the run is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select

from dart.inspection import comparison, condition, curves, events, runs, tasks, timeline, trajectories
from dart.inspection import records as r
from dart.inspection.opening import RunFiles
from dart.rundir import RunDirectory
from dart.store import tables as t


@dataclass(frozen=True, slots=True)
class Pulse:
    """How far a run has come: what has changed since another pulse can be told by comparing them."""

    last: int
    """The sequence number of its newest event."""
    updates: int
    trajectories: int
    state: str


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

    async def row(self) -> r.RunRow:
        return await runs.run_row(self.files)

    async def overview(self) -> r.RunOverview:
        return await runs.overview(self.files)

    async def status(self) -> r.RunStatus:
        return await condition.condition(self.files)

    async def curves(self) -> r.Curves:
        return await curves.curves(self.files)

    async def timeline(self, start: float | None = None, end: float | None = None) -> r.Timeline:
        return await timeline.timeline(self.files, start, end)

    async def episodes(self, start: float, end: float) -> r.Episodes:
        return await timeline.episodes(self.files, start, end)

    async def tasks(self) -> list[r.TaskRow]:
        return await tasks.tasks(self.files)

    async def task(self, suite: str, name: str) -> r.TaskDetail:
        return await tasks.task(self.files, suite, name)

    async def trajectories(
        self,
        *,
        kind: str = "",
        suite: str = "",
        task: str = "",
        success: bool | None = None,
        fate: str = "",
        after: str = "",
        limit: int = 100,
    ) -> r.TrajectoryPage:
        return await trajectories.trajectories(
            self.files, kind=kind, suite=suite, task=task, success=success, fate=fate, after=after, limit=limit
        )

    async def trajectory(self, trajectory_id: str) -> r.TrajectoryDetail:
        return await trajectories.trajectory(self.files, trajectory_id)

    async def group(self, group_id: str) -> r.GroupDetail:
        return await trajectories.group(self.files, group_id)

    async def events(
        self,
        *,
        kinds: Sequence[str] = (),
        text: str = "",
        worker: str = "",
        task: str = "",
        start: float | None = None,
        end: float | None = None,
        before: int = 0,
        limit: int = 100,
    ) -> r.EventPage:
        return await events.events(
            self.files,
            kinds=kinds,
            text=text,
            worker=worker,
            task=task,
            start=start,
            end=end,
            before=before,
            limit=limit,
        )

    async def sides(self) -> list[r.Side]:
        return await comparison.sides(self.files)

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
        return Pulse(
            await condition.last_sequence(self.files),
            int(rows[0]["updates"] or 0),
            int(rows[0]["n"]),
            str(self.files.directory.state(record)),
        )


async def compare(first: Inspector, first_evaluation: str, second: Inspector, second_evaluation: str) -> r.Comparison:
    """The second side against the first (`comparison.compare`)."""
    return await comparison.compare(first.files, first_evaluation, second.files, second_evaluation)
