"""Trajectories as rows, one in full, and a group's side by side."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, Connection, RowMapping, Select, and_, or_, select

from dart.agent.thought import split_thought
from dart.core.action_json import action_from_json
from dart.core.json_text import read_json, read_object
from dart.errors import UserError
from dart.inspection.opening import NotFound, RunFiles
from dart.inspection.records import (
    GroupDetail,
    ImageRef,
    Member,
    StepDetail,
    StepGlance,
    TrajectoryDetail,
    TrajectoryPage,
    TrajectoryRow,
)
from dart.inspection.tokens import Decoder, find_tokenizer, token_texts
from dart.inspection.wording import action_label
from dart.store import tables as t
from dart.store.records import last_image_json, step_from_row

MOST_ROWS = 500
_c, _g, _s = t.trajectories.c, t.groups.c, t.steps.c


_ROW = TypeAdapter(TrajectoryRow)
_EMPTY = TrajectoryRow("", "", "", "", "", 0, "", "", 0.0, False, 0, 0, "", "", 0, None, None, 0.0, 0.0, False, "")


def rows_with_kind() -> Select[Any]:
    """Every trajectory with its group's kind, and the images of its last step."""
    last = select(_s.images_json).where(_s.trajectory_id == _c.id).order_by(_s["index"].desc()).limit(1)
    images = last.correlate(t.trajectories).scalar_subquery().label("last_images_json")
    return select(t.trajectories, _g.kind.label("kind"), images).join(t.groups, _g.id == _c.group_id)


def trajectory_row(row: RowMapping) -> TrajectoryRow:
    """Of a damaged one only what can be shown, with the damage as its fate."""
    same = ("id", "suite", "seed", "instruction", "termination", "reward", "success", "steps", "step_limit", "fate",
            "pooled_from", "attempt", "oldest_version", "newest_version", "started", "finished", "screenshots_kept",
            "kind")  # fmt: skip
    told = {"group": row["group_id"], "task": row["task_name"], **{name: row[name] for name in same}}
    told["thumbnail"] = _thumbnail(row)
    try:
        return _ROW.validate_python(told)
    except ValidationError as error:
        wrong = {str(one["loc"][0]): one["msg"] for one in error.errors(include_input=False)}
        fate = "damaged: " + ", ".join(f"{name}: {why}" for name, why in wrong.items())
        told.pop("fate")
        return replace(_EMPTY, **{name: value for name, value in told.items() if name not in wrong}, fate=fate)


def _thumbnail(row: RowMapping) -> str:
    """A damaged row has none: what is wrong with it, its own page says."""
    if not row["screenshots_kept"]:
        return ""
    try:
        last = last_image_json(row["more_json"]) or read_json(row["last_images_json"] or "[]")[-1]
        return str(last[0])
    except (ValueError, TypeError, LookupError):
        return ""


async def trajectories(
    files: RunFiles,
    *,
    kind: str = "",
    suite: str = "",
    task: str = "",
    success: bool | None = None,
    fate: str = "",
    after: str = "",
    limit: int = 100,
) -> TrajectoryPage:
    """Newest first. `fate`: what it begins with, so "dropped" means all reasons. `after`: the last row of the page
    before.

    Raises UserError for an `after` that is not a trajectory.
    """
    limit = max(1, min(limit, MOST_ROWS))
    where: list[ColumnElement[bool]] = [_c.run_id == files.run_id]
    where += [column == value for column, value in ((_g.kind, kind), (_c.suite, suite), (_c.task_name, task)) if value]
    if success is not None:
        where.append(_c.success.is_(success))
    if fate:
        where.append(_c.fate.startswith(fate, autoescape=True))

    def read(connection: Connection) -> Sequence[RowMapping]:
        wanted = rows_with_kind().where(*where).order_by(_c.finished.desc(), _c.id.desc()).limit(limit + 1)
        if after:
            at = connection.execute(select(_c.finished).where(_c.id == after)).scalar_one_or_none()
            if at is None:
                raise UserError(f"after: {after!r} is not a trajectory of this run: use the `next` of an earlier page")
            wanted = wanted.where(or_(_c.finished < at, and_(_c.finished == at, _c.id < after)))
        return connection.execute(wanted).mappings().all()

    rows = [trajectory_row(row) for row in await files.read(read)]
    return TrajectoryPage(tuple(rows[:limit]), rows[limit - 1].id if len(rows) > limit else "")


