"""Rows ⇄ records: what the database returns, and how a trajectory becomes rows. Pure.

A trajectory read back equals the one written, with two exceptions: log-probabilities have float32 precision (as on the
wire), and images have no bytes unless they are asked for. Numbers, texts and flags of a record that have no column of
their name, and a trajectory's last image, are kept together in `more_json`, so that a new one needs no edit
here and no migration; where a row was written without one, it has its default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import RowMapping, Table

from dart.core.action_json import action_from_json, action_to_json
from dart.core.curation.planning import Result
from dart.core.fates import PENDING, dropped
from dart.core.json_text import JSON, read_json, read_object, to_json
from dart.core.packing import pack, unpack
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan, plain_fields
from dart.store import tables

STORY = frozenset(
    {"phase", "worker", "update", "evaluation", "checkpoint", "checkpoint_broken", "checkpoint_failed",
     "checkpoint_uploaded", "checkpoint_upload_failed", "released_again",
     "trainer_lost", "pool_filled", "collected", "submitted", "paused", "resumed", "config_changed",
     "failed"}
)  # fmt: skip
"""Kinds of events that are kept as long as the run itself: its results with their times, and when each worker came and
was lost, without which the timeline (`inspection.timeline`) knows nothing of a worker that has long been there."""
UNKEPT = dropped("its screenshots are no longer kept")


class RunKind(StrEnum):
    TRAINING = "training"
    EVALUATION = "evaluation"
    COLLECTION = "collection"


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class GroupKind(StrEnum):
    TRAINING = "training"
    EVALUATION = "evaluation"
    COLLECTED = "collected"
    """Successes from elsewhere, for the experience pool."""


class GroupState(StrEnum):
    OPEN = "open"
    RELEASED = "released"
    """Waiting for the trainer."""
    CONSUMED = "consumed"
    DROPPED = "dropped"
    EVALUATED = "evaluated"
    """Over: its trajectories belong to an evaluation."""
    COLLECTED = "collected"
    """Over: its trajectories are for the experience pool."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    id: str
    name: str
    kind: RunKind
    config: Mapping[str, Any]
    state: RunState
    started: float
    finished: float | None
    summary: Mapping[str, Any] | None
    control_address: str | None


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    trajectory: Trajectory
    attempt: int
    advantages: tuple[float, ...]
    """One per step; empty if none were computed."""
    fate: str
    screenshots_kept: bool = True
    """False if its screenshots were removed to stay within the disk bound."""


