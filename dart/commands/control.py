"""`dart control`: pause, resume, drain and save a live run from a shell."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from dart.inspection.condition import check_one, dial_of
from dart.inspection.opening import RunFiles
from dart.rundir import RunDirectory
from dart.wire.channel import TOKEN_ENVIRONMENT, Dial
from dart.wire.levers import pull


def control(lever: str, run: Path | None, address: str | None, tls_ca: Path | None) -> None:
    """Print what was done. `run` None means the newest under runs/; `address`: that coordinator. Raises UserError."""
    click.echo(asyncio.run(_control(lever, run, address, tls_ca)))


async def _control(lever: str, run: Path | None, address: str | None, tls_ca: Path | None) -> str:
    check_one(run, address)
    if address is not None:
        return await pull(Dial(address, os.environ.get(TOKEN_ENVIRONMENT), tls_ca), lever)
    files = await RunFiles.open(RunDirectory.chosen(run))
    try:
        dial = await dial_of(files, tls_ca)
    finally:
        await files.close()
    return f"{files.directory.name}: {await pull(dial, lever)}"
