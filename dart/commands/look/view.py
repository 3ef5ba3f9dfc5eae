"""The live view of a run in the terminal: phase, curves in numbers, workers. Plain lines where there is no terminal.

It asks for a `Status` and draws it, worded as in `dart.inspection.wording`; it knows nothing else of the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Self

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dart.core.status import Stall, Status
from dart.inspection.pace import Pace
from dart.inspection.wording import (
    COLUMNS,
    MOST_ROWS,
    counters,
    elapsed,
    headline,
    plain,
    quarantine_lines,
    stall_lines,
    worker_rows,
)
from dart.store.records import RunState

log = logging.getLogger(__name__)
STOPS = "Ctrl-C stops the run cleanly"
STOPS_NOW = "Ctrl-C again gives up the last checkpoint"
REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0
MOST_OF_THE_TIME = 0.02
"""Share of the event loop's time that drawing may take: with thousands of workers it redraws less often."""
BANDS = (("0%", 0.0, 1e-9), ("up to 25%", 1e-9, 0.25), ("25% to 50%", 0.25, 0.5), ("50% to 75%", 0.5, 0.75),
         ("75% and more", 0.75, 1.0), ("100%", 1.0, 1.1))  # fmt: skip


class View:
    """Shows what `status` returns while the context is open. `directory`: the run's."""

    def __init__(self, directory: Path, status: Callable[[], Status], *, live: bool) -> None:
        self._directory, self._status, self._live = directory, status, live
        self._pace = Pace()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        click.echo(f"run directory {self._directory}")
        self._task = asyncio.get_running_loop().create_task(self._show())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        (end,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(end, Exception):  # its terminal may be gone: the run does not depend on it
            log.warning("the view of the run ended: %s", end)

    async def _show(self) -> None:
        if not self._live:
            last = ""
            while True:
                status = self._status()
                if (now := plain_lines(status, self._pace.left(status, time.monotonic()))) != last:
                    click.echo(now)
                    last = now
                await asyncio.sleep(PLAIN_SECONDS)
        with Live(picture(self._status()), refresh_per_second=4, transient=False) as live:
            try:
                while True:
                    began = time.perf_counter()
                    status = self._status()
                    live.update(picture(status, left=self._pace.left(status, time.monotonic())))
                    took = time.perf_counter() - began
                    await asyncio.sleep(max(REFRESH_SECONDS, took / MOST_OF_THE_TIME))
            finally:
                live.update(picture(self._status()))


def picture(status: Status, hint: str = "", left: float | None = None) -> Panel:
    """The whole view. Names are `Text`, because a str would be parsed as rich markup.

    `hint`: what keys do, if not what they do in the run's own terminal. `left`: seconds until the phase ends; None if
    that is not known.
    """
    body: list[RenderableType] = [Text(_line(status, left))]
    body += [Text(line, style=_style(stall)) for stall in status.stalls for line in stall_lines(stall)]
    body += [Text(line, style="yellow") for line in quarantine_lines(status.quarantined)]
    by_task = status.figures.success_by_task
    if status.phase == "evaluating":
        body.append(_bar(status.share_done))
    elif by_task:
        body += [_bar(status.share_done), _tasks(by_task)]
    if line := counters(status):
        body.append(Text(line))
    title = Text(plain(f"dart {status.run_id}"))
    if status.phase in set(RunState) and not status.workers:  # the run has ended, and this stays on the screen
        return Panel(Group(*body), title=title)
    body.append(_workers(status))
    saves = status.phase == RunState.INTERRUPTED and status.figures.counts.updates
    hint = hint or (STOPS_NOW if saves else STOPS)
    subtitle = Text(f"dart status --address {status.control_address}  {hint}")
    return Panel(Group(*body), title=title, subtitle=subtitle)


def _style(stall: Stall) -> str:
    return "cyan" if stall.deliberate else "bold red"


def plain_lines(status: Status, left: float | None) -> str:
    """The view where there is no terminal: the run's state, and what is stalled."""
    return "\n".join([_line(status, left), *(line for stall in status.stalls for line in stall_lines(stall))])


def _line(status: Status, left: float | None) -> str:
    rest = "" if left is None else f", about {elapsed(left)} left"
    return f"[{elapsed(status.elapsed_seconds)}] {headline(status)}{rest}"


def _tasks(success_by_task: Mapping[str, float]) -> Table:
    if len(success_by_task) > MOST_ROWS:
        return _bands(success_by_task.values())
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("recent success", justify="right")
    table.add_column("")
    for name, rate in success_by_task.items():
        table.add_row(Text(plain(name)), f"{rate:.0%}", ProgressBar(total=1.0, completed=rate, width=30))
    return table


def _workers(status: Status) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column)
    for row in worker_rows(status):
        cells = (row.name, row.role, row.state, row.busy, row.version, row.heard, row.doing)
        table.add_row(*map(Text, cells))
    return table


def _bands(rates: Collection[float]) -> Table:
    """How many tasks fall in each band of success: one row per task would not fit on a screen."""
    table = Table(box=None, pad_edge=False)
    table.add_column("recent success")
    table.add_column("tasks", justify="right")
    table.add_column("")
    for name, low, high in BANDS:
        count = sum(low <= rate < high for rate in rates)
        table.add_row(name, str(count), ProgressBar(total=len(rates), completed=count, width=30))
    return table


def _bar(share: float) -> Table:
    """A bar on a line of its own; a bare ProgressBar does not end its line."""
    line = Table.grid()
    line.add_row(ProgressBar(total=1.0, completed=share, width=60))
    return line
