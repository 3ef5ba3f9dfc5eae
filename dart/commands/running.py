"""What the commands that run a job share: the checks before it, the run in its directory, and what to do afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import click

from dart.agent.templates import digest_of
from dart.agent.vocabulary import vocabulary_digest
from dart.commands.changes import changes
from dart.config import Config, parse
from dart.config.tasks import MOST_SEEDS
from dart.coordinator.ending import Interrupted
from dart.coordinator.run import Run
from dart.coordinator.sampling.evaluation import settings_of
from dart.coordinator.start import MOST_UNWRITTEN_EVENTS, Start, starting_point
from dart.coordinator.summary import Summary, write_json
from dart.core.json_text import to_json
from dart.core.status import Stall, Status
from dart.core.watchdog import Kind
from dart.errors import INTERRUPTED, ProcessLost, UserError, first_of, ungrouped
from dart.inspection.condition import go_on
from dart.job import Job, Train
from dart.malloc import keep_memory
from dart.processes.beside import Beside, tracking_child
from dart.processes.fits import trainer_peak
from dart.processes.fits import warnings as memory_warnings
from dart.processes.launcher import Launcher, local_children
from dart.processes.settings import collect_seldom, interruptible, watch_parent
from dart.rundir import HERE, Guard, RunDirectory
from dart.shortage import ready_threads, shortage, spare
from dart.store.database import Database
from dart.store.lock import Hold
from dart.store.records import Event, RunKind, RunState

STARTS = 3.0
"""How many times `watchdog.start_seconds` this machine's workers may take until all that the run needs are ready."""
THREADS = 8
"""For file calls, copies and the like of the coordinator's process, beside those of its store."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """A job in its run directory. `local`: start its workers on this machine."""

    config: Config
    directory: RunDirectory
    job: Job
    quiet: bool = False
    resume: bool = False
    local: bool = True
    initial_weights: bool = False
    """With `resume`: start from the weights of model.path, whatever checkpoints there are."""
    either: bool = False
    """Continue the run in the directory, or begin one if there is none yet."""
    parent_watch: bool = False
    """Interrupt the run when standard input closes."""
    has_worked: bool = False
    """The workers have worked in an earlier attempt of this process: what one of them finds wrong now may pass."""
    beside: Callable[[], Beside | None] = lambda: None
    """The dashboard that is started with the run's processes: the same at every call."""
    again: tuple[str, ...] = ()
    """The words of the command that continues the run as this one was started; `HERE` means its directory."""

    @property
    def to_go_on(self) -> str:
        """What to do when it has ended early."""
        return go_on(self.job.kind, self.directory.path, self.again)


def check_before(config: Config, job: Job, path_of: str = "model.path") -> None:
    """Raises UserError, before anything starts, that lists everything this machine lacks for the job.

    `path_of`: what the user named the model with. What may not fit in memory, but is no reason to refuse, is printed.
    """
    from dart.commands.doctor import problems

    if config.server.tls_client_ca is not None:
        raise UserError(
            "server.tls_client_ca: workers on this machine are given no certificates: remove it; they prove themselves "
            "with their tokens"
        )
    if found := problems(config, job):
        raise UserError("\n".join(found).replace("model.path", path_of))
    for warning in memory_warnings(config, job) if job.model else ():
        click.echo(f"warning: {warning}", err=True)


def seed_range(written: str) -> tuple[int, int] | None:
    """The seeds of FIRST:LAST, [first, last); None if it is written otherwise, has none, or the database holds no such
    numbers."""
    first, _, last = written.partition(":")
    if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) <= len(str(MOST_SEEDS))):
        return None
    return (int(first), int(last)) if int(first) < int(last) <= MOST_SEEDS else None


def given_again(config: Path, overrides: Sequence[str], directory: RunDirectory) -> list[str]:
    """The words that give a continued run the same config again, from whatever folder."""
    same = config.resolve() == directory.config.resolve()
    shown = f"{HERE}/{directory.config.name}" if same else str(config.absolute())
    return [shown, *(word for override in overrides for word in ("--set", override))]


def run_in_loop(wanted: JobRun) -> Summary | None:
    """Run to the end: the summary, or None when the run was interrupted."""
    with wanted.directory.lock() as hold:
        return run_held(wanted, hold)


def run_held(wanted: JobRun, hold: Hold) -> Summary | None:
    """As `run_in_loop`, by whoever holds the run."""
    import uvloop

    collect_seldom()
    keep_memory()
    log = RotatingFileHandler(
        wanted.directory.coordinator_log, maxBytes=wanted.config.retention.log_bytes, backupCount=1
    )
    logging.basicConfig(
        handlers=[log],
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,  # a comparison has two runs, each with its own log
    )
    return uvloop.run(_run(wanted, hold))


