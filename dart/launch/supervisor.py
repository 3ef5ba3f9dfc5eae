"""One process of a run, supervised from the actor that holds its place in the cluster. It needs no Ray.

What always holds: the process ends with its supervisor, because its standard input, a pipe, closes; when it ends, so
does what is left of its process group. Its output goes line by line to the supervisor's own, and to RUN/logs where that
folder can be seen. Tokens reach it in its environment or as private files, and never its output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import get_args

from dart import __version__
from dart.config.run import TokenRole
from dart.errors import UserError
from dart.launch.restarts import End
from dart.processes.secrets import AUTHORITY, token_file
from dart.processes.settings import own_environment
from dart.rundir import RunDirectory

FILES = "@files"
"""In an order's words: the private folder with its files."""
LOOK_SECONDS = 0.2
TERMINATE_SECONDS = 2.0
"""What is left of a process's group may take this long to end after SIGTERM."""
LOOK_AT_GROUP_SECONDS = 0.05
LAST_WORDS_SECONDS = 5.0
"""How long to wait for a process's last output: something that left its group may hold it open."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to run: `python -m dart`, then `words`. `folder`: the working directory, where it exists.

    `environment` and `files` (contents by name) may hold secrets, which is why they are never shown.
    """

    name: str
    words: tuple[str, ...]
    run: str
    folder: str
    log_bytes: int
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a supervisor is. `host`: its address; `port`: free there a moment ago; `node`: for a person."""

    host: str
    port: int
    node: str
    release: str = __version__


@dataclass(frozen=True, slots=True)
class Unusable:
    """A place where no process of the run can be started until somebody has repaired it."""

    why: str


@dataclass(frozen=True, slots=True)
class Listening:
    """How to dial a coordinator: its address, a token for each role, and the authority of its certificate."""

    address: str
    tokens: Mapping[str, str] = field(repr=False)
    authority: str = field(repr=False)


@dataclass(slots=True)
class _Life:
    """One start of the process, until its end."""

    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[str] | None = None
    address: tuple[int, int] | None = None
    """The identity of RUN/address before it."""


class Supervisor:
    """Its methods are called from several threads, in any order: `run` lasts as long as the process.

    `number`: of the start, by which the other methods say which one they mean.
    """

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}

    def place(self, host: str, node: str) -> Place:
        """`host`: an address of this machine that the others reach."""
        with socket.create_server((host, 0)) as free:
            return Place(host, free.getsockname()[1], node)

    def directory(self, run: str | None, parent: str, name: str) -> tuple[str, str]:
        """(the run's directory, made where it was missing; what is wrong with it, or nothing)."""
        try:
            made = RunDirectory.at(Path(run)) if run else RunDirectory.make(Path(parent), name)
        except UserError as error:
            return "", str(error)
        return str(made.path), ""

    def run(self, number: int, order: Order) -> End:
        """Returns when the process has ended; without a code where this machine cannot start it."""
        life = self._life(number)
        try:
            with tempfile.TemporaryDirectory(prefix="dart-", ignore_cleanup_errors=True) as folder:
                return self._run(life, order, Path(folder))
        except OSError as error:
            return End(None, f"it cannot be started there: {error}")
        finally:
            life.ended.set()
            life.began.set()

    def _run(self, life: _Life, order: Order, folder: Path) -> End:
        for name, content in order.files.items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_text(content, encoding="utf-8")
        life.address = _identity(RunDirectory(Path(order.run)).address)
        life.process = process = _started(order, folder)
        life.began.set()
        said = _Said(order)
        reading = threading.Thread(target=said.read, args=(process,), daemon=True)
        reading.start()
        code = process.wait()
        _end_group(process.pid)  # an engine or a browser that has outlived its worker
        reading.join(LAST_WORDS_SECONDS)
        return End(code, said.last, _checkpoints(RunDirectory(Path(order.run))))

    def stop(self, number: int, seconds: float) -> None:
        """Ask the process to end; after so many seconds, end its group."""
        life = self._life(number)
        life.began.wait()
        if life.process is None or life.ended.is_set():
            return
        life.process.send_signal(signal.SIGTERM)
        if not life.ended.wait(seconds):
            _end_group(life.process.pid)
            life.ended.wait()

    def listening(self, number: int, run: str) -> Listening | None:
        """Wait until the coordinator that runs here says where it listens; None if it ends before."""
        directory, life = RunDirectory(Path(run)), self._life(number)
        life.began.wait()
        while _identity(directory.address) in (None, life.address):
            if life.ended.wait(LOOK_SECONDS):
                return None
        return Listening(
            directory.told_address(),
            {role: token_file(directory.secrets, role).read_text().strip() for role in get_args(TokenRole)},
            (directory.secrets / AUTHORITY).read_text(encoding="ascii"),
        )

    def _life(self, number: int) -> _Life:
        return self._lives.setdefault(number, _Life())


def _started(order: Order, folder: Path) -> subprocess.Popen[str]:
    words = [word.replace(FILES, str(folder)) for word in order.words]
    return subprocess.Popen(
        [sys.executable, "-m", "dart", *words, "--parent-watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd=order.folder if Path(order.folder).is_dir() else None,
        env=own_environment({"PYTHONUNBUFFERED": "1", **order.environment}),
    )


class _Said:
    """A process's output, on its way."""

    def __init__(self, order: Order) -> None:
        self.last, self._failed = "", False
        run = RunDirectory(Path(order.run))
        self._log = logging.Logger(order.name)  # of its own: a node may have processes of several runs
        with contextlib.suppress(OSError):  # the folder is not there, or not for this node to write
            if run.path.is_dir():
                run.logs.mkdir(exist_ok=True)
                log = run.logs / f"{order.name}.log"
                self._log.addHandler(RotatingFileHandler(log, maxBytes=order.log_bytes, backupCount=1))

    def read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            shown = line.rstrip("\n")
            # Ray keeps this output on the node's disk, which may be full: the child would wait for ever for a reader.
            with contextlib.suppress(OSError, ValueError):
                print(shown, flush=True)
            self._log.info("%s", shown)
            if shown.startswith("error: ") or not self._failed:  # what follows an error is how to go on after it
                self._failed = shown.startswith("error: ")
                self.last = shown.strip().removeprefix("error: ") or self.last
        for handler in self._log.handlers:
            handler.close()


def _end_group(group: int) -> None:
    """SIGTERM first: Python's resource trackers ignore it, and remove the shared memory of those that it ends."""
    until = time.monotonic() + TERMINATE_SECONDS
    left = _signalled(group, signal.SIGTERM)
    while left and time.monotonic() < until:
        time.sleep(LOOK_AT_GROUP_SECONDS)
        left = _signalled(group, 0)
    _signalled(group, signal.SIGKILL)


def _signalled(group: int, number: int) -> bool:
    """Whether there is a process of the group, which gets the signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _checkpoints(run: RunDirectory) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(folder.name for folder in run.checkpoints.glob("v*"))
    return frozenset()


def _identity(file: Path) -> tuple[int, int] | None:
    """Changes when the file is written anew, whole."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
