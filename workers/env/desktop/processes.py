"""The processes of one desktop, as the worker sees them: started and ended through a `keeper`.

A desktop's folder is locked while its keeper lives. `sweep` ends what a killed keeper left behind: folders without a
lock, and the processes whose environment names such a folder. The world webapps keeps its servers so, too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dart.errors import UserError
from dart.workers.env.desktop import keeper
from dart.worlds import EnvironmentFailure
from dart.worlds.locks import abandoned, owned_folder

MARKER = "DART_DESKTOP"
END_SECONDS = 15.0
MOST_PATH = 80
"""Names of Unix sockets, which lie in the folder, are at most 107 bytes."""


class Processes:
    """One keeper, its folder, and the processes that it started. For one thread, except `kill`."""

    def __init__(self, what: str = "desktop") -> None:
        """`what` is in the folder's name and in messages."""
        self._what = what
        self.folder, lock = owned_folder(f"dart-{what}-")
        self._numbers = itertools.count(1)
        self._codes: dict[int, int] = {}
        self._unread = b""
        try:
            if len(str(self.folder)) > MOST_PATH:
                shutil.rmtree(self.folder)
                raise UserError(
                    f"TMPDIR {self.folder.parent} is too long for Unix sockets below it: set TMPDIR to a shorter path"
                )
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(self.folder), str(lock)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lock], start_new_session=True, bufsize=0,
            )  # fmt: skip
        finally:
            os.close(lock)

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path, display: Path | None = None
    ) -> int:
        """The process id. `display`: a file for Xvfb's answer. Raises EnvironmentFailure."""
        number = next(self._numbers)
        request = {
            "id": number, "argv": list(argv), "env": dict(env, **{MARKER: str(self.folder)}), "cwd": str(cwd),
            "log": str(log), "display": str(display) if display else None,
        }  # fmt: skip
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(json.dumps(request).encode() + b"\n")
        except (OSError, ValueError):
            raise EnvironmentFailure(f"the {self._what}'s keeper has ended") from None
        while True:
            for answer in self._read(10.0):
                if answer.get("id") == number:
                    if "error" in answer:
                        raise EnvironmentFailure(str(answer["error"]))
                    return int(str(answer["pid"]))

    def ended(self, pid: int) -> int | None:
        """The exit code of a process; None while it runs."""
        if pid not in self._codes:
            with contextlib.suppress(EnvironmentFailure):
                self._read(0.0)
        return self._codes.get(pid)

    def wait(self, pid: int, seconds: float, what: str) -> int:
        """The exit code. Raises EnvironmentFailure if the process takes longer."""
        began = time.monotonic()
        while (code := self.ended(pid)) is None:
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                raise EnvironmentFailure(f"{what} took longer than {seconds:g} s")
            self._read(min(left, 0.5), patient=False)
        return code

    def alive(self) -> bool:
        """Whether the keeper lives."""
        return self._keeper.poll() is None

    def _read(self, seconds: float, patient: bool = True) -> list[dict[str, object]]:
        """The keeper's next messages; endings are remembered. Raises EnvironmentFailure if it has ended, or, unless
        `seconds` is 0 or `patient` is false, is silent."""
        assert self._keeper.stdout is not None
        output = self._keeper.stdout.fileno()
        if not select.select([output], [], [], seconds)[0]:
            if seconds and patient:
                raise EnvironmentFailure(f"the {self._what}'s keeper was silent for {seconds:g} s")
            return []
        data = os.read(output, 1 << 16)
        if not data:
            raise EnvironmentFailure(f"the {self._what}'s keeper has ended")
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages: list[dict[str, object]] = [json.loads(line) for line in lines]
        for message in messages:
            if "ended" in message:
                self._codes[int(str(message["ended"]))] = int(str(message["code"]))
        return messages

    def kill(self) -> None:
        """Have all processes ended; returns at once. May be called from any thread, and again."""
        if self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()

    def close(self) -> None:
        """End all processes and remove the folder."""
        self.kill()
        try:
            self._keeper.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        if self.folder.exists():
            _end_left(self.folder)


def sweep(what: str = "desktop") -> None:
    """End what desktops of killed keepers left in the temporary folder; those that live are not touched."""
    for folder in abandoned(f"dart-{what}-"):
        _end_left(folder)


def marked(folder: Path) -> list[int]:
    """The processes whose environment names the folder."""
    mark, found = f"{MARKER}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _end_left(folder: Path) -> None:
    while left := marked(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    keeper.remove_socket(folder)
    shutil.rmtree(folder, ignore_errors=True)
