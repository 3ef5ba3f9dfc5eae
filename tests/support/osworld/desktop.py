"""OSWorld's in-VM server, as published, in an Xvfb desktop on this machine. It is fetched by whoever runs the tests:

    DART_OSWORLD_SERVER   the folder desktop_env/server of OSWorld
    DART_OSWORLD_PYTHON   an interpreter with its requirements and pyatspi (a venv with --system-site-packages)

From apt: xvfb openbox wmctrl dbus at-spi2-core python3-pyatspi python3-tk gnome-screenshot xterm mousepad xclip.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.request import urlopen

import pytest

SERVER, PYTHON = os.environ.get("DART_OSWORLD_SERVER", ""), os.environ.get("DART_OSWORLD_PYTHON", "python3")
needs_server = pytest.mark.skipif(not SERVER, reason="DART_OSWORLD_SERVER does not name OSWorld's desktop_env/server")
WIDTH, HEIGHT = 1280, 720


@dataclass(frozen=True, slots=True)
class Desktop:
    port: int
    home: Path
    server: subprocess.Popen[bytes]
    """Kill it to see what a dead machine does."""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def desktop(folder: Path, port: int = 0) -> Iterator[Desktop]:
    """A desktop with a home of its own in `folder`, and OSWorld's server in it, on a free port if none is named."""
    home, server = folder / "home", folder / "server"
    home.mkdir(parents=True)
    shutil.copytree(SERVER, server)  # it writes its screenshots beside itself
    with contextlib.ExitStack() as stack:
        display = _xvfb(stack)
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "DISPLAY": f":{display}", "HOME": str(home), "GTK_MODULES": "gail:atk-bridge", "NO_AT_BRIDGE": "0",
            "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}", "XAUTHORITY": str(home / ".Xauthority"),
        }  # fmt: skip
        (home / ".Xauthority").write_bytes(_authority(display))
        environment |= _bus(stack, environment)
        child(stack, ["openbox"], environment, home)
        port = port or free_port()
        command = [PYTHON, "-m", "flask", "--app", "main", "run", "-h", "127.0.0.1", "-p", str(port)]
        process = child(stack, command, environment, server)
        _wait(f"http://127.0.0.1:{port}/screenshot", process)
        yield Desktop(port, home, process)


def _authority(display: str) -> bytes:
    """An entry that this display does not ask for. Without one python-xlib prints a warning in each program's output,
    which OSWorld's getters take for its result."""
    parts = (socket.gethostname().encode(), display.encode(), b"MIT-MAGIC-COOKIE-1", bytes(16))
    return struct.pack(">H", 256) + b"".join(struct.pack(">H", len(part)) + part for part in parts)


def _xvfb(stack: contextlib.ExitStack) -> str:
    read, write = os.pipe()
    command = ["Xvfb", "-displayfd", str(write), "-screen", "0", f"{WIDTH}x{HEIGHT}x24", "-nolisten", "tcp"]
    child(stack, command, dict(os.environ), Path("/"), pass_fds=(write,))
    os.close(write)
    with os.fdopen(read) as told:
        return told.readline().strip()


def _bus(stack: contextlib.ExitStack, environment: dict[str, str]) -> dict[str, str]:
    """A session bus for the accessibility tree, which each desktop must have for itself."""
    read, write = os.pipe()
    command = ["dbus-daemon", "--session", "--nofork", f"--print-address={write}"]
    child(stack, command, environment, Path("/"), pass_fds=(write,))
    os.close(write)
    with os.fdopen(read) as told:
        return {"DBUS_SESSION_BUS_ADDRESS": told.readline().strip()}


def child(
    stack: contextlib.ExitStack,
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    pass_fds: tuple[int, ...] = (),
    output: int | IO[bytes] = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, env=environment, cwd=folder, pass_fds=pass_fds, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
    )  # fmt: skip

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(end)
    return process


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), urlopen(url, timeout=30) as answer:
            if answer.status == 200:
                return
        assert process.poll() is None, "OSWorld's server ended: start it by hand to see why"
        time.sleep(0.2)
    raise AssertionError("OSWorld's server gave no screenshot")