async def _run(wanted: JobRun, hold: Hold) -> Summary | None:
    asyncio.get_running_loop().set_default_executor(ready_threads(THREADS, "work"))
    spare.hold()
    wanted.directory.settle(wanted.config)
    async with await wanted.directory.open_to_work(create=not wanted.resume) as database:
        database.wait_at_most(wanted.config.run.database_wait_seconds)
        guard = Guard(wanted.directory, hold)
        resumes = wanted.resume or (wanted.either and bool(await database.runs()))
        if resumes and (summary := await _finished(wanted, database)) is not None and not wanted.resume:
            return summary
        begin = (_resumed if isinstance(wanted.job, Train) else _continued) if resumes else _begun
        try:
            start = await begin(wanted, database)
        except asyncio.CancelledError:  # Ctrl-C, while a thread verifies a checkpoint, which Python would wait for
            click.echo(f"interrupted; {wanted.to_go_on}")
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        try:
            peak = trainer_peak(wanted.config, wanted.job) if wanted.local else None
            wanted.beside()
            run = Run(wanted.config, wanted.directory, database, wanted.job, start, guard, peak)
            if start.changed:
                run.journal.event("config_changed", changed=list(start.changed))
        except Exception as error:  # whatever it is, it ends the run, which would be "running" in the database for ever
            why = Event(start.first_event, time.time(), "failed", to_json({"why": str(error)}))
            await database.append_events([why])
            await database.set_run_state(RunState.FAILED, time.time())
            raise
        loop = asyncio.get_running_loop()
        if wanted.parent_watch:
            watch_parent(loop, run.interrupt)

        from dart.commands.look.view import View

        live, path = not wanted.quiet and sys.stdout.isatty(), wanted.directory.path
        try:
            with interruptible(loop, run.interrupt):
                async with View(path, run.status, live=live):
                    return await run.execute(_launch(wanted, run))
        except Interrupted:
            click.echo(f"interrupted; all finished work is kept in {path}; {wanted.to_go_on}")
            return None
        except ProcessLost as error:
            raise ProcessLost(error.why, wanted.to_go_on, exit_code=error.exit_code) from error
        except (OSError, MemoryError, RuntimeError, ExceptionGroup) as error:
            if not (short := shortage(first_of(error))):
                raise
            raise ProcessLost(short, wanted.to_go_on, exit_code=1) from error


async def _finished(wanted: JobRun, database: Database) -> Summary | None:
    """The summary of a training run that has finished. Its process may have been killed before it wrote the file."""
    record = await database.run()
    if record.kind is not RunKind.TRAINING or record.state != RunState.FINISHED or record.summary is None:
        return None
    if not wanted.directory.summary.is_file():
        write_json(wanted.directory.summary, record.summary)
    return dict(record.summary)


async def _resumed(wanted: JobRun, database: Database) -> Start:
    await _check_model(wanted, database)
    start = await starting_point(
        database,
        wanted.directory,
        initial_weights=wanted.initial_weights,
        copies=wanted.directory.uploads(wanted.config),
    )
    for broken in start.broken:
        click.echo(f"skipped checkpoint {broken}")
    if start.broken:
        click.echo(f"continuing from {start.checkpoint}; training done after it is repeated")
    return replace(start, changed=await _taken_up(wanted, database))


async def _continued(wanted: JobRun, database: Database) -> Start:
    """An evaluation goes on with what it was begun with. Raises UserError."""
    record, folder = await database.run(), wanted.directory.path
    if record.kind is not RunKind.EVALUATION or wanted.job.kind is not RunKind.EVALUATION:
        raise UserError(f"--resume {folder}: it is a run for {record.kind}, and cannot be continued by this command")
    if record.state == RunState.FINISHED:
        raise UserError(f"--resume {folder}: it is finished: its result is in {wanted.directory.evaluation}")
    before, now = _decisive(_with_defaults(record.config)), _decisive(_recorded(wanted))
    if unlike := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        name = unlike[0]
        raise UserError(
            f"--resume {folder}: it was begun with {name} {before.get(name)}, and this is {now.get(name)}: use "
            f"{wanted.directory.config}, with the same endpoint if it has one, or begin a new evaluation"
        )
    changed = await _taken_up(wanted, database)
    return Start(first_event=await database.last_sequence() + 1 + MOST_UNWRITTEN_EVENTS, changed=changed)


async def _taken_up(wanted: JobRun, database: Database) -> tuple[str, ...]:
    """The run is this process's from now on. What has changed since it began is printed, and returned."""
    begun = (await database.run()).config
    with suppress(UserError):  # of a release whose fields this one does not know
        begun = _with_defaults(begun)
    found = changes({name: begun.get(name) for name in Config.model_fields}, wanted.config.as_json())
    if found:
        click.echo("\n".join(("changed since the run began:", *(f"  {line}" for line in found))))
    await database.resume_run(_renewed(wanted))
    return tuple(found)


