"""The table of tasks, and one task's history: success, its number of roll-outs and step limit, why, and its pool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, case, func, select, true

from dart.inspection.condition import last_figures
from dart.inspection.opening import NotFound, RunFiles, said
from dart.inspection.records import PlanChange, PoolEntry, TaskDetail, TaskPoint, TaskRow
from dart.store import tables as t
from dart.store.records import GroupKind

RECENT = 32
MOST_POINTS = 60
LEAST_IN_POINT = 8
MOST_CHANGES = 200
_c, _g = t.trajectories.c, t.groups.c
Key = tuple[str, str]
"""A task's suite and name."""


@dataclass(frozen=True, slots=True)
class _PoolRules:
    """`curation.pool` of the run. `oldest`: the oldest version that may be pooled, if the age is limited."""

    per_task: int
    oldest: int | None

    @classmethod
    async def of(cls, files: RunFiles) -> _PoolRules:
        config: Any = (await files.record()).config
        pool = config.get("curation", {}).get("pool", {})
        if not pool.get("enabled", True):
            return cls(0, None)
        figures, age = await last_figures(files), pool.get("max_age")
        newest = figures.counts.version if figures else 0
        return cls(int(pool.get("per_task", 8)), newest - int(age) if age is not None else None)

    @property
    def usable(self) -> ColumnElement[bool]:
        """A success that the pool may hold."""
        # What no policy sampled has no version; the pool takes it for one of version 0 (`records.success_from_row`).
        young = true() if self.oldest is None else func.coalesce(_c.newest_version, 0) >= self.oldest
        return and_(_c.success, _c.screenshots_kept, _c.pooled_from == "", young)


async def tasks(files: RunFiles) -> list[TaskRow]:
    """Every task that has a trajectory or an open group."""
    rules = await _PoolRules.of(files)
    return await files.read(lambda connection: _rows(connection, files.run_id, rules, _kind(connection, files.run_id)))


async def task(files: RunFiles, suite: str, name: str) -> TaskDetail:
    """Raises NotFound."""
    rules = await _PoolRules.of(files)

    def read(connection: Connection) -> TaskDetail:
        kind = _kind(connection, files.run_id, suite, name)
        rows = _rows(connection, files.run_id, rules, kind, suite, name)
        if not rows:
            raise NotFound(f"task {suite}/{name} is not in run {files.run_id}")
        return TaskDetail(
            rows[0],
            _history(connection, files.run_id, kind, suite, name),
            _plans(connection, files.run_id, name),
            _pool(connection, files.run_id, rules, suite, name) if kind == GroupKind.TRAINING else (),
        )

    return await files.read(read)


def _kind(connection: Connection, run_id: str, suite: str = "", name: str = "") -> str:
    """The kind of groups that the table, or the page of one task, is about: training, where there is any."""
    own = [_g.run_id == run_id, *((_g.suite == suite, _g.task_name == name) if name else ())]
    there = select(_g.id).where(*own, _g.kind == GroupKind.TRAINING).limit(1)
    if connection.execute(there).first() is not None:
        return GroupKind.TRAINING
    first = connection.execute(select(_g.kind).where(*own).limit(1)).scalar_one_or_none()
    return first or GroupKind.TRAINING


def _rows(
    connection: Connection, run_id: str, rules: _PoolRules, kind: str, suite: str = "", name: str = ""
) -> list[TaskRow]:
    own: list[ColumnElement[bool]] = [_c.run_id == run_id]
    own_groups: list[ColumnElement[bool]] = [_g.run_id == run_id, _g.kind == kind]
    if name:
        own += [_c.suite == suite, _c.task_name == name]
        own_groups += [_g.suite == suite, _g.task_name == name]
    totals = {(row["suite"], row["task_name"]): row for row in connection.execute(_totals(own, kind, rules)).mappings()}
    trains, collects = kind == GroupKind.TRAINING, kind == GroupKind.COLLECTED
    collected = _collected(connection, own, rules) if trains else {}
    recent = _recent(connection, own_groups, kind)
    found = []
    for group in connection.execute(_last_groups(own_groups)).mappings():
        key = (group["suite"], group["task_name"])
        total, last = totals.get(key), recent[key]
        usable = int(total["pooled"] or 0) if total else 0
        found.append(
            TaskRow(
                suite=key[0],
                name=key[1],
                trajectories=total["count"] if total else 0,
                successes=None if collects else int(total["successes"] or 0) if total else 0,
                recent_success=None if collects else last["success"],
                mean_steps=round(float(total["mean_steps"]), 2) if total and total["count"] else None,
                rollouts=group["planned"],
                step_limit=last["step_limit"],
                plan=group["plan"],
                pooled=min(rules.per_task, usable + collected.get(key, 0)) if trains else 0,
                copies=int(total["copies"] or 0) if total else 0,
                last_finished=total["last"] if total else None,
            )
        )
    return sorted(found, key=lambda row: (row.suite, row.name))


def _collected(connection: Connection, own: Sequence[ColumnElement[bool]], rules: _PoolRules) -> dict[Key, int]:
    """By task, the successes of `curation.pool.sources` that the pool may use."""
    groups = select(_g.id).where(_g.kind == GroupKind.COLLECTED)
    wanted = (
        select(_c.suite, _c.task_name, func.count())
        .where(*own, rules.usable, _c.group_id.in_(groups))
        .group_by(_c.suite, _c.task_name)
    )
    return {(suite, name): count for suite, name, count in connection.execute(wanted)}


def _of_kind(kind: str) -> ColumnElement[bool]:
    """Trajectories in groups of the kind. Groups of other kinds are few where training's are counted, so they are
    looked up instead: a join finds the group of each trajectory, which takes twice as long for 100,000 of them."""
    return _c.group_id.not_in(select(_g.id).where(_g.kind != kind))


