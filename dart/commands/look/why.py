"""`dart why`: what a live run waits for, or why a run ended, with the culprit's last failure."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import click

from dart.commands.look.status import StatusOptions, find
from dart.core.json_text import JSON, to_json
from dart.core.status import Status
from dart.inspection.condition import how_it_ended, no_answer
from dart.inspection.wording import elapsed, headline, plain, quarantine_lines, quiet_line, stall_lines
from dart.wire.status import status_from_proto


def why(options: StatusOptions) -> None:
    """Print the explanation. Raises UserError when there is nothing to ask."""
    found = asyncio.run(find(options, how_it_ended))
    if found.live is not None:
        _print_live(status_from_proto(found.live), options.as_json)
        return
    told = found.past
    assert told is not None, "it does not answer"
    if options.as_json:
        click.echo(to_json(told.to_json() | {"silent_coordinator": found.silent}))
        return
    state, *more = told.lines()
    silence = [no_answer(found.silent)] if found.silent else []
    for line in (state, *silence, *more):
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
