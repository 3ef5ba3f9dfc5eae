"""`dart train` and `dart coordinator`: start a training run in a new directory, or continue one."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dart.commands.running import JobRun, check_before, run_in_loop
from dart.config import load
from dart.coordinator.job import Train
from dart.coordinator.sampling.sources import POOL, SFT, check_sources
from dart.core.evaluation.documents import ByDecoding
from dart.errors import UserError
from dart.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The command line of `dart train`; `local_workers` False is `dart coordinator`."""

    config: Path
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    quiet: bool = False
    initial_weights: bool = False
    local_workers: bool = True


def train(options: TrainOptions) -> None:
    """Run to the end; exit code 0 when it finished, 130 when it was interrupted. Raises UserError."""
    if options.initial_weights and options.resume is None:
        raise UserError("--initial-weights applies only to a resumed run: omit it, or add --resume RUN")
    config = load(options.config, options.overrides)
    resumed = RunDirectory.existing(options.resume) if options.resume else None
    job = Train()
    if options.local_workers:
        check_before(config, job)
    if resumed is None:
        asyncio.run(check_sources(config, SFT if config.algorithm == "sft" else POOL))
    directory = resumed or RunDirectory.make(config.run.directory, config.run.name)
    wanted = JobRun(
        config,
        directory,
        job,
        options.quiet,
        resume=resumed is not None,
        local=options.local_workers,
        initial_weights=options.initial_weights,
    )
    summary = run_in_loop(wanted)
    if summary is None:
        sys.exit(130)
    from dart.commands.plot import learning_curve

    picture = learning_curve(directory)
    if config.tracking.to:
        from dart.commands.track import last_words

        last_words(directory, config.tracking.to)
    report(summary, directory.path, picture)


def report(summary: dict[str, Any], directory: Path, picture: Path | None) -> None:
    """Print the outcome of the run."""
    before, after = summary["success_before"], summary["success_after"]
    if after:
        Console().print(success_table(before or {}, after))
    if seen := summary["evaluated_on_training_tasks"]:
        click.echo(f"not held out, because training has their only instance: {', '.join(seen)}")
    click.echo(
        f"{summary['updates']} updates, {summary['trajectories']} trajectories, {summary['env_steps']} steps in "
        f"{summary['train_seconds']:.0f} s; environments busy {summary['env_utilisation']:.0%}, "
        f"replicas {summary['rollout_utilisation']:.0%}"
    )
    click.echo(f"run directory {directory}" + (f", learning curve {picture}" if picture else ""))


def success_table(before: ByDecoding, after: ByDecoding) -> Table:
    """Held-out success by task and over all, before and after training, with each decoding.

    One that was not evaluated before training has no column for it.
    """
    sides = [
        (f"{decoding} {when}", results[decoding])
        for decoding in after
        for when, results in (("before", before), ("after", after))
        if decoding in results
    ]
    episodes = sides[0][1]["episodes"]
    table = Table(title=f"held-out success, {episodes} episodes each", title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    for name, _ in sides:
        table.add_column(name, justify="right")
    for task in dict.fromkeys(task for _, success in sides for task in success["per_task"]):
        rates = [success["per_task"].get(task) for _, success in sides]
        table.add_row(task, *(f"{rate['mean']:.0%}" if rate else "not evaluated" for rate in rates))
    table.add_row("all", *(f"{success['mean']:.1%}" for _, success in sides))
    intervals = (f"{success['low']:.1%} to {success['high']:.1%}" for _, success in sides)
    table.add_row("95 % interval", *intervals)
    table.add_row("temperature", *(f"{success['temperature']:g}" for _, success in sides))
    return table
