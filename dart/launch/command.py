"""`dart launch`: the command line of each engine, and of what they need beside it. Only click is imported here."""

from __future__ import annotations

from pathlib import Path

import click

CONFIG = click.argument("config", type=click.Path(path_type=Path))
SET = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Change a field of the config."
)
DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would be started, and start nothing.")


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="Trust this certificate authority, and use TLS.")
def health(address: str, tls_ca: Path | None) -> None:
    """Ask the coordinator at HOST:PORT whether it is there, as a cluster's probe. It prints what the coordinator says.

    SERVING, or NOT_SERVING while the run makes no progress: the exit code is 0 for both, and 2 if nothing answers.
    """
    from dart.commands.look.health import health as check

    check(address, tls_ca)


@click.group()
def launch() -> None:
    """Start a training run on a cluster that exists: Ray, Slurm or Kubernetes."""


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