def _renewed(wanted: JobRun) -> dict[str, object]:
    """What others read from the record of a run while it goes on: how to reach it, where `dart track` sends it, and how
    it is continued."""
    sections = {name: section for name, section in wanted.config.as_json().items() if name in ("server", "tracking")}
    return sections | {"again": wanted.again}


def _with_defaults(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the defaults of fields that the release which recorded it did not have."""
    beside = ("vocabulary", "prompt", "endpoint", "again")
    fields = parse({name: value for name, value in recorded.items() if name not in beside}, "the run's config")
    return {**fields.as_json(), **{name: recorded.get(name) for name in beside}}


def _decisive(recorded: Mapping[str, Any]) -> dict[str, object]:
    """What an evaluation's result depends on, by name."""
    chosen = {
        "model.path": recorded["model"]["path"],
        "environment.tasks": recorded["environment"]["tasks"],
        "rollout.temperature": recorded["rollout"]["temperature"],
        "curation.step_limit": recorded["curation"]["step_limit"],
        "evaluation": recorded["evaluation"],
        "endpoint": recorded.get("endpoint"),
        "vocabulary": recorded.get("vocabulary"),
    }
    return settings_of(recorded) | chosen


async def _check_model(wanted: JobRun, database: Database) -> None:
    """Raises UserError if the run's tokens mean something else to the model of the config. Says so where another model
    becomes the reference policy."""
    before, path = (await database.run()).config, wanted.config.model.path
    if before.get("vocabulary") not in (None, vocabulary_digest(wanted.config.model.folder)):
        raise UserError(
            f"model.path is {path}, whose vocabulary is not that of the run in {wanted.directory.path}, which was "
            f"begun with {before['model']['path']}: continue it with that, or begin a new run"
        )
    if path != before["model"]["path"] and wanted.config.trainer.loss.kl_coefficient:
        click.echo(
            f"warning: the reference policy is now {path}, and the run was begun with {before['model']['path']}: if "
            "that is another model, and has not only moved, the KL term pulls the policy towards it from now on",
            err=True,
        )


async def _begun(wanted: JobRun, database: Database) -> Start:
    config, directory = wanted.config, wanted.directory
    directory.config.write_text(config.as_yaml(), encoding="utf-8")
    await database.start_run(
        directory.name, config.run.name, _recorded(wanted), started=time.time(), kind=wanted.job.kind
    )
    return Start()


async def _launch(wanted: JobRun, run: Run) -> None:
    """Start the local workers and the dashboard, and watch them until cancelled."""
    address = await run.address
    if not wanted.local:
        await asyncio.to_thread(wanted.directory.tell_address, address)
    children = [beside.child()] if (beside := wanted.beside()) else []
    if isinstance(wanted.job, Train) and wanted.config.tracking.to:
        children.append(tracking_child(wanted.directory.path))
    if wanted.local:
        children += local_children(wanted.config, address, wanted.job)
    else:
        click.echo(f"coordinator listens on {address}; start workers with --coordinator {address}")
    bound = wanted.config.retention.log_bytes
    say = partial(click.echo, err=True)
    launcher = Launcher(
        children, wanted.directory.logs, bound, run.hurry, say, run.launcher_failed, has_worked=wanted.has_worked
    )
    with ungrouped(UserError):
        async with asyncio.TaskGroup() as tasks:
            if wanted.local:
                tasks.create_task(workers_come(run.status, wanted.config.watchdog.start_seconds))
            await launcher.run()
            await asyncio.Event().wait()


async def workers_come(status: Callable[[], Status], bound: float) -> None:
    """Returns when the run has begun. Raises UserError when its workers, which are this machine's own, hang instead:
    one that ends is the launcher's matter."""
    stalls: tuple[Stall, ...] = ()
    while not stalls:
        await asyncio.sleep(STARTS * bound)
        if (now := status()).phase != "starting":
            return
        stalls = tuple(one for one in now.stalls if one.kind == Kind.START)
    raise UserError(
        f"the run has not begun for {stalls[0].seconds:.0f} s: it waits for {stalls[0].waits_for}: {stalls[0].advice}; "
        "then continue with --resume"
    )


def _recorded(wanted: JobRun) -> dict[str, Any]:
    """The config as the database keeps it, with the vocabulary that the run's tokens belong to, the digest of the texts
    around them, the endpoint that acted, if there is one, and the command that continues the run."""
    config, job = wanted.config, wanted.job
    vocabulary = vocabulary_digest(config.model.folder) if job.model else None
    recorded = config.as_json()
    if not isinstance(job, Train) and (address := job.endpoint) is not None:
        recorded["endpoint"] = {"url": address.url, "model": address.model, "system": address.system}
    return recorded | {"vocabulary": vocabulary, "prompt": digest_of(config.agent), "again": wanted.again}