def _totals(own: Sequence[ColumnElement[bool]], kind: str, rules: _PoolRules) -> Any:
    """Counts by task. PostgreSQL's mean of whole numbers is a Decimal."""
    copy = _c.pooled_from != ""
    pooled = case((rules.usable, 1), else_=0)
    return (
        select(
            _c.suite,
            _c.task_name,
            func.sum(case((copy, 0), else_=1)).label("count"),
            func.sum(case((~copy & _c.success, 1), else_=0)).label("successes"),
            func.avg(case((copy, None), else_=_c.steps)).label("mean_steps"),
            func.sum(pooled).label("pooled"),
            func.sum(case((copy, 1), else_=0)).label("copies"),
            func.max(_c.finished).label("last"),
        )
        .where(*own, _of_kind(kind))
        .group_by(_c.suite, _c.task_name)
    )


def _last_groups(own: Sequence[ColumnElement[bool]]) -> Any:
    """Each task's newest group."""
    newest_first = func.row_number().over(
        partition_by=(_g.suite, _g.task_name), order_by=(_g.opened.desc(), _g.id.desc())
    )
    groups = select(_g.suite, _g.task_name, _g.planned, _g.plan, newest_first.label("place")).where(*own).subquery()
    return select(groups).where(groups.c.place == 1)


def _recent(connection: Connection, own: Sequence[ColumnElement[bool]], kind: str) -> Mapping[Key, RowMapping]:
    """Success of each task's last `RECENT` trajectories, and the step limit of the last one, read by the index of tasks
    and times; None where it has none."""
    tasks = select(_g.suite, _g.task_name, _g.run_id).where(*own).distinct().subquery()

    def newest_first(value: ColumnElement[Any]) -> Select[Any]:
        return (
            select(value.label("value"))
            .where(
                _c.run_id == tasks.c.run_id, _c.task_name == tasks.c.task_name, _c.suite == tasks.c.suite,
                _c.pooled_from == "", _of_kind(kind),
            )
            .order_by(_c.finished.desc(), _c.id.desc())
            .correlate(tasks)
        )  # fmt: skip

    won = newest_first(case((_c.success, 1.0), else_=0.0)).limit(RECENT).subquery()
    success = select(func.avg(won.c.value)).scalar_subquery()
    step_limit = newest_first(_c.step_limit).limit(1).scalar_subquery()
    found = connection.execute(
        select(tasks.c.suite, tasks.c.task_name, success.label("success"), step_limit.label("step_limit"))
    )
    return {(row["suite"], row["task_name"]): row for row in found.mappings()}


def _history(connection: Connection, run_id: str, kind: str, suite: str, name: str) -> tuple[TaskPoint, ...]:
    if kind == GroupKind.COLLECTED:  # its failures are not stored
        return ()
    wanted = (
        select(_c.finished, _c.success, _c.steps, _c.step_limit, _g.planned)
        .join(t.groups, _g.id == _c.group_id)
        .where(_c.run_id == run_id, _c.suite == suite, _c.task_name == name, _c.pooled_from == "", _g.kind == kind)
        .order_by(_c.finished, _c.id)
    )
    rows = connection.execute(wanted).mappings().all()
    points = min(MOST_POINTS, -(-len(rows) // LEAST_IN_POINT))
    bounds = [index * len(rows) // points for index in range(points + 1)] if rows else []
    return tuple(_point(rows[begin:end]) for begin, end in pairwise(bounds))


def _point(rows: Sequence[RowMapping]) -> TaskPoint:
    count = len(rows)
    return TaskPoint(
        start=rows[0]["finished"],
        end=rows[-1]["finished"],
        trajectories=count,
        successes=sum(bool(row["success"]) for row in rows),
        mean_steps=round(sum(row["steps"] for row in rows) / count, 2),
        step_limit=round(sum(row["step_limit"] for row in rows) / count, 2),
        rollouts=round(sum(row["planned"] for row in rows) / count, 2),
    )


def _plans(connection: Connection, run_id: str, name: str) -> tuple[PlanChange, ...]:
    c = t.events.c
    told = connection.execute(
        select(c.unix_seconds, c.json)
        .where(c.run_id == run_id, c.kind == "plan", c.json.contains(json.dumps(name), autoescape=True))
        .order_by(c.sequence.desc())
        .limit(MOST_CHANGES)
    )
    changes = [(when, said(text)) for when, text in told]
    return tuple(PlanChange(when, str(data.get("reason", ""))) for when, data in changes if data.get("task") == name)


def _pool(connection: Connection, run_id: str, rules: _PoolRules, suite: str, name: str) -> tuple[PoolEntry, ...]:
    """The successes that the experience pool holds, newest first, and how often it has used them."""
    kinds = (GroupKind.TRAINING, GroupKind.COLLECTED)
    wanted = (
        select(_c.id, _c.steps, _c.finished, _c.newest_version)
        .join(t.groups, _g.id == _c.group_id)
        .where(_c.run_id == run_id, _c.suite == suite, _c.task_name == name, rules.usable, _g.kind.in_(kinds))
        .order_by(_c.finished.desc(), _c.id.desc())
        .limit(rules.per_task)
    )
    rows = connection.execute(wanted).all()
    counted = (
        select(_c.pooled_from, func.count())
        .where(_c.run_id == run_id, _c.task_name == name, _c.pooled_from.in_([row.id for row in rows]))
        .group_by(_c.pooled_from)
    )
    uses: dict[str, int] = {name: count for name, count in connection.execute(counted)}
    return tuple(PoolEntry(*row, uses.get(row.id, 0)) for row in rows)
