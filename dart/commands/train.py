"""`dart train` and `dart coordinator`: start a training run in a new directory, or continue one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shlex
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dart.commands.evaluate import undone
from dart.commands.running import JobRun, check_before, given_again, run_held
from dart.config import Config, load
from dart.coordinator.sampling.sources import POOL, SFT, check_sources
from dart.coordinator.summary import Summary
from dart.core.evaluation.documents import ByDecoding
from dart.core.fleet.restarts import LASTING_SECONDS, MOST_RESTARTS, pause_seconds
from dart.errors import INTERRUPTED, ProcessLost, UserError
from dart.job import Train
from dart.processes import secrets
from dart.processes.beside import Beside
from dart.rundir import HERE, RunDirectory
from dart.store.elsewhere.place import check
from dart.store.lock import Hold
from dart.wire.channel import listen, listening_host


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The command line of `dart train`; `local_workers` False is `dart coordinator`."""

    config: Path
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    quiet: bool = False
    initial_weights: bool = False
    local_workers: bool = True
    run: Path | None = None
    """Begin the run in this directory, or continue the one that is there."""
    host: str | None = None
    """Listen on this address, with tokens and a certificate that the run keeps in its directory."""
    parent_watch: bool = False
    """End when standard input, a pipe from a supervisor, closes."""
    again: str | None = None
    """The command that continues the run, from the launcher that has started this one."""


def train(options: TrainOptions) -> None:
    """Run to the end; exit code 0 when it finished, 130 when it was interrupted. Raises UserError."""
    continues = options.resume is not None or (options.run is not None and RunDirectory(options.run).is_run)
    if options.initial_weights and not continues:
        raise UserError("--initial-weights applies only to a run that is continued: omit it, or add --resume RUN")
    config = load(options.config, options.overrides)
    resumed, given = _directories(options)
    if options.host is not None and given is not None:
        config = load(options.config, options.overrides + _listening(given, options.host, config.server.port))
    if given is not None and given.summary.is_file():
        click.echo(f"run {given.path} is finished: its outcome is in {given.summary}")
        return
    job = Train()
    if options.local_workers:
        check_before(config, job)
    else:
        check(config.run, config.checkpoint.upload)
    if not continues:
        asyncio.run(check_sources(config, SFT if config.algorithm == "sft" else POOL))
    directory = resumed or given or RunDirectory.make(config.run.directory, config.run.name)
    wanted = JobRun(
        config,
        directory,
        job,
        options.quiet,
        resume=resumed is not None,
        local=options.local_workers,
        initial_weights=options.initial_weights,
        either=given is not None,
        parent_watch=options.parent_watch,
        beside=functools.cache(partial(_dashboard, config, directory)),
        again=_again(options, directory, continues=continues),
    )
    with directory.lock() as hold:  # also between two attempts: nobody else is to take the run up
        summary = _to_the_end(wanted, hold)
    if summary is None:
        sys.exit(INTERRUPTED)
    from dart.commands.plot import learning_curve

    picture = learning_curve(directory)
    if config.tracking.to:
        from dart.commands.track import last_words

        last_words(directory, config.tracking.to)
    report(summary, directory.path, picture)


def _to_the_end(wanted: JobRun, hold: Hold) -> Summary | None:
    """As `run_held`. With local workers, a run whose trainer was lost, or that hangs, is resumed with new processes,
    at most MOST_RESTARTS times in a row without a new checkpoint. Raises UserError."""
    restarts = 0
    while True:
        before, began = _checkpoints(wanted.directory), time.monotonic()
        try:
            return run_held(wanted, hold)
        except ProcessLost as error:
            now = _checkpoints(wanted.directory)
            worked = time.monotonic() - began > LASTING_SECONDS
            if now.items() - before.items():  # also one that took the place of another
                wanted, worked = replace(wanted, initial_weights=False), True
            if now.keys() - before.keys():
                restarts = 0
            if not wanted.local or restarts == MOST_RESTARTS:
                raise
            restarts += 1
            pause = pause_seconds(restarts)
            click.echo(
                f"{error.why}; the run is resumed after {pause:g} s (attempt {restarts} of {MOST_RESTARTS}, counted "
                "anew from the next checkpoint on)",
                err=True,
            )
            try:
                time.sleep(pause)
            except KeyboardInterrupt:
                click.echo(f"interrupted; {wanted.to_go_on}")
                return None
            wanted = replace(wanted, resume=True, has_worked=wanted.has_worked or worked)


