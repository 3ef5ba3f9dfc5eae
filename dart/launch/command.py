"""`dart launch`: the command line of each engine, and of what they need beside it. Only click is imported here."""

from __future__ import annotations

from pathlib import Path

import click

from dart.cli_options import CONFIG, SET

DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")


@click.group(epilog="Example: dart launch ray configs/ladder_demo.yaml --dry-run")
def launch() -> None:
    """Train on a cluster that exists: Ray, Slurm or Kubernetes."""


@launch.command("ray", epilog="Example: dart launch ray configs/ladder_demo.yaml --dry-run")
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
    """Train on a Ray cluster; Ctrl-C ends every process."""
    from dart.launch.ray import launch as start

    start(config, overrides, run_directory, dry_run=dry_run)


@launch.command(epilog="Example: dart launch slurm configs/ladder_demo.yaml --run runs/shared")
@CONFIG
@SET
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Begin the run in this directory, which all nodes see, or continue it. [default: a new one in run.directory]",
)
@DRY_RUN
def slurm(config: Path, overrides: tuple[str, ...], run: Path | None, dry_run: bool) -> None:
    """Submit CONFIG as a job that comes back until it is done."""
    from dart.launch.slurm import SlurmOptions
    from dart.launch.slurm import slurm as submit

    submit(SlurmOptions(config, overrides, run, dry_run))


@launch.command(epilog="Example: dart launch k8s my.yaml --namespace rl --dry-run")
@CONFIG
@SET
@DRY_RUN
@click.option("--namespace", metavar="NAME", help="The namespace. [default: kubectl's]")
def k8s(config: Path, overrides: tuple[str, ...], dry_run: bool, namespace: str | None) -> None:
    """Install CONFIG as a Helm release, or upgrade it.

    An upgrade continues the run. The chart's values are written beside CONFIG.
    """
    from dart.launch.k8s import K8sOptions, start

    start(K8sOptions(config, overrides, namespace, dry_run))
