"""Where a run begins: at nothing, or where an earlier process of it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from dart.core.evaluation.documents import Success
from dart.core.progress import Counts
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.database import Database
from dart.store.records import RunKind, RunState


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from: weights, version and counters of an earlier process, or nothing."""

    checkpoint: Path | None = None
    version: int = 0
    update: int = 0
    counts: Counts | None = None
    """As of the last update; None before any."""
    train_seconds: float = 0.0
    """Spent in training, as of the last update."""
    evaluations: dict[str, Success] = field(default_factory=dict)
    """Of the policy that the run began with."""
    first_group: int = 1
    first_event: int = 1


async def starting_point(database: Database, directory: RunDirectory) -> Start:
    """Where a resumed run goes on. Raises UserError when there is nothing to go on from."""
    run = await database.run()
    if run.kind is not RunKind.TRAINING:
        raise UserError(f"run {run.id} is no training run but one of {run.kind}: start it again without --resume")
    if run.state == RunState.FINISHED:
        raise UserError(f"run {run.id} is finished: start a new one without --resume")
    last = next((json.loads(event.json) for event in await database.newest_events("update")), None)
    counts, seconds = (Counts.from_json(last), last["train_seconds"]) if last else (None, 0.0)
    evaluations: dict[str, Success] = {}
    for event in await database.newest_events("evaluation", 100):
        result = json.loads(event.json)
        if (label := result.pop("label")) == "before":
            evaluations[label] = result
            break
    # Numbers go on behind everything that was given out, also where a group or an event was lost with the process.
    group, sequence = await database.group_count() + 1, await database.last_sequence() + 1
    checkpoint = await database.latest_checkpoint()
    if checkpoint is None:
        return Start(
            counts=counts, train_seconds=seconds, evaluations=evaluations, first_group=group, first_event=sequence
        )
    # One update makes one version, so the checkpoint's version is also the number of its update.
    made = checkpoint.version
    return Start(directory.checkpoint(checkpoint.path), made, made, counts, seconds, evaluations, group, sequence)
