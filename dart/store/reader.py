"""Queries on a database; `Database` adds the writing. Every method sees one consistent state."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, RowMapping, Select, and_, case, exists, func, or_, select

from dart.core.curation.planning import Result
from dart.core.fates import PENDING, TRAINED
from dart.core.progress import StoredCounts
from dart.core.types import Step, Task
from dart.errors import UserError
from dart.store import records as r
from dart.store import tables as t
from dart.store.blobs import BlobStore
from dart.store.engine import Lane, shown

_IDS_PER_QUERY = 512

T = TypeVar("T")
Key = TypeVar("Key", str, bytes)


class Reader:
    """Reads the run that it is bound to, which is at first the newest one when it was opened."""

    def __init__(self, url: URL, reader: Lane, blobs: BlobStore) -> None:
        self.url = url
        self.blobs = blobs
        self._reader = reader
        self._run_id: str | None = None

    @property
    def run_id(self) -> str:
        if self._run_id is None:
            raise UserError(
                f"database {shown(self.url)} holds no run: it is about to begin, or ended before it began: look again, "
                "or start a new one"
            )
        return self._run_id

    async def bind_newest(self) -> None:
        """Bind to the run that started last, if there is one."""
        newest = select(t.runs.c.id).order_by(t.runs.c.started.desc()).limit(1)
        self._run_id = await self._reader.run(lambda connection: connection.execute(newest).scalar_one_or_none())

    async def close(self) -> None:
        self._reader.close()
        self.blobs.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one read transaction, on a thread of its own."""
        return await self._reader.run(work)

    async def _rows(self, statement: Select[Any]) -> Sequence[RowMapping]:
        return await self._reader.run(lambda connection: connection.execute(statement).mappings().all())

    # ---- the run ----

    async def run(self) -> r.RunRecord:
        """Raises UserError where there is none."""
        wanted = self.run_id
        return next(run for run in await self.runs() if run.id == wanted)

    async def runs(self) -> list[r.RunRecord]:
        """Newest first."""
        return [r.run_from_row(row) for row in await self._rows(select(t.runs).order_by(t.runs.c.started.desc()))]

    # ---- trajectories and groups ----

    async def trajectory(self, trajectory_id: str, *, with_images: bool = False) -> r.StoredTrajectory | None:
        """None when there is no such trajectory. `with_images` raises BlobError, and OSError where a directory
        fails."""
        found = await self._reader.run(
            lambda connection: _trajectories(connection, t.trajectories.c.id == trajectory_id)
        )
        if not found:
            return None
        return await self.with_images(found[0]) if with_images else found[0]

    async def list_trajectories(
        self, task_name: str = "", limit: int = 100, before: str = ""
    ) -> list[r.TrajectorySummary]:
        """Newest first. `before`: the last id of the previous page. Empty strings mean all tasks and the first page."""
        c = t.trajectories.c
        wanted = select(t.trajectories).where(c.run_id == self.run_id)
        if task_name:
            wanted = wanted.where(c.task_name == task_name)
        wanted = wanted.order_by(c.finished.desc(), c.id.desc()).limit(limit)

        def read(connection: Connection) -> Sequence[RowMapping]:
            if not before:
                return connection.execute(wanted).mappings().all()
            finished = connection.execute(select(c.finished).where(c.id == before)).scalar_one_or_none()
            if finished is None:
                raise UserError(f"page token {before!r} names no trajectory: use the token of an earlier page")
            older = or_(c.finished < finished, and_(c.finished == finished, c.id < before))
            return connection.execute(wanted.where(older)).mappings().all()

        return [r.summary_from_row(row) for row in await self._reader.run(read)]

    async def unfinished_groups(
        self, states: Sequence[r.GroupState] = (r.GroupState.OPEN, r.GroupState.RELEASED)
    ) -> list[r.StoredGroup]:
        """Training groups that no update has trained on yet, oldest first: a resumed run continues with them.

        Their images come without bytes.
        """
        g = t.groups.c
        ours = (g.run_id == self.run_id, g.kind == r.GroupKind.TRAINING, g.state.in_(states))
        wanted = select(t.groups).where(*ours).order_by(g.opened, g.id)

        def read(connection: Connection) -> list[r.StoredGroup]:
            rows = connection.execute(wanted).mappings().all()
            members: dict[str, list[r.StoredTrajectory]] = {row["id"]: [] for row in rows}
            for ids in chunks(list(members)):
                for stored in _trajectories(connection, t.trajectories.c.group_id.in_(ids)):
                    members[stored.trajectory.group_id].append(stored)
            return [r.group_from_row(row, members[row["id"]]) for row in rows]

        return await self._reader.run(read)

    async def task_histories(self, window: int) -> list[r.TaskHistory]:
        """Each task's last `window` results of training roll-outs, and the lengths of its last `window` successes.

        Collected successes count among the lengths, not among the results. Pooled copies do not count at all.
        """
        c, g = t.trajectories.c, t.groups.c
        seen = self._rollouts(r.GroupKind.TRAINING, r.GroupKind.COLLECTED)
        totals = (
            select(c.task_name, func.max(case((c.success, c.steps))).label("longest"))
            .where(*seen)
            .group_by(c.task_name)
        )

        def of(*kinds: r.GroupKind) -> ColumnElement[bool]:
            # Its group is looked up for each trajectory, of which `window` are read: all groups would be for each task.
            return exists(select(g.id).where(g.id == c.group_id, g.kind.in_(kinds)).correlate(t.trajectories))

        rollouts, successes = of(r.GroupKind.TRAINING), of(r.GroupKind.TRAINING, r.GroupKind.COLLECTED)

        def read(connection: Connection) -> list[r.TaskHistory]:
            histories = []
            for row in connection.execute(totals).mappings().all():
                own = (c.run_id == self.run_id, c.task_name == row["task_name"], c.pooled_from == "")
                last = select(c.success, c.reward, c.steps).where(*own)
                last = last.order_by(c.finished.desc(), c.id.desc()).limit(window)
                ended = connection.execute(last.where(rollouts))
                results = [Result(bool(success), reward) for success, reward, _ in ended]
                lengths = [steps for *_, steps in connection.execute(last.where(successes, c.success))]
                last_ones = tuple(results[::-1]), tuple(lengths[::-1])
                histories.append(r.TaskHistory(row["task_name"], row["longest"], *last_ones))
            return histories

        return await self._reader.run(read)

    async def newest_successes(self, per_task: int | None = None) -> list[r.Success]:
        """At most `per_task` of each task name, oldest first: those of training and those that were collected.

        Only trajectories whose screenshots are kept.
        """
        c = t.trajectories.c
        used = c.pooled_from.label("used")
        copies = select(used, func.count().label("uses")).where(c.run_id == self.run_id).group_by(used).subquery()
        uses = func.coalesce(copies.c.uses, 0).label("uses")
        rows = await self._rows(
            select(t.trajectories, uses)
            .join(copies, copies.c.used == c.id, isouter=True)
            .where(c.id.in_(self._newest_successes(per_task)))
            .order_by(c.finished, c.id)
        )
        return [r.success_from_row(row) for row in rows]

    async def newest_success_ids(self, per_task: int) -> frozenset[str]:
        """Ids of the trajectories that `newest_successes` gives."""
        return frozenset(row["id"] for row in await self._rows(self._newest_successes(per_task)))

    def _newest_successes(self, per_task: int | None) -> Select[tuple[str]]:
        """Selects their ids."""
        c = t.trajectories.c
        wanted = self._rollouts(r.GroupKind.TRAINING, r.GroupKind.COLLECTED)
        place = func.row_number().over(partition_by=c.task_name, order_by=(c.finished.desc(), c.id.desc()))
        ranked = select(c.id, place.label("place")).where(*wanted, c.success, c.screenshots_kept).subquery()
        newest = select(ranked.c.id)
        return newest if per_task is None else newest.where(ranked.c.place <= per_task)

    def _rollouts(self, *kinds: r.GroupKind) -> tuple[ColumnElement[bool], ...]:
        """Conditions: trajectories of this run's groups of these kinds, pooled copies left out."""
        return (*self._in_groups(*kinds), t.trajectories.c.pooled_from == "")

    def _in_groups(self, *kinds: r.GroupKind) -> tuple[ColumnElement[bool], ...]:
        """Conditions: trajectories of this run's groups of these kinds."""
        g, c = t.groups.c, t.trajectories.c
        groups = select(g.id).where(g.run_id == self.run_id, g.kind.in_(kinds))
        return (c.run_id == self.run_id, c.group_id.in_(groups))

    async def group_count(self, kind: r.GroupKind | None = None) -> int:
        """Groups in every state, of one kind or of all."""
        wanted = select(func.count().label("count")).where(t.groups.c.run_id == self.run_id)
        if kind is not None:
            wanted = wanted.where(t.groups.c.kind == kind)
        rows = await self._rows(wanted)
        return int(rows[0]["count"])

    async def recent_outcomes(self, most: int) -> list[tuple[str, bool]]:
        """(name of the task, success) of the last training roll-outs, oldest first; copies from the pool are none."""
        c = t.trajectories.c
        newest = select(c.task_name, c.success).where(*self._rollouts(r.GroupKind.TRAINING))
        newest = newest.order_by(c.finished.desc(), c.id.desc()).limit(most)
        return [(row["task_name"], row["success"]) for row in reversed(await self._rows(newest))]

    async def totals(self) -> StoredCounts:
        """Totals of the training roll-outs and of pooled copies so far."""
        c = t.trajectories.c
        copy = (c.pooled_from != "").label("copy")
        counted = (
            select(
                copy,
                c.fate,
                func.count().label("count"),
                func.sum(c.steps).label("steps"),
                func.sum(case((c.termination == "unparsable", 1), else_=0)).label("unparsable"),
            )
            .where(*self._in_groups(r.GroupKind.TRAINING))
            .group_by(copy, c.fate)
        )
        rows = await self._rows(counted)
        own = [row for row in rows if not row["copy"]]
        fates: dict[str, int] = {}
        for row in rows:
            if row["fate"] != PENDING:
                fates[row["fate"]] = fates.get(row["fate"], 0) + row["count"]
        return StoredCounts(
            trajectories=sum(row["count"] for row in own),
            env_steps=sum(int(row["steps"]) for row in own),
            unparsable=sum(int(row["unparsable"]) for row in own),
            pooled=sum(row["count"] for row in rows if row["copy"]),
            trained_steps=sum(int(row["steps"]) for row in rows if row["fate"] == TRAINED),
            fates=fates,
        )

    async def group(self, group_id: str) -> r.StoredGroup | None:
        """The group, with images without their bytes; None if there is no such group."""

        def read(connection: Connection) -> r.StoredGroup | None:
            row = connection.execute(select(t.groups).where(t.groups.c.id == group_id)).mappings().first()
            if row is None:
                return None
            return r.group_from_row(row, _trajectories(connection, t.trajectories.c.group_id == group_id))

        return await self._reader.run(read)

    async def with_images(self, stored: r.StoredTrajectory) -> r.StoredTrajectory:
        """With the bytes of its steps' screenshots, and without those of its last image, which no prompt has. Raises
        BlobError, and OSError where a directory fails."""
        steps = stored.trajectory.steps
        blobs = await self.blobs.get_many_async(image.sha256 for step in steps for image in step.images)

        def filled(step: Step) -> Step:
            return replace(step, images=tuple(replace(image, data=blobs[image.sha256]) for image in step.images))

        return replace(stored, trajectory=replace(stored.trajectory, steps=tuple(filled(step) for step in steps)))

    # ---- checkpoints, events ----

    async def checkpoints(self) -> list[r.CheckpointRecord]:
        """Checkpoints that are kept, newest first."""
        c = t.checkpoints.c
        kept = select(t.checkpoints).where(c.run_id == self.run_id, c.kept)
        rows = await self._rows(kept.order_by(c.version.desc(), c.created.desc()))
        return [r.CheckpointRecord(**{name: row[name] for name in r.CheckpointRecord.__slots__}) for row in rows]

    async def events_since(self, sequence: int, limit: int = 10_000) -> list[r.Event]:
        """Events from `sequence` on, in order."""
        c = t.events.c
        wanted = select(t.events).where(c.run_id == self.run_id, c.sequence >= sequence)
        rows = await self._rows(wanted.order_by(c.sequence).limit(limit))
        return [r.event_from_row(row) for row in rows]

    async def times_made(self, version: int) -> int:
        """How many updates have made this weight version: more than one if the run resumed from before it."""
        c = t.events.c
        updates = await self._rows(select(c.json).where(c.run_id == self.run_id, c.kind == "update"))
        return sum(json.loads(row["json"])["version"] == version for row in updates)

    async def unopened_submissions(self) -> list[Task]:
        """The submitted tasks of which no training group has been opened since, in their order."""
        e, g = t.events.c, t.groups.c
        events = select(e.json).where(e.run_id == self.run_id, e.kind == "submitted").order_by(e.sequence)
        groups = select(g.id, g.suite, g.task_name, g.seed).where(
            g.run_id == self.run_id, g.kind == r.GroupKind.TRAINING
        )

        def read(connection: Connection) -> list[Task]:
            submissions = [json.loads(event) for event in connection.execute(events).scalars()]
            submitted = [(one["first_group"], Task(*task)) for one in submissions for task in one["tasks"]]
            opened: dict[Task, list[int]] = defaultdict(list)
            for name, *task in connection.execute(groups) if submitted else ():
                opened[Task(*task)].append(int(name.removeprefix("g")))
            for numbers in opened.values():
                numbers.sort()
            return [task for first, task in submitted if not _taken(opened[task], first)]

        return await self._reader.run(read)

    async def newest_events(self, kind: str, limit: int = 1) -> list[r.Event]:
        """The last events of a kind, newest first."""
        return [r.event_from_row(row) for row in await self._rows(select_newest(self.run_id, kind, limit))]

    async def last_sequence(self) -> int:
        """Sequence number of the newest event; 0 if there is none."""
        return int((await self._rows(select_last_sequence(self.run_id)))[0]["last"])


