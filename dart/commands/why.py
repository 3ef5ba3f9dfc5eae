"""`dart why`: what a live run waits for, or why a run ended, with the culprit's last failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from dart.commands.running import go_on
from dart.commands.status import StatusOptions, find
from dart.commands.status_text import elapsed, headline, plain, quarantine_lines, quiet_line, stall_lines
from dart.core.json_text import JSON, to_json
from dart.core.status import Stall, Status
from dart.rundir import RunDirectory
from dart.store.records import Event, RunRecord, RunState
from dart.wire.status import status_from_proto

MOST_FAILURES = 3
MOST_EVENTS = 1000
"""Stall events that are searched, newest first, for stalls that were not over."""


def why(options: StatusOptions) -> None:
    """Print the explanation. Raises UserError when there is nothing to ask."""
    found = asyncio.run(find(options))
    if found.live is not None:
        _print_live(status_from_proto(found.live), options.as_json)
        return
    assert found.directory is not None, "without --address there is a directory"
    told = asyncio.run(read_ended(found.directory))
    if options.as_json:
        click.echo(to_json(told.to_json()))
        return
    for line in told.lines():
        click.echo(line)


def _print_live(status: Status, as_json: bool) -> None:
    if as_json:
        stalls: list[JSON] = [asdict(stall) for stall in status.stalls]
        quarantined: list[JSON] = [asdict(one) for one in status.quarantined]
        told: dict[str, JSON] = {"run": status.run_id, "state": status.phase, "stalls": stalls,
                                 "quarantined": quarantined}  # fmt: skip
        click.echo(to_json(told | {"quiet": dict(status.quiet)}))
        return
    click.echo(f"{plain(status.run_id)}, {elapsed(status.elapsed_seconds)}: {headline(status)}")
    if not status.stalls:
        click.echo("nothing is stalled")
    for stall in status.stalls:
        for line in stall_lines(stall):
            click.echo(line)
    for line in quarantine_lines(status.quarantined):
        click.echo(line)
    if line := quiet_line(status.quiet):
        click.echo(line)


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that no process works on, and what its events say about its end."""

    directory: Path
    record: RunRecord
    state: str
    phase: str = ""
    """The last phase in which it worked."""
    why: str = ""
    """What ended it, if it could still record that."""
    stalls: tuple[Stall, ...] = ()
    """The stalls that were not over."""
    failures: tuple[tuple[float, str], ...] = ()
    """(Unix seconds, reason) of the last failed attempts, newest first."""
    last_event: Event | None = None
    last_update: Event | None = None

    def lines(self) -> Iterator[str]:
        yield f"{self.record.id}: {self.state}" + (f" while it was {self.phase}" if self.phase else "")
        if self.why:
            yield f"it ended because: {plain(self.why, 2000)}"
        elif self.state == RunState.INTERRUPTED and self.record.finished is None:
            yield (
                "its process ended without recording why: it was killed, the machine ran out of memory, or it was "
                "switched off; the system's log may say (dmesg, journalctl)"
            )
        elif self.state == RunState.INTERRUPTED:
            yield "it was stopped by Ctrl-C or a signal"
        for stall in self.stalls:
            yield from stall_lines(stall)
        for when, words in self.failures:
            yield f"an attempt failed at {_clock(when)}: {plain(words)}"
        if self.last_update is not None:
            yield f"the last update was at {_clock(self.last_update.unix_seconds)}"
        if self.last_event is not None:
            yield f"the last event, {plain(self.last_event.kind)}, was at {_clock(self.last_event.unix_seconds)}"
        if self.state in (RunState.INTERRUPTED, RunState.FAILED):
            yield go_on(self.record.kind, self.directory)

    def to_json(self) -> dict[str, JSON]:
        return {
            "run": self.record.id,
            "state": str(self.state),
            "phase": self.phase,
            "why": self.why,
            "stalls": [asdict(stall) for stall in self.stalls],
            "failures": [{"unix_seconds": when, "why": words} for when, words in self.failures],
            "last_event_unix_seconds": self.last_event.unix_seconds if self.last_event else None,
            "last_update_unix_seconds": self.last_update.unix_seconds if self.last_update else None,
        }


async def read_ended(directory: RunDirectory) -> Ended:
    """Read how the run ended from its database."""
    async with await directory.open() as database:
        record = await database.run()
        phases = [str(json.loads(event.json)["phase"]) for event in await database.newest_events("phase", 2)]
        state = directory.state(record)
        ended = await database.newest_events("failed") if state == RunState.FAILED else []
        stalled = await database.newest_events("stalled", MOST_EVENTS)
        moving = await database.newest_events("moving", MOST_EVENTS)
        failed = [] if state == RunState.FINISHED else await database.newest_events("attempt_failed", MOST_FAILURES)
        updates, last = await database.newest_events("update"), await database.last_sequence()
        final = await database.events_since(last) if last else []
    worked = [phase for phase in phases if phase not in set(RunState)]
    return Ended(
        directory.path,
        record,
        state,
        worked[0] if worked and state != RunState.FINISHED else "",
        str(json.loads(ended[0].json)["why"]) if ended else "",
        () if state == RunState.FINISHED else _still(stalled, moving),
        tuple((event.unix_seconds, str(json.loads(event.json).get("why", ""))) for event in failed),
        final[-1] if final else None,
        updates[0] if updates else None,
    )


def _still(stalled: Sequence[Event], moving: Sequence[Event]) -> tuple[Stall, ...]:
    """The stalls that have not ended, newest first; both lists are newest first."""
    over: dict[tuple[str, str], int] = {}
    for event in moving:
        over.setdefault(Stall.from_json(json.loads(event.json)).name, event.sequence)
    found: dict[tuple[str, str], Stall] = {}
    for event in stalled:
        stall = Stall.from_json(json.loads(event.json))
        if over.get(stall.name, 0) < event.sequence:
            found.setdefault(stall.name, stall)
    return tuple(found.values())


def _clock(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))
