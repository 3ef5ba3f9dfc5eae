"""Each worker's line through time, from the run's events: its states as spans, versions and failures as marks.

Events say when workers come and go, when a replica takes new weights, and how long an update took. What each slot did
in between is not recorded; while a run is live, its status has that (`records.RunStatus`).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue
from sqlalchemy import func, select

from dart.inspection.opening import RunFiles
from dart.inspection.records import Episodes, Lane, Mark, Span, Timeline
from dart.store import tables as t

KINDS = ("phase", "worker", "environments", "violation", "left_out", "sync_started", "sync", "sync_failed", "update",
         "stalled", "checkpoint", "trainer_lost", "trainer_remark")  # fmt: skip
MOST_EPISODES = 3_000
TRAINER = "trainer"
"""The lane of all ranks together."""
_ROLES = {"env": "env", "rollout": "rollout", "train": "train"}
_ORDER = ("train", "rollout", "env", "")


@dataclass(slots=True)
class _Line:
    """A lane that is being put together."""

    role: str = ""
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def close(self, at: float) -> None:
        """Nothing is known of the worker from `at` on."""
        if self.spans and self.spans[-1].end is None:
            last = self.spans[-1]
            self.spans[-1] = Span(last.start, max(at, last.start), last.state, last.detail)

    def change(self, at: float, state: str, detail: str = "") -> None:
        """The worker is in another state from `at` on."""
        self.close(at)
        self.spans.append(Span(at, None, state, detail))


async def timeline(files: RunFiles, start: float | None, end: float | None) -> Timeline:
    """Lanes between two times, by default the whole run."""
    c = t.events.c
    own = c.run_id == files.run_id
    bounds = await files.rows(
        select(func.min(c.unix_seconds).label("a"), func.max(c.unix_seconds).label("b")).where(own)
    )
    record = await files.record()
    first = record.started if bounds[0]["a"] is None else min(record.started, bounds[0]["a"])
    last = record.finished or bounds[0]["b"] or first
    told = await files.rows(
        select(c.sequence, c.unix_seconds, c.kind, c.json).where(own, c.kind.in_(KINDS)).order_by(c.sequence)
    )
    lines: dict[str, _Line] = {}
    heard = first
    for row in told:
        data = json.loads(row["json"])
        if row["kind"] == "phase":
            if data.get("begins"):  # another process of the run; one that was killed recorded no end
                for line in lines.values():
                    line.close(heard)
            continue
        heard = row["unix_seconds"]
        # One event says of several replicas that they were left out.
        for each in [{**data, "replica": name} for name in data.get("replicas") or ()] or [data]:
            _note(lines, row["kind"], row["unix_seconds"], row["sequence"], each)
    shown_from, shown_to = start if start is not None else first, end if end is not None else last
    lanes = [
        Lane(
            name,
            line.role,
            tuple(s for s in line.spans if s.start <= shown_to and (s.end is None or s.end >= shown_from)),
            tuple(mark for mark in line.marks if shown_from <= mark.at <= shown_to),
        )
        for name, line in lines.items()
    ]
    return Timeline(shown_from, shown_to, tuple(sorted(lanes, key=lambda lane: (_ORDER.index(lane.role), lane.worker))))


async def episodes(files: RunFiles, start: float, end: float) -> Episodes:
    """The trajectories between two times, packed into lanes as environments run them: one after the other.

    Which environment an episode had is not recorded, so a lane is no particular one of them.
    """
    c = t.trajectories.c
    within = (c.run_id == files.run_id, c.finished >= start, c.started <= end)
    columns = (c.id, c.task_name, c.success, c.steps, c.started, c.finished)
    rows = await files.rows(select(*columns).where(*within).order_by(c.started, c.id).limit(MOST_EPISODES + 1))
    if len(rows) > MOST_EPISODES:
        counted = await files.rows(select(func.count().label("count")).select_from(t.trajectories).where(*within))
        return Episodes(int(counted[0]["count"]), ())
    lanes: list[list[Span]] = []
    free: list[tuple[float, int]] = []
    """When each lane's last episode ended, and the lane: the earliest first."""
    for row in rows:
        if free and free[0][0] <= row["started"]:
            _, place = heapq.heappop(free)
        else:
            place = len(lanes)
            lanes.append([])
        heapq.heappush(free, (row["finished"], place))
        told = f"{row['id']}: {row['task_name']}, {row['steps']} steps"
        outcome = "success" if row["success"] else "failure"
        lanes[place].append(Span(row["started"], row["finished"], outcome, told))
    named = (Lane(f"{number}", "episode", tuple(spans), ()) for number, spans in enumerate(lanes, 1))
    return Episodes(len(rows), tuple(named))


def _note(lines: dict[str, _Line], kind: str, at: float, sequence: int, data: Mapping[str, JsonValue]) -> None:
    name = str(
        data.get("worker") or data.get("replica") or (TRAINER if kind in _OF_TRAINER else data.get("culprit", ""))
    )
    if not name or (kind == "stalled" and name not in lines):
        return
    line = lines.setdefault(name, _Line(_role(name, kind)))
    match kind:
        case "worker":
            line.change(at, str(data.get("state", "")), f"{data.get('slots', 0)} slots")
        case "sync_started":
            line.change(at, "syncing", f"version {data.get('version')}")
        case "sync":
            line.change(at, "ready")
            line.marks.append(Mark(at, "version", f"version {data.get('version')}", sequence))
        case "sync_failed":
            line.change(at, "ready")
            line.marks.append(Mark(at, "failure", str(data.get("why", "")), sequence))
        case "update":
            trainer = data.get("trainer")
            seconds = trainer.get("round_trip_seconds") if isinstance(trainer, dict) else None
            if isinstance(seconds, int | float):
                line.spans.append(Span(at - seconds, at, "training", f"update {data.get('update')}"))
            line.marks.append(Mark(at, "version", f"version {data.get('version')}", sequence))
        case "violation":
            text = f"{data.get('field')} was {data.get('value')}: {data.get('rule')}"
            line.marks.append(Mark(at, "violation", text, sequence))
        case _:
            line.marks.append(Mark(at, _MARKS.get(kind, "failure"), str(data.get("reason") or data.get("why")
                                   or data.get("waits_for") or data.get("path") or kind), sequence))  # fmt: skip


_OF_TRAINER = frozenset({"update", "checkpoint", "trainer_lost", "trainer_remark"})
_MARKS = {"checkpoint": "checkpoint", "environments": "missing", "trainer_remark": "remark", "stalled": "stall",
          "left_out": "left out"}  # fmt: skip


def _role(name: str, kind: str) -> str:
    if kind in _OF_TRAINER:
        return "train"
    if kind.startswith("sync") or kind == "left_out":
        return "rollout"
    return next((role for part, role in _ROLES.items() if part in name), "")
