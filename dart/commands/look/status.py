"""`dart status` and `dart runs`: live state comes from the coordinator, the rest from the run's database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar, cast

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dart.commands.look.view import PLAIN_SECONDS, picture, plain_lines
from dart.core.evaluation.documents import ByDecoding, Success
from dart.core.json_text import JSON, to_json
from dart.core.status import Figures, Status
from dart.errors import UserError
from dart.inspection.condition import (
    ask,
    ask_run,
    check_one,
    clock,
    go_on,
    last_figures,
    no_answer,
)
from dart.inspection.opening import RunFiles, told
from dart.inspection.pace import Pace
from dart.inspection.records import RunRow
from dart.inspection.runs import rows_of, run_directories
from dart.inspection.wording import details, elapsed, headline, plain, quarantine_lines, stall_lines, worker_lines
from dart.rundir import RunDirectory
from dart.store.lock import is_held
from dart.store.records import RunRecord, RunState
from dart.v1 import control_pb2 as cpb
from dart.wire.channel import TOKEN_ENVIRONMENT, Dial
from dart.wire.status import status_from_proto

T = TypeVar("T")

WATCH_SECONDS = 1.0
SILENT = "its coordinator does not answer: the run may be about to resume by itself (Ctrl-C ends this view)"
WIDEST = 240
"""Characters of a line where there is no terminal."""


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """The command line of `dart status`. `run` None means the newest under runs/; `address`: ask that coordinator."""

    run: Path | None = None
    address: str | None = None
    tls_ca: Path | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """A run that answers, or what was read of one that does not."""

    live: cpb.GetStatusResponse | None
    past: T | None = None
    silent: str | None = None
    """The address of a running run's coordinator that does not answer."""


async def find(options: StatusOptions, read: Callable[[RunFiles], Awaitable[T]]) -> Found[T]:
    """The run that the command line means. `read` is called only if it does not answer; with --address one that does
    not is an error. Raises UserError when there is nothing to ask."""
    check_one(options.run, options.address)
    if options.address is not None:
        answer = await ask(Dial(options.address, os.environ.get(TOKEN_ENVIRONMENT), options.tls_ca))
        if answer is None:
            raise UserError(
                f"--address {options.address}: no coordinator answers there: check it, or name a run directory "
                "(`dart runs` lists them)"
            )
        return Found(answer)
    directory = RunDirectory.chosen(options.run)
    with told(f"run {directory.path}"):
        return await _found(directory, options, read)


async def _found(directory: RunDirectory, options: StatusOptions, read: Callable[[RunFiles], Awaitable[T]]) -> Found[T]:
    silent = None
    async with await RunFiles.open(directory) as files:
        record = await files.record()
        if directory.state(record) == RunState.RUNNING and (address := record.control_address):
            if (answer := await ask_run(directory, record, options.tls_ca)) is not None:
                return Found(answer)
            silent = address
        return Found(None, await read(files), silent)


def status(options: StatusOptions) -> None:
    """Print a run's state. Raises UserError when there is nothing to ask."""
    found = asyncio.run(find(options, _read))
    if found.live is not None:
        _print_live(status_from_proto(found.live), options.as_json)
        return
    assert found.past is not None, "it does not answer"
    _print_past(replace(found.past, silent=found.silent), options.as_json)


def watch(options: StatusOptions) -> None:
    """Show a live run until it ends or Ctrl-C, then how it ended. Raises UserError when there is nothing to ask."""
    if options.address is None:  # one that begins meanwhile is another run
        options = replace(options, run=RunDirectory.chosen(options.run).path)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(options))
        if options.address is None:
            status(options)
        else:
            click.echo(f"the coordinator at {options.address} no longer answers: `dart runs` lists how runs ended")


async def _watch(options: StatusOptions) -> None:
    pace = Pace()
    if (found := await find(options, _read)).live is None:
        return
    with Live(auto_refresh=False) if sys.stdout.isatty() else contextlib.nullcontext() as live:
        while found.live is not None or _goes_on(options, found.past):
            if found.live is None:  # it is resumed with new processes, or about to be
                pace = Pace()
                _show(live, Text(SILENT), SILENT)
            else:
                told = status_from_proto(found.live)
                left = pace.left(told, time.monotonic())
                _show(live, picture(told, "Ctrl-C ends this view", left), plain_lines(told, left))
            await asyncio.sleep(PLAIN_SECONDS if live is None else WATCH_SECONDS)
            try:
                found = await find(options, _read)
            except UserError:
                if options.address is None:
                    raise
                return  # it has ended


def _show(live: Live | None, drawn: RenderableType, lines: str) -> None:
    """In a terminal, or line by line."""
    if live is not None:
        live.update(drawn, refresh=True)
    else:
        click.echo(lines)


