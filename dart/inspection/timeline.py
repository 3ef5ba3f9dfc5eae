"""Each worker's line through time, from the run's events: its states as spans, versions and failures as marks.

Events say when workers come and go, when a replica takes new weights, and how long an update took. What each slot did
in between is not recorded; while a run is live, its status has that (`records.RunStatus`).

A page that watches a run asks every few seconds, and a long run has tens of thousands of these events. So each is read
once while the run is open, and a page that names the end of its last answer as the start is sent only what has been
since: marks from then on, and spans that had not ended then, with their true starts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import JsonValue
from sqlalchemy import func, select

from dart.core.fleet.health import Condition
from dart.inspection.opening import RunFiles, said
from dart.inspection.records import Episodes, Lane, Mark, Span, Timeline
from dart.store import tables as t

KINDS = ("phase", "worker", "environments", "violation", "left_out", "replica_health", "sync_started", "sync",
         "sync_failed", "update", "stalled", "checkpoint", "trainer_lost", "trainer_remark")  # fmt: skip
MOST_EPISODES = 3_000
AT_ONCE = 5_000
"""Events that are read before others of the dashboard have their turn."""
SPARE = 100_000
READY = "ready"
TRAINER = "trainer"
"""The lane of all ranks together."""
_ROLES = {"env": "env", "rollout": "rollout", "train": "train"}
_ORDER = ("train", "rollout", "env", "")


@dataclass(slots=True)
class _Line:
    """A lane that is being put together."""

    role: str = ""
    serves: str = READY
    """A replica's state while it takes no weights: in quarantine it is not ready."""
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


@dataclass(slots=True)
class _Known:
    """What the events that were read so far say of a run's workers."""

    lines: dict[str, _Line] = field(default_factory=dict)
    sequence: int = 0
    """No event up to this number needs to be read again."""
    first: float = math.inf
    last: float = -math.inf
    heard: float = 0.0
    """When a process of the run last told something."""
    taken: int = 0
    at_first: int | None = None
    """Events that there were when all had been read for the first time; None until then."""

    @property
    def outgrown(self) -> bool:
        """It is time to read everything anew, because the run has deleted old events (`retention`)."""
        return self.at_first is not None and self.taken > 2 * self.at_first + SPARE

    def take(self, row: Mapping[Any, Any]) -> None:
        """The next event."""
        at, kind, data = row["unix_seconds"], row["kind"], said(row["json"])
        if kind != "phase":
            self.heard = at
            # One event says of several replicas that they were left out.
            for each in [{**data, "replica": name} for name in data.get("replicas") or ()] or [data]:
                _note(self.lines, kind, at, row["sequence"], each)
        elif data.get("begins"):  # another process of the run; one that was killed recorded no end
            for line in self.lines.values():
                line.close(self.heard)
                line.serves = READY  # it knows of no quarantine
        self.first, self.last = min(self.first, at), max(self.last, at)
        self.sequence, self.taken = row["sequence"], self.taken + 1


_KNOWN: WeakKeyDictionary[RunFiles, _Known] = WeakKeyDictionary()
"""What is known of each run that is open; forgotten with its `RunFiles`."""


async def _read(files: RunFiles) -> tuple[_Known, float]:
    """What is known of the run after its newest events, and the time of the newest of any kind."""
    c = t.events.c
    own = c.run_id == files.run_id
    # By its number, which has an index: times have none.
    newest = await files.rows(select(c.sequence, c.unix_seconds).where(own).order_by(c.sequence.desc()).limit(1))
    known = _KNOWN.get(files)
    if known is None or known.outgrown:
        known = _KNOWN[files] = _Known()
    if not newest:
        return known, -math.inf
    until = newest[0]["sequence"]
    told = select(c.sequence, c.unix_seconds, c.kind, c.json).where(own, c.kind.in_(KINDS), c.sequence <= until)
    while True:
        rows = await files.rows(told.where(c.sequence > known.sequence).order_by(c.sequence).limit(AT_ONCE))
        for row in rows:
            if row["sequence"] > known.sequence:  # else another request was quicker
                known.take(row)
        if len(rows) < AT_ONCE:
            break
    known.sequence = max(known.sequence, until)
    if known.at_first is None:
        known.at_first = known.taken
    return known, newest[0]["unix_seconds"]


async def timeline(files: RunFiles, start: float | None, end: float | None) -> Timeline:
    """Lanes between two times, by default the whole run; workers of whom nothing is known between them have empty
    ones."""
    known, newest = await _read(files)
    record = await files.record()
    first, last = min(record.started, known.first), max(known.last, newest)
    if record.finished or last == -math.inf:
        last = record.finished or first
    shown_from, shown_to = start if start is not None else first, end if end is not None else last
    lanes = [
        Lane(
            name,
            line.role,
            tuple(s for s in line.spans if s.start <= shown_to and (s.end is None or s.end >= shown_from)),
            tuple(mark for mark in line.marks if shown_from <= mark.at <= shown_to),
        )
        for name, line in known.lines.items()
    ]
    return Timeline(shown_from, shown_to, tuple(sorted(lanes, key=lambda lane: (_ORDER.index(lane.role), lane.worker))))


async def episodes(files: RunFiles, start: float, end: float) -> Episodes:
    """The trajectories between two times, packed into lanes as environments run them: one after the other.

    Which environment an episode had is not recorded, so a lane is no particular one of them.
    """
    c = t.trajectories.c
    own, counted = c.run_id == files.run_id, select(func.count().label("count")).select_from(t.trajectories)
    # Those that ended in between are counted in the index `trajectories_by_time` alone, without a look at any of them.
    ended = await files.rows(counted.where(own, c.finished.between(start, end)))
    if ended[0]["count"] > MOST_EPISODES:
        return Episodes(int(ended[0]["count"]), ())
    within = (own, c.finished >= start, c.started <= end, c.pooled_from == "")  # a copy ran as its original
    columns = (c.id, c.task_name, c.success, c.steps, c.started, c.finished)
    rows = await files.rows(select(*columns).where(*within).order_by(c.started, c.id).limit(MOST_EPISODES + 1))
    if len(rows) > MOST_EPISODES:  # with those that still ran at the end
        return Episodes(int((await files.rows(counted.where(*within)))[0]["count"]), ())
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
            line.role = str(data.get("role", line.role))
            line.change(at, str(data.get("state", "")), f"{data.get('slots', 0)} slots")
        case "sync_started":
            line.change(at, "syncing", f"version {data.get('version')}")
        case "replica_health":
            line.serves = READY if data.get("state") == Condition.HEALTHY else str(data.get("state"))
            line.change(at, line.serves, str(data.get("why") or ""))
        case "sync":
            line.change(at, line.serves)
            line.marks.append(Mark(at, "version", f"version {data.get('version')}", sequence))
        case "sync_failed":
            line.change(at, line.serves)
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
    """A guess from the worker's name where the kind does not say it: older runs recorded no role."""
    if kind in _OF_TRAINER:
        return "train"
    if kind.startswith("sync") or kind in ("left_out", "replica_health"):
        return "rollout"
    return next((role for part, role in _ROLES.items() if part in name), "")
