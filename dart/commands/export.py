"""`dart export`: a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import click

from dart.commands.train import open_database
from dart.errors import UserError
from dart.store.records import CheckpointRecord

NOT_EXPORTED = ("trainer_state*", "optimizer*", "*.tmp")
"""What only a resumed trainer needs."""


def export(run: Path, out: Path, weight_version: int | None) -> None:
    """Copy the newest (or the named version's) checkpoint. Raises UserError; never writes over anything."""
    checkpoint = asyncio.run(_find(run, weight_version))
    source = run / "checkpoints" / Path(checkpoint.path).name
    if not source.exists():
        raise UserError(f"checkpoint {source} is gone from the disk: choose another --version")
    if out.exists():
        raise UserError(f"OUT {out} exists: name a new folder")
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(*NOT_EXPORTED))
    click.echo(f"version {checkpoint.version} is in {out}; load it with AutoModelForImageTextToText.from_pretrained")


async def _find(run: Path, version: int | None) -> CheckpointRecord:
    async with await open_database(run, create=False) as database:
        kept = await database.checkpoints()
    if not kept:
        raise UserError(f"run {run} has no checkpoint yet: one is made every checkpoint.every_updates updates")
    for checkpoint in kept:
        if version is None or checkpoint.version == version:
            return checkpoint
    raise UserError(f"--version {version} is not kept: there are {', '.join(str(c.version) for c in kept)}")
