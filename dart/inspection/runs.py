"""The list of runs, and what is known of one run as a whole."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter
from sqlalchemy import ColumnElement, Connection, func, select

from dart.core.curation.judging import REPLACED
from dart.core.fates import dropped
from dart.core.json_text import read_object
from dart.errors import UserError
from dart.inspection.condition import last_figures, newest_events
from dart.inspection.opening import RunFiles, TooSlow, shown, state_of, told
from dart.inspection.records import Checkpoint, RunOverview, RunRow
from dart.inspection.tokens import find_tokenizer
from dart.rundir import RunDirectory
from dart.store import tables as t
from dart.store.records import GroupKind, RunKind, RunRecord, RunState

AT_ONCE = 4
"""Runs that are read for the list at a time."""
LISTED_SECONDS = 0.25
"""Of the processor, for each thing that the list asks of a run."""
_ROW = TypeAdapter(RunRow)
SECRET = "(not shown)"
_SECRET_WORDS = (
    "token", "key", "password", "passwords", "secret", "secrets", "authorization", "credential", "credentials",
)  # fmt: skip
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The user and password of a URL."""
_REFERENCES = ("env:", "file:")
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*=).+")
"""A variable and what a line of a shell assigns to it, with what follows."""
_PARTS = ("coordinator", "env", "rollout", "train")
"""Sections of the config, or of the chart's values in it, whose `environment` holds variables."""


def run_directories(paths: Sequence[Path]) -> list[RunDirectory]:
    """The run directories that the paths name: each a run's own, or a folder of them. Newest first within a folder.

    Raises UserError for a path that is neither.
    """
    found: dict[Path, RunDirectory] = {}
    for path in paths:
        directory = RunDirectory(path)
        if not path.is_dir():
            raise UserError(f"{path} is not a directory: name a run directory, or a folder of them")
        for one in [directory] if directory.is_run else RunDirectory.all_under(path):
            found.setdefault(one.path.resolve(), one)
    return list(found.values())


def by_id(directories: Sequence[RunDirectory]) -> dict[str, RunDirectory]:
    """The directories by the ids of their runs, in the same order.

    A run's id is the name of its directory. Where several have one name, as copies do, each but the first says in
    parentheses where it is: as much of the end of that path as no other of them has, with colons for slashes.
    """
    places: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for directory in directories:
        places[shown(directory.name)].append(_place(directory))
    found: dict[str, RunDirectory] = {}
    for directory in directories:
        name = id = shown(directory.name)
        if id in found:
            id = f"{name} ({shown(_end(_place(directory), places[name]))})"
        while id in found:  # a name may look like another's
            id += "'"
        found[id] = directory
    return found


def _place(directory: RunDirectory) -> tuple[str, ...]:
    return directory.path.absolute().parent.parts[1:]


def _end(own: tuple[str, ...], all_of_name: Sequence[tuple[str, ...]]) -> str:
    shared = (n for n in range(1, len(own) + 1) if sum(parts[-n:] == own[-n:] for parts in all_of_name) > 1)
    return ":".join(own[-1 - max(shared, default=0) :])


Kept = dict[Path, tuple[object, RunRow]]
"""By directory, the rows of runs that no process works on, or that an older dart wrote, or that take too long to read;
each with its `state_of` then."""


async def rows_of(directories: Sequence[RunDirectory], kept: Kept | None = None) -> list[RunRow]:
    """One row for each run, newest first. One that cannot be read has its `problem`.

    `kept`: given with every listing of the same paths, it saves what need not be read again.
    """
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(id: str, directory: RunDirectory) -> RunRow:
        async with turn:
            return await _row(id, directory, {} if kept is None else kept)

    rows = await asyncio.gather(*(one(id, directory) for id, directory in by_id(directories).items()))
    return sorted(rows, key=lambda row: row.started, reverse=True)


async def _row(id: str, directory: RunDirectory, kept: Kept) -> RunRow:
    now = state_of(directory)
    then, row = kept.get(directory.path, (None, None))
    if row is not None and then == now:
        return replace(row, id=id)
    try:
        with told(shown(directory.path)):
            files = await RunFiles.open(directory, id, LISTED_SECONDS)
            async with files:
                row = _ROW.validate_python(asdict(await run_row(files)))
            keeps = files.migrated or (row.state != RunState.RUNNING and not files.elsewhere)
    except (UserError, OSError) as error:
        row, keeps = _unreadable(id, directory, shown(str(error))), isinstance(error, TooSlow)
    if keeps:
        kept[directory.path] = now, row
    return row


def _unreadable(id: str, directory: RunDirectory, problem: str) -> RunRow:
    return RunRow(id, shown(directory.name), "", "", 0.0, None, shown(directory.path), 0, 0, None, problem)


async def run_row(files: RunFiles) -> RunRow:
    record = await files.record()
    figures = await last_figures(files)
    success = figures.success_rate if figures else None
    if record.kind == RunKind.EVALUATION:
        evaluated = await newest_events(files, "evaluation")
        success = float(read_object(evaluated[0].json)["mean"]) if evaluated else None
    count = await files.read(lambda connection: _counted(connection, record))
    return RunRow(
        id=files.id,
        name=record.name,
        kind=str(record.kind),
        state=str(files.directory.state(record)),
        started=record.started,
        finished=record.finished,
        directory=shown(files.directory.path),
        updates=figures.counts.updates if figures else 0,
        trajectories=count,
        success_rate=success,
    )


