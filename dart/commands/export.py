"""`dart export`: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from dart import manifest
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.elsewhere.copies import copy_in
from dart.store.records import CheckpointRecord

_NOT_EXPORTED = shutil.ignore_patterns("trainer_state*", "optimizer*", "*.tmp", manifest.NAME)
"""Files that only a resumed trainer needs."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The command line of `dart export`. `run`: a directory, or the URL of a copied checkpoint. `version` None means
    the newest checkpoint."""

    run: str
    out: Path
    version: int | None = None


def export(options: ExportOptions) -> None:
    """Copy the newest (or the named version's) checkpoint. Raises UserError; never overwrites anything."""
    if options.out.exists():
        raise UserError(f"OUT {options.out} already exists: name a new folder")
    what = _export_copy(options) if "://" in options.run else _export_checkpoint(options)
    click.echo(f"{what} is in {options.out}; load it with AutoModelForImageTextToText.from_pretrained")


def _export_checkpoint(options: ExportOptions) -> str:
    run = RunDirectory.existing(Path(options.run))
    checkpoint = asyncio.run(_find(run, options.version))
    source = run.checkpoint(checkpoint.path)
    if why := manifest.problem(source):
        raise UserError(f"checkpoint {source} is damaged: {why}: choose another --version")
    with _whole(options.out) as new:
        shutil.copytree(source, new, ignore=_NOT_EXPORTED)
    return f"version {checkpoint.version}"


def _export_copy(options: ExportOptions) -> str:
    """From `checkpoint.upload`/RUN/VERSION."""
    if options.version is not None:
        raise UserError(
            f"--version chooses among a run directory's checkpoints, and {options.run} names one: leave it out"
        )
    with _whole(options.out) as new:
        fetched = new.with_name("fetched")
        copy_in(options.run.rstrip("/"), fetched)
        shutil.copytree(fetched, new, ignore=_NOT_EXPORTED, copy_function=os.rename)
    return options.run


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """The folder to make, in an empty one beside `out`: it gets the name `out` when the block has ended, and nothing
    is left of it if the block fails. Raises UserError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
            new = Path(beside) / "new"
            yield new
            new.rename(out)
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # the first of many files
        raise UserError(
            f"OUT {out} cannot be made ({why}): name a writable folder on a disk with room for it; if the checkpoint "
            "is gone, because its run has newer ones, export again"
        ) from None


async def _find(run: RunDirectory, version: int | None) -> CheckpointRecord:
    async with await run.open() as database:
        kept = await database.checkpoints()
    if not kept:
        raise UserError(f"run {run.path} has no checkpoint yet: one is saved every checkpoint.every_updates updates")
    for checkpoint in kept:
        if version is None or checkpoint.version == version:
            return checkpoint
    raise UserError(f"--version {version} has no checkpoint: choose from {', '.join(str(c.version) for c in kept)}")
