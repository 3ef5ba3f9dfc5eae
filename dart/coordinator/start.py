"""Where a run begins: from scratch, or where an earlier process of it ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

from dart import manifest
from dart.coordinator.service.journal import Journal
from dart.core.evaluation.documents import ByDecoding
from dart.core.progress import Counts
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.database import Database
from dart.store.elsewhere.copies import copy_in
from dart.store.records import CheckpointRecord, RunKind, RunState

MOST_UNWRITTEN_EVENTS = 1_000
"""Numbers that are left out after a restart: watchers are sent events before the database has them, and those of a
process that was killed in between must not be given to other events."""


@dataclass(frozen=True, slots=True)
class BrokenCheckpoint:
    """A checkpoint that cannot be used."""

    folder: Path
    version: int
    why: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.why}"


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from: weights, version and counters of an earlier process, if there was one."""

    checkpoint: Path | None = None
    version: int = 0
    update: int = 0
    counts: Counts | None = None
    """As of the last update; None before the first."""
    train_seconds: float = 0.0
    """Spent in training, as of the last update."""
    evaluations: dict[str, ByDecoding] = field(default_factory=dict)
    """Those of the policy that the run began with, under the label "before"."""
    first_group: int = 1
    first_event: int = 1
    broken: tuple[BrokenCheckpoint, ...] = ()
    """Unusable checkpoints newer than `checkpoint`, newest first."""
    changed: tuple[str, ...] = ()
    """A line for each field of the config that is not as the run began with it."""


async def starting_point(
    database: Database, directory: RunDirectory, *, initial_weights: bool = False, copies: str | None = None
) -> Start:
    """Where a resumed run continues: at its newest intact checkpoint or, if asked for, at its initial weights.

    `copies`: where checkpoints were uploaded; one that is broken here is fetched from there.

    Raises UserError when the run cannot be resumed.
    """
    run = await database.run()
    if run.kind is not RunKind.TRAINING:
        raise UserError(f"run {run.id} is not for training but for {run.kind}: start it again without --resume")
    if run.state == RunState.FINISHED:
        raise UserError(f"run {run.id} is finished: start a new one without --resume")
    last = next((json.loads(event.json) for event in await database.newest_events("update")), None)
    counts, seconds = (Counts.from_json(last), last["train_seconds"]) if last else (None, 0.0)
    evaluations: dict[str, ByDecoding] = {}
    for event in await database.newest_events("evaluation", 100):
        result = json.loads(event.json)
        if (label := result.pop("label")) == "before":
            evaluations.setdefault(label, {}).setdefault(result.pop("decoding", "sampled"), result)
    checkpoint, broken = (None, ()) if initial_weights else await _newest_whole(database, directory, copies)
    # One update makes one version, so the checkpoint's version is also the number of its update.
    made = checkpoint.version if checkpoint else 0
    return Start(
        checkpoint=directory.checkpoint(checkpoint.path) if checkpoint else None,
        version=made,
        update=made,
        counts=counts,
        train_seconds=seconds,
        evaluations=evaluations,
        # Numbering continues after every number given out, even if its group or event was lost with the process.
        first_group=await database.group_count() + 1,
        first_event=await database.last_sequence() + 1 + MOST_UNWRITTEN_EVENTS,
        broken=broken,
    )


async def go_back(start: Start, database: Database, journal: Journal) -> tuple[set[str], int]:
    """Forget what an earlier process of the run did after this start.

    Returns the names of its newer checkpoints, which the next resume must not use, and the number of groups that wait
    to be trained on again.
    """
    abandoned = set()
    for checkpoint in await database.checkpoints():
        if checkpoint.version > start.version:
            await database.drop_checkpoint(checkpoint.path)
            abandoned.add(Path(checkpoint.path).name)
    for broken in start.broken:
        journal.event("checkpoint_broken", path=str(broken.folder), version=broken.version, why=broken.why)
    again = await database.release_again(start.update) if start.first_group > 1 else 0
    if again:
        journal.event("released_again", groups=again, reason="what they had trained was not saved")
    return abandoned, again


async def _newest_whole(
    database: Database, directory: RunDirectory, copies: str | None
) -> tuple[CheckpointRecord | None, tuple[BrokenCheckpoint, ...]]:
    """The newest intact checkpoint, and the damaged ones that are newer; None if there has been no checkpoint.

    Raises UserError if there are checkpoints but none is intact.
    """
    manifest.put_back(directory.checkpoints)
    broken: list[BrokenCheckpoint] = []
    for checkpoint in await database.checkpoints():
        folder = directory.checkpoint(checkpoint.path)
        why = await asyncio.to_thread(manifest.problem, folder)
        if why is not None and copies is not None:
            try:
                await asyncio.to_thread(copy_in, f"{copies}/{folder.name}", folder)
                why = None
            except UserError as error:
                why = f"{why}, and {error}"
        if why is None:
            return checkpoint, tuple(broken)
        broken.append(BrokenCheckpoint(folder, checkpoint.version, why))
    if broken:
        told = "; ".join(str(one) for one in broken)
        raise UserError(
            f"run {database.run_id} has no intact checkpoint: {told}: restore one of these folders from a copy, or "
            "add --initial-weights to start again from the weights of model.path with all that was sampled so far"
        )
    return None, ()