@dataclass(frozen=True, slots=True)
class StoredGroup:
    id: str
    kind: GroupKind
    task: Task
    planned: int
    plan: str
    state: GroupState
    detail: str
    """Why it is in this state, in a sentence; the column is called `fate`."""
    opened: float
    closed: float | None
    consumed_by_update: int | None
    trajectories: tuple[StoredTrajectory, ...]


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """A task's training roll-outs, and the lengths of its successes, collected ones too; recent ones, newest last."""

    name: str
    longest: int | None
    results: tuple[Result, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Success:
    """A trajectory that the experience pool may use, and how often it has."""

    trajectory_id: str
    task: Task
    newest_version: int
    uses: int


@dataclass(frozen=True, slots=True)
class TrajectorySummary:
    id: str
    group_id: str
    task: Task
    reward: float
    success: bool
    steps: int
    fate: str
    finished: float


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """One replica's weight transfer. `pause_seconds`: how long the replica took no requests."""

    version: int
    replica: str
    started: float
    finished: float
    pause_seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    path: str
    version: int
    created: float
    success_rate: float | None = None
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    sequence: int
    unix_seconds: float
    kind: str
    json: str


def _columns_of(record: type, table: Table) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The record's plain fields that have a column, and those that `more_json` holds."""
    names = plain_fields(record)
    return tuple(n for n in names if n in table.c), tuple(n for n in names if n not in table.c)


_TRAJECTORY, _MORE_TRAJECTORY = _columns_of(Trajectory, tables.trajectories)
_STEP, _MORE_STEP = _columns_of(Step, tables.steps)
_GENERATION, _MORE_GENERATION = _columns_of(Generation, tables.steps)


def _more(*sources: tuple[object, tuple[str, ...]], last_image: Image | None = None) -> str | None:
    values = {name: getattr(source, name) for source, names in sources for name in names}
    if last_image is not None:
        values["last_image"] = _image_to_json(last_image)
    return to_json(values) if values else None


def _from_more(row: RowMapping, names: tuple[str, ...]) -> Mapping[str, Any]:
    """The values of those fields that the row has. A null was a number that is not finite, and is left out."""
    text = row["more_json"] if names else None
    values = read_object(text) if text else {}
    return {name: values[name] for name in names if values.get(name) is not None}


def _image_to_json(image: Image) -> list[JSON]:
    return [image.sha256.hex(), image.media_type, image.width, image.height]


def _image_from_json(one: Sequence[Any]) -> Image:
    sha256, media_type, width, height = one
    return Image(bytes.fromhex(sha256), media_type, width, height)


def last_image_json(more_json: str | None) -> Sequence[Any] | None:
    """A trajectory's last image, as a step's `images_json` holds one."""
    return read_object(more_json or "{}").get("last_image")


def trajectory_to_row(trajectory: Trajectory, run_id: str, attempt: int) -> dict[str, object]:
    task = trajectory.task
    sampled = [span.version for step in trajectory.steps for span in step.generation.versions]
    return {
        **{name: getattr(trajectory, name) for name in _TRAJECTORY},
        "run_id": run_id,
        "suite": task.suite,
        "task_name": task.name,
        "seed": task.seed,
        "attempt": attempt,
        "termination": trajectory.termination.value,
        "steps": len(trajectory.steps),
        "oldest_version": min(sampled, default=None),
        "newest_version": max(sampled, default=None),
        "advantages_json": None,
        "fate": PENDING,
        "evidence_json": trajectory.evidence_json or None,
        "more_json": _more((trajectory, _MORE_TRAJECTORY), last_image=trajectory.last_image),
    }


def step_to_row(step: Step, trajectory_id: str) -> dict[str, object]:
    g = step.generation
    return {
        **{name: getattr(step, name) for name in _STEP},
        **{name: getattr(g, name) for name in _GENERATION},
        "trajectory_id": trajectory_id,
        "action_json": None if step.action is None else json.dumps(action_to_json(step.action), allow_nan=False),
        "prompt_token_ids": pack("I", g.prompt_token_ids),
        "token_ids": pack("I", g.token_ids),
        "logprobs": pack("f", g.logprobs),
        "mean_logprob": sum(g.logprobs) / len(g.logprobs) if g.logprobs else None,
        "versions_json": json.dumps([[s.version, s.start, s.end] for s in g.versions]),
        "images_json": json.dumps([_image_to_json(image) for image in step.images]),
        "more_json": _more((step, _MORE_STEP), (g, _MORE_GENERATION)),
    }


def screenshot_rows(trajectory: Trajectory) -> list[dict[str, object]]:
    """One row for each screenshot that the trajectory refers to."""
    digests = {image.sha256 for image in trajectory.images}
    return [{"sha256": digest, "trajectory_id": trajectory.id} for digest in sorted(digests)]


def step_from_row(row: RowMapping) -> Step:
    action = row["action_json"]
    generation = {name: row[name] for name in _GENERATION}
    return Step(
        images=tuple(_image_from_json(one) for one in read_json(row["images_json"])),
        generation=Generation(
            unpack("I", row["prompt_token_ids"]),
            unpack("I", row["token_ids"]),
            unpack("f", row["logprobs"]),
            tuple(VersionSpan(*span) for span in read_json(row["versions_json"])),
            **generation,
            **_from_more(row, _MORE_GENERATION),
        ),
        action=None if action is None else action_from_json(read_json(action)),
        **{name: row[name] for name in _STEP},
        **_from_more(row, _MORE_STEP),
    )


def _task(row: RowMapping) -> Task:
    return Task(row["suite"], row["task_name"], row["seed"])


def trajectory_from_row(row: RowMapping, steps: Iterable[Step]) -> StoredTrajectory:
    values = {name: row[name] for name in _TRAJECTORY}
    values["evidence_json"] = row["evidence_json"] or ""
    trajectory = Trajectory(
        task=_task(row),
        steps=tuple(steps),
        termination=Termination(row["termination"]),
        **values,
        **_from_more(row, _MORE_TRAJECTORY),
        last_image=_image_from_json(last) if (last := last_image_json(row["more_json"])) else None,
    )
    advantages = tuple(read_json(row["advantages_json"] or "[]"))
    return StoredTrajectory(trajectory, row["attempt"], advantages, row["fate"], row["screenshots_kept"])


def summary_from_row(row: RowMapping) -> TrajectorySummary:
    same = ("id", "group_id", "reward", "success", "steps", "fate", "finished")
    return TrajectorySummary(task=_task(row), **{name: row[name] for name in same})


def success_from_row(row: RowMapping) -> Success:
    return Success(row["id"], _task(row), row["newest_version"] or 0, row["uses"])


def event_from_row(row: RowMapping) -> Event:
    return Event(**{name: row[name] for name in Event.__slots__})


def group_from_row(row: RowMapping, trajectories: Iterable[StoredTrajectory]) -> StoredGroup:
    same = ("id", "planned", "plan", "opened", "closed", "consumed_by_update")
    return StoredGroup(
        kind=GroupKind(row["kind"]),
        task=_task(row),
        state=GroupState(row["state"]),
        detail=row["fate"],
        trajectories=tuple(trajectories),
        **{name: row[name] for name in same},
    )


_LAST_SECOND = 253_402_300_799.0
"""Of the year 9999: what comes after has no date."""


_LONGEST = 1000


def _check_run(row: RowMapping) -> None:
    """Raises ValueError: SQLite takes any type in any column."""
    for name in ("name", "control_address"):
        if not isinstance(row[name], str | None) or (name == "name" and row[name] is None):
            raise ValueError(f"its {name} is no text")
        if len(row[name] or "") > _LONGEST:
            raise ValueError(f"its {name} has more than {_LONGEST:,} characters")
    for name in ("started", "finished"):
        when = row[name]
        if (when is None and name == "started") or not (
            when is None or (isinstance(when, int | float) and abs(when) <= _LAST_SECOND)
        ):
            raise ValueError(f"its time {name} is {str(when)[:40]!r}")


def run_from_row(row: RowMapping) -> RunRecord:
    """Raises ValueError for a row that dart does not write."""
    summary = row["summary_json"]
    same = ("id", "name", "started", "finished", "control_address")
    _check_run(row)
    return RunRecord(
        kind=RunKind(row["kind"]),
        config=read_object(row["config_json"]),
        state=RunState(row["state"]),
        summary=None if summary is None else read_object(summary),
        **{name: row[name] for name in same},
    )
