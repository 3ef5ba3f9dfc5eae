"""`python -m dart.workers.env.osworld`: install OSWorld's evaluators, and list the tasks that can be run."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import click

from dart.errors import UserError
from dart.workers.env.osworld.evaluator import REQUIREMENT, check_installed, missing, without_evaluator
from dart.workers.env.osworld.options import EVALUATORS, Need
from dart.workers.env.osworld.tasks import Tasks, needs
from dart.worlds.missing import at_home

PYTHONS = ("python3.12", "python3.13")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """What the world osworld needs beside the package (docs/osworld.md)."""


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), default=EVALUATORS, show_default=True)
@click.option("--python", "interpreter", help="A Python 3.12 or newer. [default: uv's, else one on the PATH]")
@click.option("--with", "more", multiple=True, help="Another package: easyocr, for 36 tasks with text documents.")
def install_evaluators(folder: Path, interpreter: str | None, more: tuple[str, ...]) -> None:
    """Make the virtual environment with OSWorld's evaluators (1.5 GB). It needs Python 3.12 or newer."""
    target = at_home(folder)
    for command in _commands(target, interpreter, [REQUIREMENT, *more]):
        click.echo(" ".join(command))
        if subprocess.run(command, check=False).returncode:
            raise click.ClickException(f"{command[0]} failed: see above")
    if problem := missing(target):
        raise click.ClickException(problem)
    click.echo(f"environment.options.evaluators: {folder}")


def _commands(target: Path, interpreter: str | None, packages: list[str]) -> list[list[str]]:
    """With uv if it is there, which also fetches a Python; else with the interpreter's own venv and pip."""
    python = str(target / "bin" / "python")
    if uv := shutil.which("uv"):
        return [
            [uv, "venv", "--python", interpreter or "3.12", str(target)],
            [uv, "pip", "install", "--python", python, *packages],
        ]
    found = interpreter or next((name for name in PYTHONS if _runs(name)), None)
    if found is None:
        raise click.ClickException(
            f"OSWorld's evaluators need Python 3.12, and none of {', '.join(PYTHONS)} runs: `pip install uv`, "
            "which fetches one, or name an interpreter with --python"
        )
    return [[found, "-m", "venv", str(target)], [python, "-m", "pip", "install", "--quiet", *packages]]


def _runs(name: str) -> bool:
    """pyenv has a command for every version, but not all of them run."""
    return bool(shutil.which(name)) and not subprocess.run([name, "-V"], capture_output=True, check=False).returncode


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--without", multiple=True, type=click.Choice(["downloads", "websites"]), help="Leave out tasks that need these."
)
@click.option(
    "--evaluators", type=click.Path(path_type=Path), help="Leave out tasks that the evaluators here cannot grade."
)
def tasks(folder: Path, without: tuple[Need, ...], evaluators: Path | None) -> None:
    """List the tasks in FOLDER that are supported, for environment.tasks.names; on standard error, why others are
    not."""
    try:
        found = Tasks(folder)
        loaded = {name: found.load(name) for name in found.names}
        refused = {name: _needed(needs(task) & {"accounts", *without}) for name, task in loaded.items()}
        if evaluators is not None:
            check_installed(evaluators)
            refused |= asyncio.run(without_evaluator(evaluators, loaded))
    except UserError as error:
        raise click.ClickException(str(error)) from None
    for name, why in refused.items():
        click.echo(f"{name}: {why}" if why else name, err=bool(why))


def _needed(needed: frozenset[str]) -> str:
    return f"needs {', '.join(sorted(needed))}" if needed else ""


if __name__ == "__main__":
    main()
