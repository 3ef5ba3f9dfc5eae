"""Numbers over updates: those of each "update" event, those that the trainer reported, and held-out results."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import JsonValue
from sqlalchemy import RowMapping, func, select

from dart.core.progress import take_up
from dart.inspection.opening import RunFiles, said
from dart.inspection.records import Curves, EvaluationPoint
from dart.store import tables as t

T = TypeVar("T")

MOST_TASKS, MOST_SERIES = 64, 500
NO_CURVES = frozenset({"update", "updates", "version", "trajectories"})
"""Numbers of an "update" event that only count the updates themselves."""


async def curves(files: RunFiles) -> Curves:
    events = t.events.c
    told = await files.rows(
        select(events.unix_seconds, events.kind, events.json)
        .where(events.run_id == files.run_id, events.kind.in_(("update", "evaluation")))
        .order_by(events.sequence)
    )
    versions = t.versions.c
    made = await files.rows(
        select(versions.update, versions.metrics_json).where(versions.run_id == files.run_id).order_by(versions.version)
    )
    return await asyncio.to_thread(_drawn, told, made)


def _drawn(told: Sequence[RowMapping], made: Sequence[RowMapping]) -> Curves:
    """Of each update, only what is drawn is kept: what it says besides may be as much as the database holds."""
    trained = {row["update"]: _numbers(said(row["metrics_json"])) for row in made}
    updates: dict[int, tuple[float, int, dict[str, float], dict[str, float | None]]] = {}
    """In ascending order: when, trajectories, numbers, success by task."""
    evaluations: list[EvaluationPoint] = []
    for row in told:
        data = said(row["json"])
        if row["kind"] == "evaluation":
            evaluations.append(_evaluation(row["unix_seconds"], data, next(reversed(updates), 0)))
            continue
        if (number := _number(data.get("update"))) is not None:
            trajectories = int(_number(data.get("trajectories")) or 0)
            take_up(updates, int(number), (row["unix_seconds"], trajectories, _numbers(data), _by_task(data)))
    return Curves(
        updates=tuple(updates),
        unix_seconds=tuple(when for when, *_ in updates.values()),
        trajectories=tuple(count for _, count, *_ in updates.values()),
        series=_series([{**trained.get(number, {}), **one[2]} for number, one in updates.items()], MOST_SERIES),
        by_task=_series([one[3] for one in updates.values()], MOST_TASKS),
        evaluations=tuple(evaluations),
    )


async def evaluation_count(files: RunFiles) -> int:
    """How many evaluations `curves` has."""
    c = t.events.c
    counted = select(func.count().label("count")).where(c.run_id == files.run_id, c.kind == "evaluation")
    return int((await files.rows(counted))[0]["count"])


async def updates_after(files: RunFiles, sequence: int) -> dict[int, int]:
    """Update → number of its last event, for updates with an event after `sequence`; in the order of these events."""
    c = t.events.c
    told = await files.rows(
        select(c.sequence, c.json)
        .where(c.run_id == files.run_id, c.kind == "update", c.sequence > sequence)
        .order_by(c.sequence)
    )
    last = {int(_number(said(row["json"]).get("update")) or 0): int(row["sequence"]) for row in told}
    return dict(sorted(last.items(), key=lambda item: item[1]))


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(data: Mapping[str, JsonValue]) -> dict[str, float]:
    """Its numbers; nested ones are named "staleness.mean"."""
    numbers: dict[str, float] = {}
    for name, value in data.items():
        if isinstance(value, dict) and name != "success_by_task":
            inner = {f"{name}.{key}": _number(item) for key, item in value.items()}
        else:
            inner = {name: _number(value)}
        numbers |= {key: number for key, number in inner.items() if number is not None and key not in NO_CURVES}
    return _first(numbers, MOST_SERIES)


def _by_task(data: Mapping[str, JsonValue]) -> dict[str, float | None]:
    told = data.get("success_by_task")
    rates = _first(told, MOST_TASKS) if isinstance(told, dict) else {}
    return {name: _number(rate) for name, rate in rates.items()}


def _first(named: Mapping[str, T], most: int) -> dict[str, T]:
    """Those of the first names."""
    return {name: named[name] for name in sorted(named)[:most]}


def _series(rows: Sequence[Mapping[str, float | None]], most: int) -> dict[str, tuple[float | None, ...]]:
    """Each name's numbers, with None where an update had none."""
    names = sorted({name for row in rows for name in row})[:most]
    return {name: tuple(row.get(name) for row in rows) for name in names}


def _evaluation(when: float, data: Mapping[str, JsonValue], update: int) -> EvaluationPoint:
    return EvaluationPoint(
        unix_seconds=when,
        update=update,
        label=str(data.get("label", "")),
        decoding=str(data.get("decoding", "")),
        temperature=_number(data.get("temperature")),
        mean=_number(data.get("mean")) or 0.0,
        low=_number(data.get("low")) or 0.0,
        high=_number(data.get("high")) or 0.0,
        episodes=int(_number(data.get("episodes")) or 0),
        not_evaluated=_not_evaluated(data.get("not_evaluated")),
    )


def _not_evaluated(told: JsonValue) -> int:
    each = told if isinstance(told, list) else []
    return sum(int(_number(one.get("episodes")) or 0) for one in each if isinstance(one, dict))