async def trajectory(files: RunFiles, trajectory_id: str) -> TrajectoryDetail:
    """Raises NotFound."""
    config = (await files.record()).config
    tokenizer = find_tokenizer(files.directory, config)

    def read(connection: Connection) -> TrajectoryDetail:
        row = connection.execute(rows_with_kind().where(_c.id == trajectory_id)).mappings().first()
        if row is None or row["run_id"] != files.run_id:
            raise NotFound(f"trajectory {trajectory_id!r} is not in run {files.run_id}")
        steps = connection.execute(
            select(t.steps).where(_s.trajectory_id == trajectory_id).order_by(_s["index"])
        ).mappings()
        siblings = connection.execute(
            rows_with_kind().where(_c.group_id == row["group_id"]).order_by(_c.finished, _c.id)
        ).mappings()
        # A copy is of the same task, by which there is an index.
        of_task = (_c.run_id == files.run_id, _c.task_name == row["task_name"])
        copies = connection.execute(select(_c.id).where(*of_task, _c.pooled_from == trajectory_id))
        more = read_object(row["more_json"] or "{}")
        advantages = read_json(row["advantages_json"] or "[]")
        goals = int(more.get("goal_images", 0))
        e = t.step_entropies.c
        seen = connection.execute(select(t.step_entropies).where(e.trajectory_id == trajectory_id)).mappings()
        entropies = {one["step_index"]: one for one in seen}
        held = _held(files, row)
        details = [_step(held, step, advantages, tokenizer, entropies.get(step["index"])) for step in steps]
        first = connection.execute(
            select(_s.images_json).where(_s.trajectory_id == trajectory_id, _s["index"] == 0)
        ).scalar_one_or_none()
        return TrajectoryDetail(
            row=trajectory_row(row),
            goal_images=tuple(_image(held, one) for one in read_json(first or "[]")[:goals]),
            evidence=_evidence(row["evidence_json"]),
            state_reward=float(more["state_reward"]) if more.get("state_judged") else None,
            steps=tuple(details),
            last_image=_image(held, last) if (last := last_image_json(row["more_json"])) else None,
            siblings=tuple(trajectory_row(one) for one in siblings),
            older=_neighbour(connection, row, older=True),
            newer=_neighbour(connection, row, older=False),
            pooled_as=tuple(copies.scalars()),
        )

    return await files.read(read)


def _neighbour(connection: Connection, row: RowMapping, *, older: bool) -> str:
    """The trajectory of the same task that finished before or after this one; empty if there is none."""
    at, name = row["finished"], row["id"]
    if older:
        beyond = or_(_c.finished < at, and_(_c.finished == at, _c.id < name))
        order = (_c.finished.desc(), _c.id.desc())
    else:
        beyond = or_(_c.finished > at, and_(_c.finished == at, _c.id > name))
        order = (_c.finished.asc(), _c.id.asc())
    same = (_c.run_id == row["run_id"], _c.task_name == row["task_name"], _c.suite == row["suite"])
    found = connection.execute(select(_c.id).where(*same, beyond).order_by(*order).limit(1)).scalar_one_or_none()
    return found or ""


def _evidence(text: str | None) -> Mapping[str, JsonValue] | None:
    if not text:
        return None
    try:
        evidence = read_json(text)
    except ValueError:  # a worker may send anything
        return {"evidence": str(text)}
    return evidence if isinstance(evidence, dict) else {"evidence": evidence}


