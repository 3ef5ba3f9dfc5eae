"""`dart train` and `dart coordinator`: a run directory, a run, and its view."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from dart.agent.vocabulary import vocabulary_digest
from dart.config import Config, load
from dart.coordinator.job import Job, Train
from dart.coordinator.run import Interrupted, Run
from dart.coordinator.sampling.sources import POOL, SFT, check_sources
from dart.coordinator.start import Start, starting_point
from dart.errors import UserError
from dart.launcher import Launcher, local_children
from dart.process import collect_seldom, ending_signals, keep_memory
from dart.store.database import Database, sqlite_url
from dart.store.lock import held
from dart.store.records import RunKind


def train(
    config_path: Path, overrides: Sequence[str], resume: Path | None, *, quiet: bool, local_workers: bool
) -> None:
    """Run to the end; exit code 0 when it finished, 130 when it was interrupted. Raises UserError."""
    config = load(config_path, overrides)
    if resume and not (resume / "run.db").exists():
        raise not_a_run(resume)
    job = Train()
    if local_workers:
        check_before(config, job)
    if not resume:
        asyncio.run(check_sources(config, SFT if config.algorithm == "sft" else POOL))
    directory = resume if resume else new_directory(config, config.run.name)
    summary = run_in_loop(config, directory, job, resume=bool(resume), quiet=quiet, local=local_workers)
    if summary is None:
        sys.exit(130)
    from dart.commands.plot import learning_curve

    picture = learning_curve(directory)
    report(summary, directory, picture)


def check_before(config: Config, job: Job) -> None:
    """Everything that this machine lacks for the job, before anything starts. Raises UserError."""
    from dart.commands.doctor import problems

    if found := problems(config, job):
        raise UserError("\n".join(found))


def new_directory(config: Config, name: str) -> Path:
    """A run directory of its own: a second run never touches the first's."""
    base = config.run.directory / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        directory = base if number == 0 else base.with_name(f"{base.name}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"run.directory: {directory} cannot be made ({error.strerror}): choose a writable folder"
            ) from None
        return directory
    raise UserError(f"run.directory: {base} and 999 others exist: remove some")


def run_in_loop(
    config: Config, directory: Path, job: Job, *, quiet: bool, resume: bool = False, local: bool = True
) -> dict[str, Any] | None:
    """The summary, or None when the run was interrupted. `local`: its workers are started here."""
    import uvloop

    collect_seldom()
    keep_memory()
    with held(directory):
        logging.basicConfig(
            filename=directory / "coordinator.log",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            force=True,  # a comparison has two runs, each with its own log
        )
        return uvloop.run(_run(config, directory, job, resume=resume, quiet=quiet, local=local))


async def _run(
    config: Config, directory: Path, job: Job, *, resume: bool, quiet: bool, local: bool
) -> dict[str, Any] | None:
    async with await open_database(directory, create=not resume) as database:
        if resume:
            start = await starting_point(database, directory)
            await database.resume_run()
        else:
            start = Start()
            (directory / "config.yaml").write_text(
                yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False), encoding="utf-8"
            )
            await database.start_run(
                directory.name,
                config.run.name,
                _recorded(config, job),
                started=time.time(),
                kind=job.kind,
            )
        run = Run(config, directory, database, job, start)
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, run.interrupt)

        async def launch() -> None:
            address = await run.address
            if not local:
                click.echo(f"coordinator listens on {address}; start workers with --coordinator {address}")
                await asyncio.Event().wait()
            await Launcher(local_children(config, address, job), directory / "logs").run()

        from dart.commands.view import View

        try:
            async with View(run, live=not quiet and sys.stdout.isatty()):
                return await run.execute(launch())
        except Interrupted:
            click.echo(
                f"interrupted; everything that had finished is kept in {directory}; {go_on(job.kind, directory)}"
            )
            return None


def _recorded(config: Config, job: Job) -> dict[str, Any]:
    """The config as the database keeps it, with the vocabulary that tells what the run's tokens mean, if anything."""
    vocabulary = vocabulary_digest(config.model.folder) if job.model else None
    recorded: dict[str, Any] = json.loads(config.model_dump_json())
    return recorded | {"vocabulary": vocabulary}


def go_on(kind: RunKind, directory: Path) -> str:
    """What to do with a run that did not finish."""
    match kind:
        case RunKind.TRAINING:
            return f"go on with: dart train {directory / 'config.yaml'} --resume {directory}"
        case RunKind.COLLECTION:
            return f"what it collected can be used: curation.pool.sources=[{directory}]"
        case RunKind.EVALUATION:
            return "start it again for a result"


async def open_database(directory: Path, *, create: bool) -> Database:
    """A run directory's database. Raises UserError when there is none and none is to be made."""
    path = directory / "run.db"
    if not create and not path.exists():
        raise not_a_run(directory)
    return await Database.open(sqlite_url(path), directory / "blobs", create=create)


def not_a_run(directory: Path) -> UserError:
    return UserError(f"{directory} is not a run directory: it has no run.db; `dart runs` lists them")


def report(summary: dict[str, Any], directory: Path, picture: Path | None) -> None:
    """What a person wants to know at the end."""
    before, after = summary["success_before"], summary["success_after"]
    if after:
        click.echo("held-out success " + " -> ".join(percent(rate) for rate in (before, after) if rate))
        for task, rate in after["per_task"].items():
            then = f"{before['per_task'][task]['mean']:4.0%} -> " if before else ""
            click.echo(f"  {task:24s} {then}{rate['mean']:4.0%}")
    click.echo(
        f"{summary['updates']} updates, {summary['trajectories']} trajectories, {summary['env_steps']} steps in "
        f"{summary['train_seconds']:.0f} s; environments busy {summary['env_utilisation']:.0%}, "
        f"replicas {summary['rollout_utilisation']:.0%}"
    )
    click.echo(f"run directory {directory}" + (f", learning curve {picture}" if picture else ""))


def percent(rate: dict[str, Any]) -> str:
    return f"{rate['mean']:.1%} ({rate['low']:.1%} to {rate['high']:.1%}, {rate['episodes']} episodes)"
