"""`dart export`: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from dart import manifest
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.store.elsewhere.copies import copy_in
from dart.store.records import CheckpointRecord

NOT_EXPORTED = ("trainer_state*", "optimizer*", "*.tmp", manifest.NAME)
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
    if "://" in options.run:
        _export_copy(options)
        return
    run, out = RunDirectory.existing(Path(options.run)), options.out
    checkpoint = asyncio.run(_find(run, options.version))
    source = run.checkpoint(checkpoint.path)
    if why := manifest.problem(source):
        raise UserError(f"checkpoint {source} is damaged: {why}: choose another --version")
    if out.exists():
        raise UserError(f"OUT {out} already exists: name a new folder")
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(*NOT_EXPORTED))
    click.echo(f"version {checkpoint.version} is in {out}; load it with AutoModelForImageTextToText.from_pretrained")


def _export_copy(options: ExportOptions) -> None:
    """From `checkpoint.upload`/RUN/VERSION."""
    if options.version is not None:
        raise UserError(f"--version chooses a checkpoint of a run directory, and {options.run} is one: leave it out")
    if options.out.exists():
        raise UserError(f"OUT {options.out} already exists: name a new folder")
    copy_in(options.run.rstrip("/"), options.out)
    for pattern in NOT_EXPORTED:
        for file in options.out.glob(pattern):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    click.echo(f"{options.run} is in {options.out}; load it with AutoModelForImageTextToText.from_pretrained")


async def _find(run: RunDirectory, version: int | None) -> CheckpointRecord:
    async with await run.open() as database:
        kept = await database.checkpoints()
    if not kept:
        raise UserError(f"run {run.path} has no checkpoint yet: one is saved every checkpoint.every_updates updates")
    for checkpoint in kept:
        if version is None or checkpoint.version == version:
            return checkpoint
    raise UserError(f"--version {version} has no checkpoint: choose from {', '.join(str(c.version) for c in kept)}")
