"""Sends a tracker what is new in a run since the last look; how far that has come is kept beside the run."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dart.dashboard.exports import screenshots
from dart.dashboard.exports.frames import frames
from dart.errors import UserError
from dart.inspection.curves import evaluation_count, updates_after
from dart.inspection.inspector import Inspector
from dart.inspection.records import Curves, EvaluationPoint, TrajectoryDetail
from dart.inspection.runs import masked
from dart.inspection.wording import plain
from dart.store.records import RunKind, RunState
from dart.store.regular import is_regular
from dart.trackers.base import Picture, Tracker

if TYPE_CHECKING:
    from PIL import Image

FRAMES, COLUMNS, FRAME_WIDTH = 12, 4, 320
"""The most steps in one picture, how many of them side by side, and their width in pixels."""
_DATED = re.compile(r"-\d{8}-\d{6}")
"""In the name of a directory that dart named."""
_TRAINER = "trainer."
"""Curves hold the trainer's numbers twice, also under the name that the event gives them."""


@dataclass(slots=True)
class Following:
    """How far a tracker has come: the last update, the number of evaluations, the update of the last pictures."""

    updates: int = 0
    sequence: int = 0
    """Number of the last update's event: a resumed run makes updates again, whose events are newer."""
    evaluations: int = 0
    pictures: int = 0
    over: bool = False
    """It has been told how the run ended."""
    id: str = ""
    """What it calls the run."""

    @classmethod
    def read(cls, path: Path, run_id: str, started: float) -> Following:
        """As kept at `path`, or from the beginning of the run with this id, which began at `started` (Unix seconds).

        A run's id is the name of its directory. One that a person or a cluster chose may come again, and two runs must
        not become one: what it is called then says when it began, too.
        """
        found = cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()
        if not found.id:
            is_own = path.exists() or _DATED.search(run_id)
            found.id = run_id if is_own else f"{run_id}-{hashlib.sha256(repr(started).encode()).hexdigest()[:8]}"
        return found

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(asdict(self)), encoding="utf-8")
        aside.replace(path)


async def follow(inspector: Inspector, tracker: Tracker, at: Following, pictures: int, every_updates: int) -> int:
    """Send what is new and note in `at` what was sent. Returns the number of updates and evaluations.

    `pictures`: trajectories shown at once; 0 for none. `every_updates`: updates between them.
    """
    fresh = await updates_after(inspector.files, at.sequence)
    sent = 0
    if fresh or await evaluation_count(inspector.files) > at.evaluations:  # curves are read whole
        sent = _send(await inspector.curves(), fresh, tracker, at)
    if pictures and at.updates >= at.pictures + every_updates:
        if shown := await _pictures(inspector, pictures):
            tracker.pictures(at.updates, shown)
        at.pictures = at.updates
    return sent


def _send(curves: Curves, fresh: Mapping[int, int], tracker: Tracker, at: Following) -> int:
    """`fresh`: update → number of its event. Returns the number of updates and evaluations."""
    sent = 0
    known = set(curves.updates)
    for update, sequence in fresh.items():
        if update in known:  # else it is of a policy that a resumed run has abandoned
            tracker.numbers(update, _numbers(curves, update))
            at.updates, sent = update, sent + 1
            at.pictures = min(at.pictures, update - 1)
        at.sequence = sequence
    for point in curves.evaluations[at.evaluations :]:
        tracker.numbers(point.update, _held_out(point))
        at.evaluations, sent = at.evaluations + 1, sent + 1
    return sent


async def tell_outcome(inspector: Inspector, tracker: Tracker, at: Following) -> None:
    """Once, when the run has finished: its summary without secrets and the picture of its learning curve."""
    record = await inspector.files.record()
    directory = inspector.files.directory
    finished = directory.state(record) == RunState.FINISHED
    complete = record.kind != RunKind.TRAINING or directory.summary.exists()
    if at.over or not finished or not complete or record.summary is None:
        return
    tracker.outcome(masked(record.summary), picture if is_regular(picture := directory.learning_curve) else None)
    at.over = True


def _numbers(curves: Curves, update: int) -> Mapping[str, float]:
    place = bisect.bisect_left(curves.updates, update)
    told: dict[str, float | None] = {f"tasks/{name}": rates[place] for name, rates in curves.by_task.items()}
    for name, values in curves.series.items():
        if not name.startswith(_TRAINER):
            section = "trainer" if f"{_TRAINER}{name}" in curves.series else "run"
            told[name.replace(".", "/") if "." in name else f"{section}/{name}"] = values[place]
    return {name: value for name, value in told.items() if value is not None and math.isfinite(value)}


def _held_out(point: EvaluationPoint) -> Mapping[str, float]:
    name = f"held_out/{point.decoding or 'success'}"
    return {name: point.mean, f"{name}_low": point.low, f"{name}_high": point.high}


async def _pictures(inspector: Inspector, count: int) -> list[Picture]:
    """Pictures of the newest training trajectories that have screenshots."""
    page = await inspector.trajectories(kind="training", limit=count)
    shown = []
    for row in page.rows:
        detail = await inspector.trajectory(row.id)
        try:
            steps = list(frames(detail, await screenshots(inspector, detail)))
        except UserError:
            continue
        shown.append(Picture(row.id, _caption(detail), sheet(steps)))
    return shown


def _caption(detail: TrajectoryDetail) -> str:
    row = detail.row
    outcome = "success" if row.success else "failure"
    return plain(f"{row.id}: {row.instruction}: {outcome} after {row.steps} steps; {row.fate}", 400)


def sheet(steps: Sequence[Image.Image]) -> Image.Image:
    """The frames in rows, in one picture; of many, the first and the last."""
    from PIL import Image

    chosen = list(steps) if len(steps) <= FRAMES else [*steps[: FRAMES // 2], *steps[-FRAMES // 2 :]]
    height = round(chosen[0].height * FRAME_WIDTH / chosen[0].width)
    columns = min(COLUMNS, len(chosen))
    whole = Image.new("RGB", (columns * FRAME_WIDTH, math.ceil(len(chosen) / columns) * height))
    for number, frame in enumerate(chosen):
        row, column = divmod(number, columns)
        whole.paste(frame.resize((FRAME_WIDTH, height)), (column * FRAME_WIDTH, row * height))
    return whole
