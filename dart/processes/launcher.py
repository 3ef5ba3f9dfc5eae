"""Local workers, and what runs beside them, as child processes of `dart train`: started, watched, restarted, and never
left behind.

Each child is a process group of its own, so that Ctrl-C in the terminal reaches only `dart train`, which ends the
children in order: goodbye over the session, then SIGTERM to what is left of the group, then SIGKILL. Each child's
standard input is a pipe from here: when this process dies, however it dies, the pipe closes and the child ends.

A child that ends by itself during the run is restarted after a pause, at most `MOST_RESTARTS` times in a row if it
keeps failing soon after its start. A child that exits with code 2 got invalid input, and ends the run with its message.
The run goes on without a child that it does not need (`beside`), however that one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dart.config import Config
from dart.core.fleet.restarts import LASTING_SECONDS, MOST_RESTARTS, pause_seconds
from dart.errors import NOT_READY, USER_ERROR, ProcessLost, UserError, ungrouped
from dart.job import Job, Train
from dart.processes.gpus import gpus_here, place
from dart.processes.logs import bound, last_line
from dart.processes.settings import own_environment
from dart.shortage import shortage
from dart.wire.channel import TOKEN_ENVIRONMENT, read_token

T = TypeVar("T")

GOODBYE_SECONDS = 5.0
MORE_SECONDS = 5.0
"""How much later an env worker ends itself if its parent's pipe has closed and nobody ends it."""
TOLD_SECONDS = 6.0
"""After this much waiting for a process that ends, the user is told of it."""
TERMINATE_SECONDS = 2.0
KILLED_SECONDS = 5.0
"""Then only the kernel is waited for, which takes a moment to free the memory of a large process."""
LOOK_AT_GROUPS_SECONDS = 0.05
SUMMARY = re.compile("={20,}")
"""The last line of what torchrun says of ranks that failed."""
RANKS_CODE = r"^exitcode\s*: (-?\d+)"
_HINTS = {"SIGKILL": " (too little memory?)", "SIGBUS": " (no room in /dev/shm? `docker run --shm-size=8g`)"}
LOG = logging.getLogger(__name__)
LOOK_AT_LOGS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Child:
    """One worker to start, or another process beside the run."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    restart: bool = True
    """False: its end ends all the others (the trainer's state is lost with it)."""
    needed: bool = True
    """False: the run goes on without it, however it ends."""
    descriptors: tuple[int, ...] = ()
    """File descriptors that it inherits."""
    goodbye_seconds: float = GOODBYE_SECONDS
    """How long it may take to end by itself when the run ends."""


def local_children(config: Config, address: str, job: Job) -> list[Child]:
    """Every worker that the job needs, on this machine."""

    def child(role: str, name: str, extra: Mapping[str, str], prefix: Sequence[str] = ()) -> Child:
        source = config.server.tokens.get(role)  # type: ignore[call-overload]
        token = {TOKEN_ENVIRONMENT: read_token(source, f"server.tokens.{role}")} if source else {}
        tls = ["--tls-ca", str(config.server.tls_certificate)] if config.server.tls_certificate else []
        command = [
            *(prefix or [sys.executable]), "-m", "dart", "worker",
            "--role", role, "--coordinator", address, "--id", name, "--parent-watch", *tls,
        ]  # fmt: skip
        goodbye = config.environment.timeouts.ending if role == "env" else GOODBYE_SECONDS
        # torchrun puts each rank into a process group of its own, which the signals to torchrun's group do not reach:
        # ranks end themselves before it is killed.
        ending = {"env": goodbye + MORE_SECONDS, "train": goodbye}.get(role)
        command += ["--ending-seconds", f"{ending:g}"] if ending else []
        return Child(name, command, {**extra, **token}, restart=role != "train", goodbye_seconds=goodbye)

    children = [child("env", f"env-{n}", {}) for n in range(job.environments(config))]
    gpus = place(config, job, gpus_here())
    children += [
        child("rollout", f"rollout-{n}", gpus.of_replica(n) | config.rollout.environment)
        for n in range(job.replicas(config))
    ]
    if isinstance(job, Train):
        ranks = config.trainer.ranks
        launch = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--num_processes",
            str(ranks),
            "--num_machines",
            "1",
        ]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
        launch += ["--gpu_ids", "all"]  # of those that are visible, whatever accelerate's own config file says
        launch += ["--multi_gpu"]  # also without a GPU: the ranks then talk over gloo, where --cpu would want MPI
        children.append(child("train", "train", gpus.of_trainer(), launch if ranks > 1 else ()))
    return children


