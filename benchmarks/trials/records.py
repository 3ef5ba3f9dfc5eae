"""What is kept of a finished run: one JSON file, from which every table and picture is made, without its run directory.

`curve` is success in training, thinned; `episodes`, which only experiments on time keep, holds every training roll-out,
in the order in which they finished. `after` is the held-out success at the end, with both decodings. `pieces` says
which code made the run, and `starts` how often training was started.
"""

from __future__ import annotations

import asyncio
import bisect
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, NotRequired, TypedDict

import yaml
from sqlalchemy import select

from benchmarks.trials.protocol import Protocol
from benchmarks.trials.sources import Code
from dart.core.evaluation.documents import ByDecoding
from dart.core.json_text import JSON
from dart.rundir import RunDirectory
from dart.store import tables
from dart.store.database import Database
from dart.store.records import GroupKind

MOST_EVENTS = 1_000_000
SMOOTHING = 16
"""Success in training is smoothed over this many roll-outs of each task."""
MOST_POINTS = 150
"""Of a curve, in a record."""
KEPT = (
    "env_steps", "trajectories", "updates", "staleness", "dropped", "trained", "pooled", "unparsable",
    "infrastructure_failures", "train_seconds", "machine", "versions", "env_utilisation", "rollout_utilisation",
    "trainer_utilisation", "trained_actions_per_minute", "sampled_actions_per_minute", "time",
)  # fmt: skip
"""Fields of summary.json. Utilisation, throughput and time are those of the last piece."""


class Staleness(TypedDict):
    mean: float
    max: int
    trajectories: int


class Episode(NamedTuple):
    """`seconds`: of training, over all pieces. `task`: index in the record's `tasks`. `update`: the last one made."""

    seconds: float
    task: int
    steps: int
    success: int
    update: int


class Point(NamedTuple):
    """One point of a learning curve."""

    env_steps: int
    seconds: float
    update: int
    success: float


class Progress(TypedDict):
    """A run that goes on: its training roll-outs so far. Of one that has finished they may not be kept."""

    tasks: list[str]
    episodes: list[Episode]


class Record(Progress):
    curve: list[Point]
    arm: str
    seed: int
    overrides: list[str]
    after: ByDecoding | None
    env_steps: int
    trajectories: int
    updates: int
    staleness: Staleness
    dropped: dict[str, int]
    pooled: int
    train_seconds: float
    env_utilisation: float
    rollout_utilisation: float
    trainer_utilisation: float
    trained_actions_per_minute: float
    sampled_actions_per_minute: float
    time: dict[str, JSON]
    pieces: NotRequired[list[Code]]
    """The code that each of its pieces began with."""
    starts: NotRequired[int]
    """How often training was started; one that had only the evaluation left to do counts, too."""
    last_update_seconds: NotRequired[float]
    """Of training, over all pieces, until the last update was made. Not in records of before 2026-11-28."""
    protocol_sha256: NotRequired[str]
    config_sha256: NotRequired[str]
    base_sha256: NotRequired[str]