def _dashboard(config: Config, directory: RunDirectory) -> Beside | None:
    """The run's dashboard, whose address is printed. Called while the run is locked: its directory keeps the address.

    Raises UserError for a host that fails, and a run directory that cannot be written to.
    """
    if not config.dashboard.enabled:
        return None
    beside = Beside.of(config, directory.path)
    click.echo(beside.told(to_terminal=sys.stdout.isatty()))
    return beside


def _checkpoints(directory: RunDirectory) -> dict[Path, int]:
    """The folders with their inodes: one that takes another's place has its own."""
    return {folder: folder.stat().st_ino for folder in directory.checkpoints.glob("v*")}


def _again(options: TrainOptions, directory: RunDirectory, *, continues: bool) -> tuple[str, ...]:
    """The command that continues the run as it was started, or as its launcher says. The config in the run's directory
    has everything that it began with, and nothing that it was given later."""
    if options.again is not None:
        return tuple(shlex.split(options.again))
    words = ["dart", "train" if options.local_workers else "coordinator", f"{HERE}/{directory.config.name}"]
    if continues:
        words[2:] = given_again(options.config, options.overrides, directory)
    words += ["--run" if options.run is not None else "--resume", HERE]
    return (*words, *(["--host", options.host] if options.host is not None else []))


def _directories(options: TrainOptions) -> tuple[RunDirectory | None, RunDirectory | None]:
    """(the run to continue, the directory of one that is begun or continued). Raises UserError."""
    if options.run is not None and options.resume is not None:
        raise UserError("--run begins a run or continues it, so --resume adds nothing: omit one of them")
    if options.host is not None and options.run is None:
        raise UserError("--host keeps tokens in the run's directory: add --run RUN")
    resumed = RunDirectory.existing(options.resume) if options.resume else None
    return resumed, RunDirectory.at(options.run) if options.run else None


def _listening(directory: RunDirectory, host: str, port: int) -> tuple[str, ...]:
    """The settings of a server that other machines reach.

    One without a port of its own takes the one that it had before, if that is still free: workers redial it.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    with directory.lock():  # a coordinator that works there keeps its certificate
        secrets.prepare(directory.secrets, host)
    if port == 0 and directory.address.is_file():
        before, _, number = directory.told_address().rpartition(":")
        port = int(number) if before.strip("[]") == host.strip("[]") and _is_free(host, int(number)) else 0
    return (f"server.host={json.dumps(host)}", f"server.port={port}", *secrets.overrides(directory.secrets.absolute()))


def _is_free(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), listen(listening_host(host), port):
        return True
    return False


def report(summary: Summary, directory: Path, picture: Path | None) -> None:
    """Print the outcome of the run."""
    before, after = summary["success_before"], summary["success_after"]
    if after:
        Console().print(success_table(before or {}, after))
        for when, results in (("before", before or {}), ("after", after)):
            for decoding, success in results.items():
                for line in undone(success):
                    click.echo(f"{decoding} {when}: {line}")
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
    episodes = [success["episodes"] for _, success in sides]
    each = f", {episodes[0]} episodes each" if len(set(episodes)) == 1 else ""
    table = Table(title=f"held-out success{each}", title_justify="left", box=None, pad_edge=False)
    table.add_column("task")
    for name, _ in sides:
        table.add_column(name, justify="right")
    for task in dict.fromkeys(task for _, success in sides for task in success["per_task"]):
        rates = [success["per_task"].get(task) for _, success in sides]
        table.add_row(task, *(f"{rate['mean']:.0%}" if rate else "not evaluated" for rate in rates))
    if not each:
        table.add_row("episodes", *map(str, episodes))
    table.add_row("all", *(f"{success['mean']:.1%}" for _, success in sides))
    intervals = (f"{success['low']:.1%} to {success['high']:.1%}" for _, success in sides)
    table.add_row("95 % interval", *intervals)
    table.add_row("temperature", *(f"{success['temperature']:g}" for _, success in sides))
    return table
