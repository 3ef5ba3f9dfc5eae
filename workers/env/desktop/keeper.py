"""Runs every process of one desktop and ends them all: `python -I -S keeper.py FOLDER LOCK`. Standard library only.

It is a subreaper (PR_SET_CHILD_SUBREAPER): what a process leaves behind, daemons included, becomes its child, so the
desktop is gone once `wait` says that there are no children. A process group or session would miss daemons, and a marker
in the environment can be wiped. When standard input ends, because the worker closed it or died in any way, all are
killed and FOLDER is removed. LOCK is a descriptor of the folder's locked file, held until then.

Lines of JSON come in: {"id", "argv", "env", "cwd", "log", "display"?: a file for Xvfb's -displayfd}, and go out:
{"id", "pid"} or {"id", "error"}, and {"ended": pid, "code"}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
X_SERVER_SECONDS = 3.0


class Keeper:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._x_server = 0
        self._unread = b""

    def work(self) -> None:
        """Until standard input ends."""
        wake, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([0, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._collect(report=True)
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._start(json.loads(line))

    def end(self) -> None:
        """Kill all, the X server last and politely: it removes its socket itself."""
        for pid in descendants(os.getpid()) - {self._x_server}:
            _kill(pid, signal.SIGKILL)
        _kill(self._x_server, signal.SIGTERM)
        began = time.monotonic()
        while self._collect(report=False):
            late = time.monotonic() - began > X_SERVER_SECONDS
            for pid in descendants(os.getpid()) - (set() if late else {self._x_server}):
                _kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        remove_socket(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, request: dict[str, object]) -> None:
        argv, log = [str(one) for one in request["argv"]], str(request["log"])  # type: ignore[attr-defined]
        environment = {str(key): str(value) for key, value in request["env"].items()}  # type: ignore[attr-defined]
        program = shutil.which(argv[0], path=environment.get("PATH"))
        if program is None:
            _say({"id": request["id"], "error": f"there is no program {argv[0]}"})
            return
        display = request.get("display")
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                os.chdir(str(request["cwd"]))
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                if display:
                    # A file, because Xvfb would be ended by SIGPIPE if nobody read a pipe to its end.
                    answer = os.open(str(display), os.O_WRONLY | os.O_CREAT, 0o600)
                    os.set_inheritable(answer, True)
                    argv += ["-displayfd", str(answer)]
                for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.execve(program, argv, environment)
            finally:
                os._exit(127)
        if display:
            self._x_server = pid
            (self._folder / "x-server").write_text(str(pid))
        _say({"id": request["id"], "pid": pid})

    def _collect(self, report: bool) -> bool:
        """Reap the children that have ended; whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._x_server:
                self._x_server = 0  # the number may soon be another process's
            if report:
                _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def descendants(of: int) -> set[int]:
    """The processes below one, by their parents' numbers in /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    open_ends = [of]
    while open_ends:
        new = children.get(open_ends.pop(), [])
        found.update(new)
        open_ends += new
    return found


def remove_socket(folder: Path) -> None:
    """The socket of the folder's X server, if that was killed before it could remove it: nobody listens there then.

    There is no lock file: Xvfb writes none when it picks its display itself.
    """
    with contextlib.suppress(OSError, ValueError):
        path = f"/tmp/.X11-unix/X{int((folder / 'display').read_text())}"
        with socket.socket(socket.AF_UNIX) as knocking:
            try:
                knocking.connect(path)
            except ConnectionRefusedError:
                Path(path).unlink()


def _kill(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _say(message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the worker has gone: the end of standard input says so next
        os.write(1, json.dumps(message).encode() + b"\n")


def main() -> None:
    folder, lock = Path(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(lock, False)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C is for the worker, which then closes standard input
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keeper = Keeper(folder)
    try:
        keeper.work()
    finally:
        keeper.end()


if __name__ == "__main__":
    main()
