"""The live view of a run in the terminal: phase, curves in numbers, workers. Plain lines where there is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Self

import click
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from dart.coordinator.fleet.server import ROLE_NAMES
from dart.coordinator.run import Run
from dart.store.records import RunState

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0
MOST_OF_THE_TIME = 0.02
"""Drawing is the event loop's time too: thousands of workers are looked at less often."""
MOST_ROWS = 12
"""Of tasks, and of the workers of a role."""
BANDS = (("0%", 0.0, 1e-9), ("up to 25%", 1e-9, 0.25), ("25% to 50%", 0.25, 0.5), ("50% to 75%", 0.5, 0.75),
         ("75% and more", 0.75, 1.0), ("100%", 1.0, 1.1))  # fmt: skip


class View:
    """Shows the run while the context lasts."""

    def __init__(self, run: Run, *, live: bool) -> None:
        self._run, self._live = run, live
        self._task: asyncio.Task[None] | None = None
        self._began = time.monotonic()

    async def __aenter__(self) -> Self:
        click.echo(f"run directory {self._run.directory.path}")
        self._task = asyncio.get_running_loop().create_task(self._show())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _show(self) -> None:
        if not self._live:
            last = ""
            while True:
                if (line := self._line()) != last:
                    click.echo(line)
                    last = line
                await asyncio.sleep(PLAIN_SECONDS)
        with Live(self._picture(), refresh_per_second=4, transient=False) as live:
            try:
                while True:
                    began = time.perf_counter()
                    live.update(self._picture())
                    took = time.perf_counter() - began
                    await asyncio.sleep(max(REFRESH_SECONDS, took / MOST_OF_THE_TIME))
            finally:
                live.update(self._picture())

    def _line(self) -> str:
        status, progress = self._run.status(), self._run.progress
        if status.phase == "starting":
            return f"{self._elapsed()} starting: {self._starting()}"
        if (evaluation := self._run.evaluation) is not None:
            return f"{self._elapsed()} evaluating: {len(evaluation.outcomes)}/{evaluation.total} episodes"
        if (collection := self._run.collection) is not None:
            return f"{self._elapsed()} collecting: {collection}"
        versions = list(self._run.sync.versions.values())
        return (
            f"{self._elapsed()} {status.phase}: update {status.update}, success {progress.success_rate:.0%}, "
            f"{progress.counts.trajectories} trajectories ({self._per_minute():.0f}/min), "
            f"environments {status.env_utilisation:.0%}, replicas {status.rollout_utilisation:.0%}, "
            f"staleness {progress.counts.staleness.mean:.1f}" + (f", version {_range(versions)}" if versions else "")
        )

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"[{minutes:02d}:{seconds:02d}]"

    def _starting(self) -> str:
        run = self._run
        replicas = len(run.policy.router.replicas)
        return f"{run.envs.slots} environments, {replicas} of {run.replicas_wanted} replicas ready"

    def _per_minute(self) -> float:
        seconds = self._run.train_seconds
        return 60 * self._run.progress.counts.trajectories / seconds if seconds > 0 else 0.0

    def _picture(self) -> Panel:
        run = self._run
        status = run.status()
        body: list[Any] = [self._line()]
        evaluation = run.evaluation
        if evaluation is not None:
            body.append(_bar(len(evaluation.outcomes) / max(evaluation.total, 1)))
        elif run.progress.success_by_task:
            body.append(_bar(self._progress()))
            body.append(self._tasks())
        if status.phase in set(RunState) and not status.workers:  # it has ended, and this is what stays on the screen
            return Panel(Group(*body), title=f"dart {run.directory.name}")
        body.append(self._workers(status))
        subtitle = f"dart status --address {run.server.address}  Ctrl-C ends in order"
        return Panel(Group(*body), title=f"dart {run.directory.name}", subtitle=subtitle)

    def _progress(self) -> float:
        stop = self._run.config.stop
        shares = [
            self._run.progress.counts.updates / stop.updates if stop.updates else 0.0,
            self._run.train_seconds / stop.train_seconds if stop.train_seconds else 0.0,
            self._run.progress.counts.env_steps / stop.env_steps if stop.env_steps else 0.0,
        ]
        return min(1.0, max(shares))

    def _tasks(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("task")
        table.add_column("recent success", justify="right")
        table.add_column("")
        for name, rate in self._run.progress.success_by_task.items():
            table.add_row(name, f"{rate:.0%}", ProgressBar(total=1.0, completed=rate, width=30))
        return table if table.row_count <= MOST_ROWS else _bands(self._run.progress.success_by_task.values())

    def _workers(self, status: Any) -> Table:
        """A row for each; where a role has too many for a screen, one for all of them."""
        table = Table(box=None, pad_edge=False)
        for column in ("worker", "role", "state", "busy", "version", "does"):
            table.add_column(column)
        for number, workers in itertools.groupby(status.workers, key=lambda worker: worker.role):
            role, members = ROLE_NAMES[number], list(workers)
            if len(members) > MOST_ROWS:
                rows = [(f"{len(members)} workers", members, self._run.accounting.all_doing(number))]
            else:
                rows = [(worker.worker_id, [worker], worker.doing) for worker in members]
            for name, some, does in rows:
                version = "" if role == "env" else _range([worker.weight_version for worker in some])
                busy = "" if role == "train" else f"{sum(w.busy for w in some)}/{sum(w.slots for w in some)}"
                table.add_row(name, role, worker_states(some), busy, version, does)
        return table


def worker_states(workers: Sequence[Any]) -> str:
    """How many are in which state; of one alone, its state."""
    counts = Counter(worker.state for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) if len(workers) > 1 else workers[0].state


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _bands(rates: Collection[float]) -> Table:
    """How many tasks succeed how often: hundreds of rows would fit no screen."""
    table = Table(box=None, pad_edge=False)
    table.add_column("recent success")
    table.add_column("tasks", justify="right")
    table.add_column("")
    for name, low, high in BANDS:
        count = sum(low <= rate < high for rate in rates)
        table.add_row(name, str(count), ProgressBar(total=len(rates), completed=count, width=30))
    return table


def _bar(share: float) -> Table:
    """On a line of its own, which a bar alone does not end."""
    line = Table.grid()
    line.add_row(ProgressBar(total=1.0, completed=share, width=60))
    return line