def curve(episodes: Sequence[Episode], smoothing: int = SMOOTHING) -> list[Point]:
    """Success in training: the mean over tasks of the success rate of each task's last `smoothing` roll-outs.

    Arms that sample tasks in other proportions stay comparable that way. It begins when every task of the run has had
    half that many.
    """
    recent: dict[int, deque[int]] = {episode.task: deque(maxlen=smoothing) for episode in episodes}
    missing, steps = set(recent), 0
    points: list[Point] = []
    for episode in episodes:
        recent[episode.task].append(episode.success)
        steps += episode.steps
        if len(recent[episode.task]) >= smoothing / 2:
            missing.discard(episode.task)
        if not missing:
            success = fmean([fmean(last) for last in recent.values()])
            points.append(Point(steps, episode.seconds, episode.update, success))
    return points


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most so many of a curve's points, the last among them, rounded."""
    every = -(-len(points) // (most - 1))
    kept = [*points[: -1 : every or 1], *points[-1:]]
    return [Point(steps, round(seconds, 1), update, round(success, 4)) for steps, seconds, update, success in kept]


def episodes_of(run: Progress, levels: Sequence[str], protocol: Protocol) -> list[Episode]:
    """The training roll-outs of these levels' tasks."""
    names = {task for level in levels for task in protocol.tasks_of(level, tuple(run["tasks"]))}
    return [one for one in run["episodes"] if run["tasks"][one.task] in names]


def read(run: RunDirectory, *, with_episodes: bool) -> dict[str, object]:
    """The fields of a record that come from its run directory."""
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    tasks = list(summary["config"]["environment"]["tasks"]["names"])
    episodes = asyncio.run(_episodes(run, tasks))
    kept = {name: summary[name] for name in KEPT if name in summary}
    starts, last_update = asyncio.run(_starts(run)), asyncio.run(_last_update(run))
    if last_update is not None:
        kept["last_update_seconds"] = round(last_update, 2)
    if with_episodes:
        kept["episodes"] = episodes
    points = thinned(curve(episodes))
    return {"after": summary["success_after"], "tasks": tasks, "curve": points, "starts": starts, **kept}


def so_far(run: RunDirectory) -> Progress:
    config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    tasks = list(config["environment"]["tasks"]["names"])
    return {"tasks": tasks, "episodes": asyncio.run(_episodes(run, tasks))}


def load(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    record["episodes"] = [Episode(*one) for one in record.get("episodes", [])]
    record["curve"] = [Point(*one) for one in record["curve"]]
    return record


async def _episodes(run: RunDirectory, tasks: Sequence[str]) -> list[Episode]:
    c, g = tables.trajectories.c, tables.groups.c
    async with await run.open() as database:
        clock = Clock([*await _anchors(database, "update"), *await _anchors(database, "phase")])
        training = select(g.id).where(g.run_id == database.run_id, g.kind == GroupKind.TRAINING)
        wanted = (
            select(c.finished, c.task_name, c.steps, c.success)
            .where(c.run_id == database.run_id, c.group_id.in_(training), c.pooled_from == "")
            .order_by(c.finished, c.id)
        )
        found = await database.read(lambda connection: connection.execute(wanted).all())
    index = {name: number for number, name in enumerate(tasks)}
    episodes = []
    for finished, name, steps, success in found:
        seconds, update = clock.at(finished)
        episodes.append(Episode(round(seconds, 1), index[name], steps, int(success), update))
    return episodes


async def _starts(run: RunDirectory) -> int:
    async with await run.open() as database:
        return len(await _anchors(database, "phase"))


async def _last_update(run: RunDirectory) -> float | None:
    """Seconds of training until the last update; None without an update."""
    async with await run.open() as database:
        made = await _anchors(database, "update")
    return max(made, key=lambda one: one[0])[1] if made else None


class Clock:
    """Training time at a moment of the wall clock, over all pieces of a run.

    `anchors`: (moment, seconds of training until then, update), at each update; and each beginning of training, with
    None for both.
    """

    def __init__(self, anchors: Sequence[tuple[float, float | None, int | None]]) -> None:
        self._moments: list[float] = []
        self._known: list[tuple[float, int]] = []
        seconds, update = 0.0, 0
        for moment, spent, made in sorted(anchors, key=lambda one: one[0]):
            seconds, update = seconds if spent is None else spent, update if made is None else made
            self._moments.append(moment)
            self._known.append((seconds, update))

    def at(self, moment: float) -> tuple[float, int]:
        """(seconds of training, the last update made)."""
        place = bisect.bisect_right(self._moments, moment) - 1
        if place < 0:
            return 0.0, 0
        seconds, update = self._known[place]
        return seconds + moment - self._moments[place], update


async def _anchors(database: Database, kind: str) -> list[tuple[float, float | None, int | None]]:
    found: list[tuple[float, float | None, int | None]] = []
    for event in await database.newest_events(kind, MOST_EVENTS):
        told = json.loads(event.json)
        if kind == "update":
            found.append((event.unix_seconds, told["train_seconds"], told["update"]))
        elif told["phase"] == "training":
            found.append((event.unix_seconds, None, None))
    return found
