"""The live view of a run in the terminal: phase, curves in numbers, workers. Plain lines where there is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Self

import click
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from dart.coordinator.run import Run
from dart.coordinator.server import ROLE_NAMES

REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 10.0


class View:
    """Shows the run while the context lasts."""

    def __init__(self, run: Run, *, live: bool) -> None:
        self._run, self._live = run, live
        self._task: asyncio.Task[None] | None = None
        self._began = time.monotonic()

    async def __aenter__(self) -> Self:
        click.echo(f"run directory {self._run.directory}")
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
                    await asyncio.sleep(REFRESH_SECONDS)
                    live.update(self._picture())
            finally:
                live.update(self._picture())

    def _line(self) -> str:
        status, metrics = self._run.status(), self._run.metrics
        if status.phase == "starting":
            return f"{self._elapsed()} starting: {self._starting()}"
        if (evaluation := self._run.evaluation) is not None:
            return f"{self._elapsed()} evaluating: {len(evaluation.outcomes)}/{evaluation.total} episodes"
        if (collection := self._run.collection) is not None:
            return f"{self._elapsed()} collecting: {collection}"
        return (
            f"{self._elapsed()} {status.phase}: update {status.update}, success {metrics.success_rate:.0%}, "
            f"{metrics.trajectories} trajectories ({self._per_minute():.0f}/min), "
            f"environments {status.env_utilisation:.0%}, replicas {status.rollout_utilisation:.0%}, "
            f"staleness {metrics.staleness_mean:.1f}, versions {sorted(self._run.sync.versions.values())}"
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
        return 60 * self._run.metrics.trajectories / seconds if seconds > 0 else 0.0

    def _picture(self) -> Panel:
        run = self._run
        status = run.status()
        body: list[Any] = [self._line()]
        evaluation = run.evaluation
        if evaluation is not None:
            body.append(_bar(len(evaluation.outcomes) / max(evaluation.total, 1)))
        elif status.phase == "training":
            body.append(_bar(self._progress()))
            body.append(self._tasks())
        body.append(self._workers(status))
        return Panel(
            Group(*body), title=f"dart {run.directory.name}", subtitle=f"{self._address()}  Ctrl-C ends in order"
        )

    def _address(self) -> str:
        return f"dart status --address {self._run.server.address}"

    def _progress(self) -> float:
        stop = self._run.config.stop
        shares = [
            self._run.metrics.updates / stop.updates if stop.updates else 0.0,
            self._run.train_seconds / stop.train_seconds if stop.train_seconds else 0.0,
            self._run.metrics.env_steps / stop.env_steps if stop.env_steps else 0.0,
        ]
        return min(1.0, max(shares))

    def _tasks(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("task")
        table.add_column("recent success", justify="right")
        table.add_column("")
        for name, rate in self._run.metrics.success_by_task.items():
            table.add_row(name, f"{rate:.0%}", ProgressBar(total=1.0, completed=rate, width=30))
        return table

    @staticmethod
    def _workers(status: Any) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("worker", "role", "state", "busy", "version", "does"):
            table.add_column(column)
        for worker in status.workers:
            role = ROLE_NAMES[worker.role]
            version = "" if role == "env" else str(worker.weight_version)
            busy = "" if role == "train" else f"{worker.busy}/{worker.slots}"
            table.add_row(worker.worker_id, role, worker.state, busy, version, worker.doing)
        return table


def _bar(share: float) -> Table:
    """On a line of its own, which a bar alone does not end."""
    line = Table.grid()
    line.add_row(ProgressBar(total=1.0, completed=share, width=60))
    return line
