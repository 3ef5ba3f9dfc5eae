"""`dart launch`: the command line of each engine, and of what they need beside it. Only click is imported here."""

from __future__ import annotations

from pathlib import Path

import click

from dart.cli_options import CONFIG, SET

DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")


@click.group()
def launch() -> None:
    """Start a training run on a cluster that exists: Ray, Slurm or Kubernetes."""


@launch.command("ray")
@CONFIG
@SET
@click.option(
    "--run",
    "run_directory",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Begin the run in this directory, or continue it. [default: a new one in run.directory]",
)
@DRY_RUN
def ray(config: Path, overrides: tuple[str, ...], run_directory: Path | None, dry_run: bool) -> None:
    """Train on a Ray cluster (docs/clusters.md). Ctrl-C ends every process of the run."""
    from dart.launch.ray import launch as start

    start(config, overrides, run_directory, dry_run=dry_run)


@launch.command()
@CONFIG
@SET
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Begin the run in this directory, or continue it, on a file system that all nodes see. "
    "[default: a new one in run.directory]",
)
@DRY_RUN
def slurm(config: Path, overrides: tuple[str, ...], run: Path | None, dry_run: bool) -> None:
    """Submit CONFIG to Slurm as one job, which comes back when its time is up until the run is finished."""
    from dart.launch.slurm import SlurmOptions
    from dart.launch.slurm import slurm as submit

    submit(SlurmOptions(config, overrides, run, dry_run))


@launch.command()
@CONFIG
@SET
@DRY_RUN
@click.option("--namespace", metavar="NAME", help="The namespace. [default: kubectl's]")
def k8s(config: Path, overrides: tuple[str, ...], dry_run: bool, namespace: str | None) -> None:
    """Start CONFIG as a Helm release on Kubernetes, or change the one that is there, which continues its run.

    The chart's values follow from CONFIG, and are written beside it. --dry-run prints them.
    """
    from dart.launch.k8s import K8sOptions, start

    start(K8sOptions(config, overrides, namespace, dry_run))