def _counted(connection: Connection, record: RunRecord) -> int:
    """The run's trajectories; of a training run without those of evaluations, those that were copied from other runs,
    and copies from the pool.

    Each part is counted in an index alone. No index has the copies, but each has replaced a failure whose fate says so,
    and no longer changes.
    """
    c, g = t.trajectories.c, t.groups.c

    def count(*where: ColumnElement[bool]) -> int:
        found: int = connection.execute(select(func.count()).select_from(t.trajectories).where(*where)).scalar_one()
        return found

    everything = count(c.run_id == record.id)
    if record.kind != RunKind.TRAINING:
        return everything
    others = select(g.id).where(g.run_id == record.id, g.kind != GroupKind.TRAINING)
    copies = count(c.run_id == record.id, c.fate == dropped(REPLACED))
    return everything - count(c.group_id.in_(others)) - copies


async def overview(files: RunFiles) -> RunOverview:
    record = await files.record()
    row = await run_row(files)
    c = t.checkpoints.c
    kept = await files.rows(select(t.checkpoints).where(c.run_id == files.run_id, c.kept).order_by(c.version.desc()))
    return RunOverview(
        run=row,
        config=masked(record.config),
        summary=record.summary and masked(record.summary),
        missing=tuple(await _missing(files, record, row.state)),
        checkpoints=tuple(Checkpoint(r["path"], r["version"], r["created"], r["success_rate"]) for r in kept),
        token_texts=find_tokenizer(files.directory, record.config) is not None,
    )


async def _missing(files: RunFiles, record: RunRecord, state: str) -> list[str]:
    """What a reader of this run must know is not there."""
    c = t.trajectories.c
    notes = list(files.notes)
    if state == RunState.INTERRUPTED and record.finished is None:
        notes.append("Its process ended without recording why; everything up to its last transaction is here.")
    removed = await files.rows(
        select(func.count().label("count")).where(c.run_id == files.run_id, c.screenshots_kept.is_(False))
    )
    if count := int(removed[0]["count"]):
        of = "1 trajectory" if count == 1 else f"{count:,} trajectories"
        notes.append(f"The screenshots of {of} were removed to stay within retention.screenshot_bytes.")
    kept = _events_kept(record.config)
    if kept and await _counted_events(files) >= kept:
        notes.append(
            f"Events older than the newest {kept:,} were deleted (retention.events), except those that tell the run's "
            "story: updates, evaluations, checkpoints, workers that came or were lost, phases, pauses and failures of "
            "the run."
        )
    where = files.screenshots
    if isinstance(where, Path) and not where.is_dir():
        notes.append(f"{shown(where)} is not there, so no screenshot can be shown.")
    elif files.are_local:  # a store would be asked for each of them
        lost, looked_for = await _lost_screenshots(files)
        if lost:
            notes.append(f"{lost} of {looked_for} screenshots that were looked for are not in {shown(where)}.")
    if record.kind == RunKind.TRAINING and not files.directory.summary.is_file() and state == RunState.FINISHED:
        notes.append("summary.json is not there.")
    notes += (f"{file.name} is no regular file, so it is not read." for file in files.directory.irregular())
    return notes


def _events_kept(config: Any) -> int:
    """0 where the run is of a release that kept all."""
    return int(config.get("retention", {}).get("events") or 0)


async def _counted_events(files: RunFiles) -> int:
    rows = await files.rows(select(func.count().label("count")).where(t.events.c.run_id == files.run_id))
    return int(rows[0]["count"])


_SAMPLED = 200


async def _lost_screenshots(files: RunFiles) -> tuple[int, int]:
    """How many of up to `_SAMPLED` screenshots that should be there have no bytes, and how many were looked for."""
    s, c = t.screenshots.c, t.trajectories.c
    newest = select(c.id).where(c.run_id == files.run_id, c.screenshots_kept).order_by(c.finished.desc()).limit(50)
    rows = await files.rows(select(s.sha256).where(s.trajectory_id.in_(newest)).limit(_SAMPLED))
    names = [row["sha256"].hex() for row in rows]
    return await asyncio.to_thread(lambda: sum(not files.holds(name) for name in names)), len(names)


def masked(config: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """The config, or a summary with it, without secrets. Replaced are all environment variables, what the lines of
    `cluster.slurm.setup` assign, whatever has a name that sounds like a secret's, unless it is a reference ("env:NAME",
    "file:PATH"), and users and passwords in URLs."""
    return {name: _masked((name,), value) for name, value in config.items()}


def _masked(path: tuple[str, ...], value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _masked((*path, name), item) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(path, item) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if path[-2:] == ("slurm", "setup"):
        return _ASSIGNED.sub(rf"\1{SECRET}", value)
    is_variable = len(path) > 2 and path[-3] in _PARTS and path[-2] == "environment"
    sounds_secret = path[-1].lower().endswith(_SECRET_WORDS) and not value.startswith(_REFERENCES)
    return SECRET if is_variable or sounds_secret else _IN_ADDRESS.sub(SECRET, value)
