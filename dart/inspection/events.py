"""The run's events, searched and in pages, newest first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from pydantic import JsonValue
from sqlalchemy import ColumnElement, RowMapping, and_, func, or_, select, true

from dart.core.status import LEARNING
from dart.inspection.opening import RunFiles, said
from dart.inspection.records import EventPage, EventRow
from dart.inspection.wording import plain
from dart.store import tables as t

MOST_ROWS = 500
MOST_READ = 4096
"""Rows that are held at once while a sentence is looked for among many that have its words."""
_c = t.events.c


async def events(
    files: RunFiles,
    *,
    kinds: Sequence[str] = (),
    text: str = "",
    worker: str = "",
    task: str = "",
    start: float | None = None,
    end: float | None = None,
    before: int = 0,
    limit: int = 100,
) -> EventPage:
    """`worker` and `task`: the event's JSON contains them, in capitals or not. `text`: that, or the event's sentence
    does. `before`: only lower sequence numbers."""
    limit = max(1, min(limit, MOST_ROWS))
    where: list[ColumnElement[bool]] = [_c.run_id == files.run_id]
    if kinds:
        where.append(_c.kind.in_(kinds))
    where += [_contains(part) for part in (worker, task) if part]
    if start is not None:
        where.append(_c.unix_seconds >= start)
    if end is not None:
        where.append(_c.unix_seconds <= end)
    rows = await _newest(files, where, text, before, limit + 1)
    counted: Mapping[str, int] = {}
    if not before:
        by_kind = select(_c.kind, func.count().label("count")).where(_c.run_id == files.run_id).group_by(_c.kind)
        counted = {row["kind"]: row["count"] for row in await files.rows(by_kind.order_by(_c.kind))}
    shown = [_event(row) for row in rows[:limit]]
    return EventPage(tuple(shown), shown[-1].sequence if len(rows) > limit else 0, counted)


async def _newest(
    files: RunFiles, where: Sequence[ColumnElement[bool]], text: str, before: int, limit: int
) -> list[RowMapping]:
    """The rows, newest first. The database finds the text in an event's JSON; a sentence is only known here."""
    words = [or_(_contains(word), _c.kind.in_(_kinds_that_say(word))) for word in text.split()]
    wanted = select(t.events, (_contains(text) if text else true()).label("contains")).where(*where)
    wanted = wanted.where(or_(_contains(text), and_(*words))) if words else wanted
    found: list[RowMapping] = []
    batch = limit
    while True:
        older = wanted.where(_c.sequence < before) if before else wanted
        rows = await files.rows(older.order_by(_c.sequence.desc()).limit(batch))
        found += [row for row in rows if row["contains"] or _says(row, text)]
        if len(found) >= limit or len(rows) < batch:
            return found[:limit]
        before, batch = rows[-1]["sequence"], min(2 * batch, MOST_READ)


def _contains(part: str) -> ColumnElement[bool]:
    """The event's JSON contains the part, as it is written there."""
    return _c.json.icontains(json.dumps(part)[1:-1], autoescape=True)


def _kinds_that_say(word: str) -> tuple[str, ...]:
    """Those whose sentence contains it, whatever the event's values are."""
    return tuple(kind for kind, said in _SAID.items() if word.casefold() in said)


def _says(row: RowMapping, text: str) -> bool:
    return text.casefold() in sentence(row["kind"], said(row["json"])).casefold()


def _event(row: RowMapping) -> EventRow:
    kind, data = row["kind"], said(row["json"])
    words = sentence(kind, data) if data or row["json"] == "{}" else "it is damaged: it is no JSON object"
    return EventRow(row["sequence"], row["unix_seconds"], kind, words, data)


def sentence(kind: str, data: Mapping[str, JsonValue]) -> str:
    """The event in a sentence; for kinds without one, its fields."""
    form = _SENTENCES.get(kind)
    if form is None:
        parts = [f"{name} {_short(value)}" for name, value in data.items() if not isinstance(value, dict | list)]
        return plain(", ".join(parts))
    if kind == "stalled" and data.get("kind") == LEARNING:
        form = "{waits}: {waits_for}: {failure}"
    if kind == "update" and data.get("success_rate") is None:
        form = form.partition("; ")[0]  # imitation samples nothing
    return _whole(plain(form.format_map(_Values(data))))


def _whole(text: str) -> str:
    """Without the colons after which nothing stands, because the event does not say it."""
    return re.sub(r"(?:: )+: ", ": ", text).rstrip(": ")


class _Values(dict[str, str]):
    """The event's values as text; a missing one is empty."""

    def __init__(self, data: Mapping[str, JsonValue]) -> None:
        super().__init__({name: _short(value) for name, value in data.items()})

    def __missing__(self, name: str) -> str:
        return ""


def _short(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_short(one) for one in value)
    return value if isinstance(value, str) else json.dumps(value)


_SENTENCES = {
    "update": "update {update} made version {version}; recent success {success_rate}",
    "sync_started": "{replica} begins to take version {version}",
    "sync": "{replica} took version {version} in {seconds} s and served nothing for {pause_seconds} s",
    "sync_failed": "{replica} could not take version {version}: {why}",
    "group": "{group} of {task}, {size} roll-outs: {cause}: {reason}",
    "plan": "{task}: {reason}",
    "pooled": "{group}: {reason}",
    "phase": "{phase}",
    "worker": "{worker} is {state}, {slots} slots",
    "environments": "{worker} offers {environments} of {wanted} environments: {reason}",
    "violation": "{worker} broke a rule: {field} was {value}, and must be {rule}",
    "attempt_failed": "attempt {attempt} of {trajectory} failed: {why}",
    "given_up": "{trajectory} was given up after {attempts} attempts: {why}",
    "task_quarantined": "{task} gets no roll-outs for {seconds} s: {why}",
    "stalled": "{waits} waits for {waits_for}: {culprit}: {failure}",
    "moving": "{kind} goes on",
    "checkpoint": "checkpoint of version {version}: {path}",
    "checkpoint_failed": "version {version} could not be saved: {why}",
    "checkpoint_uploaded": "{path} has a checkpoint, copied in {seconds} s",
    "checkpoint_upload_failed": "no copy at {path}: {why}",
    "checkpoint_broken": "checkpoint of version {version} cannot be used: {why}",
    "evaluation": "held-out success {mean} ({low} to {high}) in {episodes} episodes: {label} {decoding}",
    "config_changed": "changed since the run began: {changed}",
    "left_out": "{replicas} take no weights: {reason}",
    "trainer_lost": "the trainer was lost: {why}",
    "trainer_remark": "update {update}: {why}",
    "failed": "the run failed: {why}",
    "submitted": "{number} tasks were submitted",
    "paused": "the run is paused",
    "resumed": "the run goes on",
}
_SAID = {kind: re.sub(r"{\w+}", " ", form).casefold() for kind, form in _SENTENCES.items()}
"""The words of each kind's sentence, without the values."""