class Launcher:
    def __init__(
        self,
        children: Sequence[Child],
        logs: Path,
        most_log_bytes: int | None = None,
        hurry: asyncio.Event | None = None,
        say: Callable[[str], None] = LOG.info,
        failed: Callable[[UserError], None] = lambda _: None,
        *,
        has_worked: bool = False,
    ) -> None:
        """`most_log_bytes`: the bound of each child's log, and of the older part kept beside it; None for no bound.

        `hurry`: once it is set, no child is waited for at the end. `say`: tells the user what is waited for then.
        `failed`: is told why `run` raises before it ends the others, which then leave the run. `has_worked`: the same
        children have worked before, so that exit code 2 alone does not end the run.
        """
        self._failed, self._has_worked = failed, has_worked
        self._children, self._logs, self._most_log_bytes = children, logs, most_log_bytes
        self._hurry, self._say = hurry or asyncio.Event(), say
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Start all and watch them until cancelled; then end every process that is left.

        Raises UserError when a child cannot go on; ProcessLost if new ones of all can.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            with ungrouped(UserError):
                async with asyncio.TaskGroup() as watches:
                    bounding = watches.create_task(self._bound_logs())
                    await asyncio.gather(*[watches.create_task(self._keep(child)) for child in self._children])
                    bounding.cancel()
        except UserError as error:
            self._failed(error)
            raise
        finally:
            await _whole(self._end_all())  # although the work may fail meanwhile: new processes must not meet these

    async def _bound_logs(self) -> None:
        while self._most_log_bytes is not None:
            for child in self._children:
                try:
                    await asyncio.to_thread(bound, self._log(child), self._most_log_bytes)
                except OSError as error:  # a full disk, say: the run does not depend on it
                    LOG.warning("the log of %s cannot be kept within its bound: %s", child.name, error)
            await asyncio.sleep(LOOK_AT_LOGS_SECONDS)

    async def _keep(self, child: Child) -> None:
        """Returns when it has ended for good. Raises UserError if the run cannot go on without it."""
        try:
            await self._restarted(child)
        except UserError as error:
            if child.needed:
                raise
            self._note(child, f"is not started again: {error}")
            LOG.warning("the run goes on without the %s: %s", child.name, error)

    async def _restarted(self, child: Child) -> None:
        restarts, has_worked = 0, self._has_worked
        while True:
            began = time.monotonic()
            try:
                code = _own_code(self._log(child), await self._run_once(child))
            except (OSError, RuntimeError) as error:
                if not (short := shortage(error)) or restarts == MOST_RESTARTS:
                    raise UserError(f"{child.name} cannot be started: {short or error}") from error
                LOG.warning("%s cannot be started now: %s", child.name, short)
                restarts += 1
                await asyncio.sleep(pause_seconds(restarts))
                continue
            if code == 0:
                return
            if time.monotonic() - began > LASTING_SECONDS and code not in (USER_ERROR, NOT_READY):
                restarts, has_worked = 0, True
            if code == USER_ERROR and not has_worked:  # afterwards it is the world that has changed, for a while
                raise UserError(_last_words(self._log(child)) or f"{child.name} ended with code {code}")
            if not child.restart:
                raise ProcessLost(f"{child.name} {self._end(child, code)}")
            if restarts == MOST_RESTARTS:
                raise UserError(
                    f"{child.name} ended {MOST_RESTARTS + 1} times in a row; the last time it {self._end(child, code)}"
                )
            restarts += 1
            pause = pause_seconds(restarts)
            self._note(child, f"{self._end(child, code)}; restarted after {pause:g} s")
            await asyncio.sleep(pause)

    def _end(self, child: Child, code: int) -> str:
        log = self._log(child)
        if code < 0:
            name = signal.Signals(-code).name
            hint = _HINTS.get(name, "")
            return f"was killed by {name}{hint}: see {log}"
        return f"ended with code {code}: {_last_words(log)}: see {log}"

    async def _run_once(self, child: Child) -> int:
        # Cancelled in the middle, asyncio would kill the child and leave what the child has started.
        process = await _whole(self._started(child))
        code = await process.wait()
        await _end_groups({process.pid})  # an engine that is left would keep the memory that the next one needs
        del self._processes[child.name]  # its number may soon be another process's
        return code

    async def _started(self, child: Child) -> asyncio.subprocess.Process:
        with self._log(child).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *child.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=child.descriptors,
                env=own_environment(child.environment),
            )
        self._processes[child.name] = process
        return process

    async def _end_all(self) -> None:
        """The workers have been sent Bye: wait, then end what is left of each process group."""
        for process in self._processes.values():
            if process.stdin:
                process.stdin.close()
        async with asyncio.TaskGroup() as tasks:
            goodbyes = [tasks.create_task(self._goodbye(child)) for child in self._children]
            hurry = tasks.create_task(self._cut_short(goodbyes))
            await asyncio.gather(*goodbyes, return_exceptions=True)
            hurry.cancel()
        await _end_groups({process.pid for process in self._processes.values()})

    async def _goodbye(self, child: Child) -> None:
        """Wait until it has ended by itself, as long as it may take."""
        process, in_all = self._processes.get(child.name), child.goodbye_seconds
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(TOLD_SECONDS, in_all)):
                await process.wait()
        if process.returncode is None and in_all > TOLD_SECONDS:
            self._say(
                f"{child.name} is still ending: it is given {in_all:g} s in all, and is killed then (Ctrl-C twice: at "
                "once)"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(in_all - TOLD_SECONDS):
                    await process.wait()

    async def _cut_short(self, goodbyes: Sequence[asyncio.Task[None]]) -> None:
        """No longer wait for anybody once the user is in a hurry."""
        await self._hurry.wait()
        for goodbye in goodbyes:
            goodbye.cancel()

    def _log(self, child: Child) -> Path:
        return self._logs / f"{child.name}.log"

    def _note(self, child: Child, text: str) -> None:
        try:
            with self._log(child).open("a", encoding="utf-8") as log:
                log.write(f"-- {child.name} {text}\n")
        except OSError as error:
            LOG.warning("%s %s, which its log does not say: %s", child.name, text, error)


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Await it to its end, also if this is cancelled meanwhile; that is raised afterwards."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _end_groups(groups: set[int]) -> None:
    """Send SIGTERM and then SIGKILL to every process of these groups.

    Returns when no process of any group is left, or KILLED_SECONDS after the last signal. A child's engine or browser
    may outlive the child, and the kernel tells nobody when a group is gone, so it is asked repeatedly.
    """
    for number, seconds in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, KILLED_SECONDS)):
        groups = {group for group in groups if _signal(group, number)}
        until = time.monotonic() + seconds
        while groups and time.monotonic() < until:
            await asyncio.sleep(LOOK_AT_GROUPS_SECONDS)
            groups = {group for group in groups if _signal(group, 0)}


def _signal(group: int, number: int) -> bool:
    """Send a signal to every process of the group. Returns whether it has any."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _last_words(log: Path) -> str:
    said = last_line(log)
    if SUMMARY.fullmatch(said):  # of torchrun, which repeats no rank's last words
        said = last_line(log, "^error: ") or said
    return said.removeprefix("error: ")


def _own_code(log: Path, code: int) -> int:
    """The exit code of a process, or of the rank that failed first: torchrun itself then ends with 1."""
    if code != 1 or not SUMMARY.fullmatch(last_line(log)):
        return code
    told = re.search(RANKS_CODE, last_line(log, RANKS_CODE))
    return int(told[1]) if told else code