def _goes_on(options: StatusOptions, past: Past | None) -> bool:
    """Whether a process works on the run, although its coordinator does not answer. One that has ended as it should
    only waits for its workers to end."""
    resumes = past is not None and past.state in (RunState.RUNNING, RunState.FAILED)
    return resumes and options.run is not None and is_held(RunDirectory(options.run).lock_file)


async def _read(files: RunFiles) -> Past:
    record = await files.record()
    return Past(files.directory.path, record, files.directory.state(record), await last_figures(files))


def _document(status: Status) -> dict[str, JSON]:
    """What --json prints for every run, live or past; `state` is a live run's phase."""
    counts = status.figures.counts
    return {
        "run": status.run_id,
        "state": status.phase,
        "updates": counts.updates,
        "trajectories": counts.trajectories,
        "success_rate": status.figures.success_rate,
        **{name: told for name, told in asdict(status).items() if name not in ("run_id", "phase")},
    }


def _print_live(told: Status, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(_document(told)))
        return
    click.echo(f"{plain(told.run_id)}, {elapsed(told.elapsed_seconds)}: {headline(told)}")
    for stall in told.stalls:
        for line in stall_lines(stall):
            click.echo(line)
    for line in quarantine_lines(told.quarantined):
        click.echo(line)
    for line in details(told):
        click.echo(f"  {line}")
    for line in worker_lines(told):
        click.echo(f"  {line}")


@dataclass(frozen=True, slots=True)
class Past:
    """A run that no process works on, or whose coordinator does not answer at `silent`."""

    directory: Path
    record: RunRecord
    state: str
    figures: Figures | None
    silent: str | None = None

    @property
    def status(self) -> Status:
        return Status(self.record.id, str(self.state), self.figures or Figures())

    def to_json(self) -> dict[str, JSON]:
        record = self.record
        return {
            **_document(self.status),
            "started": record.started,
            "finished": record.finished,
            "summary": dict(record.summary) if record.summary else None,
            "silent_coordinator": self.silent,
        }


def _print_past(past: Past, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(past.to_json()))
        return
    record = past.record
    click.echo(f"{record.id}: {headline(past.status)}")
    if past.silent:
        click.echo(no_answer(past.silent))
    if record.finished:
        click.echo(f"ended {clock(record.finished)}")
    if past.state in (RunState.INTERRUPTED, RunState.FAILED):
        click.echo(go_on(record.kind, past.directory, record.config.get("again")))
    if record.summary and (collected := record.summary.get("collected")):
        kept = ", ".join(f"{name} {counts['kept']}" for name, counts in collected["per_task"].items())
        click.echo(f"collected from {collected['teacher']}: {kept}")
    if record.summary and (after := record.summary.get("success_after")):
        click.echo("held-out success: " + _rises(record.summary.get("success_before") or {}, after))


def _rises(before: ByDecoding, after: ByDecoding) -> str:
    """Held-out success before and after training with each decoding. Earlier versions of dart evaluated one alone,
    without its name."""
    if "mean" in after:
        before, after = {"sampled": cast("Success", before)} if before else {}, {"sampled": cast("Success", after)}
    then = {decoding: f"{result['mean']:.1%} -> " for decoding, result in before.items()}
    return ", ".join(f"{name} {then.get(name, '')}{result['mean']:.1%}" for name, result in after.items())


def _where(row: RunRow) -> str:
    """The address of a running run's coordinator, if it has left it in its directory."""
    if row.state != RunState.RUNNING:
        return ""
    with contextlib.suppress(OSError):
        return RunDirectory(Path(row.directory)).told_address()
    return ""


def list_runs(directory: Path, as_json: bool, *, below: bool = False) -> None:
    """One line for each run, newest first. Raises UserError when there is none.

    `below`: at any depth, and with the address of each coordinator that other machines may dial.
    """
    found = RunDirectory.all_below(directory) if below else run_directories([directory])
    rows = asyncio.run(rows_of(found))
    if as_json:
        click.echo(to_json([asdict(row) for row in rows]))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("started", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("run", overflow="fold")  # a name that is cut short could not be told from the next
    for name in ("updates", "trajectories", "success"):
        table.add_column(name, justify="right", no_wrap=True)
    if below:
        table.add_column("coordinator", no_wrap=True)
    for row in rows:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started)) if row.started else ""
        success = "" if row.success_rate is None else f"{row.success_rate:.1%}"
        cells = (
            started,
            row.state or "cannot be read",
            row.directory,
            f"{row.updates}",
            f"{row.trajectories}",
            success,
            *([_where(row)] if below else ()),
        )
        table.add_row(*map(Text, map(plain, cells)))
    Console(width=None if sys.stdout.isatty() else WIDEST).print(table)
    for row in rows:
        if row.problem:
            click.echo(f"{row.directory}: {plain(row.problem)}")
    click.echo("success: of the last training trajectories (stop.window), or of the episodes of an evaluation")
