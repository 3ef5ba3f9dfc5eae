"""`dart launch`: the command line of each engine. Only click is imported here."""

from __future__ import annotations

from pathlib import Path

import click

CONFIG = click.argument("config", type=click.Path(path_type=Path))
SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Change a field of the config."
)
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")


@click.group()
def launch() -> None:
    """Start a training run on a cluster that exists: Ray, Slurm or Kubernetes."""