def select_newest(run_id: str, kind: str = "", limit: int = 1, after: int = 0) -> Select[Any]:
    """The last events of a kind, or of all kinds, newest first. `after`: only those with a higher sequence number."""
    c = t.events.c
    wanted = select(t.events).where(c.run_id == run_id, c.sequence > after)
    if kind:
        wanted = wanted.where(c.kind == kind)
    return wanted.order_by(c.sequence.desc()).limit(limit)


def select_last_sequence(run_id: str) -> Select[Any]:
    """`last`: the sequence number of the newest event; 0 if there is none."""
    c = t.events.c
    return select(func.coalesce(func.max(c.sequence), 0).label("last")).where(c.run_id == run_id)


def chunks(ids: Sequence[Key]) -> list[list[Key]]:
    """The ids in lists for `IN`, whose lengths are powers of two: the last list's last id is repeated.

    SQLite's driver keeps the last 128 texts of queries that it has prepared, and a text with 500 ids takes 110 KB. With
    a text for each length, a reader grew to 14 MB; with these there are ten.
    """
    lists = [list(ids[i : i + _IDS_PER_QUERY]) for i in range(0, len(ids), _IDS_PER_QUERY)]
    for one in lists:
        one.extend(one[-1:] * ((1 << (len(one) - 1).bit_length()) - len(one)))
    return lists


def _trajectories(connection: Connection, where: Any) -> list[r.StoredTrajectory]:
    """Trajectories in the order in which they finished, with images without their bytes."""
    c = t.trajectories.c
    rows = connection.execute(select(t.trajectories).where(where).order_by(c.finished, c.id)).mappings().all()
    steps: dict[str, list[Step]] = {row["id"]: [] for row in rows}
    for ids in chunks(list(steps)):
        s = t.steps.c
        wanted = select(t.steps).where(s.trajectory_id.in_(ids)).order_by(s.trajectory_id, s["index"])
        for row in connection.execute(wanted).mappings():
            steps[row["trajectory_id"]].append(r.step_from_row(row))
    return [r.trajectory_from_row(row, steps[row["id"]]) for row in rows]


def _taken(numbers: list[int], first: int) -> bool:
    """Take the least number that is `first` or more from the sorted list. False if there is none."""
    place = bisect.bisect_left(numbers, first)
    if place == len(numbers):
        return False
    del numbers[place]
    return True
