"""The processes of a run, each restarted when it ends, as a cluster's supervisor does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dart.failpoints import VARIABLE

RESTART_SECONDS = 1.0


@dataclass
class Kept:
    """One process that is kept alive. `command` is called for every start."""

    name: str
    logs: Path
    finishes: bool = False
    """Whether code 0 means that its work is over. A worker also ends with 0 when its coordinator says goodbye."""
    failpoints: str = ""
    """What its next start has as DART_FAILPOINT; the start after that has none."""
    starts: int = 0
    exits: list[int] = field(default_factory=list)
    process: asyncio.subprocess.Process | None = None

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    async def keep(self) -> None:
        """Run it again and again until cancelled, or, if it `finishes`, until it ends with code 0."""
        while True:
            environment, self.failpoints = {**os.environ, VARIABLE: self.failpoints}, ""
            with (self.logs / f"{self.name}.log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "dart", *self.command(),
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=environment,
                )  # fmt: skip
            self.starts += 1
            code = await self.process.wait()
            self.exits.append(code)
            self._kill_group(self.process.pid)  # An engine or a browser may have outlived it.
            if code == 0 and self.finishes:
                return
            await asyncio.sleep(RESTART_SECONDS)

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the process and its children. False if it is not running."""
        if self.process is None or self.process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        return True

    def kill_alone(self) -> bool:
        """SIGKILL only the process itself; its children have to notice."""
        if self.process is None or self.process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return True

    def children(self) -> list[psutil.Process]:
        if self.process is None or self.process.returncode is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def end(self) -> None:
        if self.process is not None:
            self._kill_group(self.process.pid)

    @staticmethod
    def _kill_group(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


@dataclass
class WorkerProcess(Kept):
    role: str = "env"
    port: int = 0

    def command(self) -> Sequence[str]:
        return ["worker", "--role", self.role, "--coordinator", f"127.0.0.1:{self.port}", "--id", self.name]


@dataclass
class CoordinatorProcess(Kept):
    """The first start makes the run directory; every later start resumes it."""

    config: Path = Path()
    runs: Path = Path()
    overrides: Sequence[str] = ()
    on_resume: Callable[[], None] = lambda: None

    async def made(self) -> Path:
        """The run directory, once it is there."""
        while (directory := self.directory) is None:  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.2)
        return directory

    @property
    def directory(self) -> Path | None:
        found = sorted(self.runs.glob("*/run.db"))
        return found[0].parent if found else None

    def command(self) -> Sequence[str]:
        choices = [part for override in self.overrides for part in ("--set", override)]
        if self.directory:
            self.on_resume()
        resumed = ["--resume", str(self.directory)] if self.directory else []
        return ["coordinator", str(self.config), "--quiet", *choices, *resumed]