def _held(files: RunFiles, trajectory: RowMapping) -> Callable[[str], bool]:
    """Tells whether a screenshot of the trajectory can be shown. An object store is not asked, because that takes a
    request for each screenshot; retention, which removes them, has marked the trajectory."""
    return files.holds if files.are_local else lambda _: bool(trajectory["screenshots_kept"])


def _image(held: Callable[[str], bool], one: Sequence[Any]) -> ImageRef:
    sha256, _, width, height = one
    return ImageRef(sha256, width, height, held(sha256))


def _step(
    held: Callable[[str], bool],
    row: RowMapping,
    advantages: Sequence[float],
    tokenizer: Decoder | None,
    seen: RowMapping | None,
) -> StepDetail:
    """`seen`: what high-entropy step selection saw of it."""
    step = step_from_row(row)
    images = read_json(row["images_json"])
    generation = step.generation
    ids = tuple(generation.token_ids)
    return StepDetail(
        index=step.index,
        image=_image(held, images[-1]) if images else None,
        text=generation.text,
        thought=split_thought(generation.text)[0],
        action=read_json(row["action_json"]) if row["action_json"] else None,
        label=action_label(step.action, step.parse_error),
        parse_error=step.parse_error,
        reading_rules=step.reading_rules,
        truncated=generation.truncated,
        prompt_tokens=len(generation.prompt_token_ids),
        prompt_images=len(images),
        token_ids=ids,
        token_texts=token_texts(tokenizer, ids) if tokenizer else None,
        logprobs=tuple(round(value, 5) for value in generation.logprobs),
        versions=tuple((span.version, span.start, span.end) for span in generation.versions),
        advantage=advantages[step.index] if step.index < len(advantages) else None,
        entropy=seen["entropy"] if seen else None,
        selected=seen["selected"] if seen else None,
        token_entropies=_float16(seen["token_entropies"]) if seen else (),
        accessibility_tree=step.accessibility_tree,
        last_action_error=step.last_action_error,
    )


def _float16(data: bytes) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in struct.unpack(f"<{len(data) // 2}e", data))


async def group(files: RunFiles, group_id: str) -> GroupDetail:
    """Raises NotFound."""

    def read(connection: Connection) -> GroupDetail:
        found = connection.execute(select(t.groups).where(_g.id == group_id)).mappings().first()
        if found is None or found["run_id"] != files.run_id:
            raise NotFound(f"group {group_id!r} is not in run {files.run_id}")
        rows = connection.execute(
            rows_with_kind().where(_c.group_id == group_id).order_by(_c.finished, _c.id)
        ).mappings()
        return GroupDetail(
            id=group_id,
            kind=found["kind"],
            suite=found["suite"],
            task=found["task_name"],
            seed=found["seed"],
            planned=found["planned"],
            plan=found["plan"],
            state=found["state"],
            verdict=found["fate"],
            opened=found["opened"],
            closed=found["closed"],
            update=found["consumed_by_update"],
            members=tuple(_member(files, connection, row) for row in rows),
        )

    return await files.read(read)


def _member(files: RunFiles, connection: Connection, row: RowMapping) -> Member:
    advantages = tuple(read_json(row["advantages_json"] or "[]"))
    columns = (_s["index"], _s.action_json, _s.parse_error, _s.images_json)
    steps = connection.execute(select(*columns).where(_s.trajectory_id == row["id"]).order_by(_s["index"])).mappings()
    held = _held(files, row)
    return Member(trajectory_row(row), advantages, tuple(_glance(held, step, advantages) for step in steps))


def _glance(held: Callable[[str], bool], row: RowMapping, advantages: Sequence[float]) -> StepGlance:
    action = read_json(row["action_json"]) if row["action_json"] else None
    images = read_json(row["images_json"])
    index = row["index"]
    return StepGlance(
        index=index,
        image=_image(held, images[-1]) if images else None,
        action=action,
        label=action_label(action_from_json(action) if action else None, row["parse_error"]),
        advantage=advantages[index] if index < len(advantages) else None,
    )
