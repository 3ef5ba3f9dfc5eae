"""Desktops for tests, and a small X client that says which events reach it."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dart.workers.env.desktop.tasks import PROGRAMS
from dart.workers.env.desktop.world import Desktop, DesktopOptions

if TYPE_CHECKING:
    from dart.workers.env.desktop.session import Session

LIGHT = ("galculator", "mousepad", "pcmanfm", "xterm", "yad")
HANG_SECONDS = 60.0


def missing() -> str:
    """Why desktops cannot run here; empty if they can."""
    found = [said for check in Desktop.checks(DesktopOptions()).values() if (said := check())]
    found += [f"{name} is not installed: make desktop" for name in LIGHT if shutil.which(name) is None]
    return "; ".join(found)


needs_desktop = pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")
assert set(LIGHT) < set(PROGRAMS)


def until(true: Callable[[], object], what: str) -> None:
    """Wait until it is true. The time is only a guard against hanging."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < HANG_SECONDS, f"waited {HANG_SECONDS:g} s in vain: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pids: list[int]) -> None:
    """A killed process no longer names its desktop a moment before it is gone."""
    until(lambda: not [pid for pid in pids if alive(pid)], "all processes have ended")


@contextmanager
def booted(size: tuple[int, int] = (320, 240)) -> Iterator[Session]:
    from dart.workers.env.desktop.session import Session

    session = Session(size)
    try:
        session.boot()
        yield session
    finally:
        session.close()


def remains(folder: Path, display: str) -> list[str]:
    """What a desktop has left on the disk: its folder, or a socket or a lock of its display whose server is gone. A
    server that lives is somebody else's, who was given the number that has become free."""
    left, path = [str(folder)] if folder.exists() else [], Path(f"/tmp/.X11-unix/X{display.removeprefix(':')}")
    with socket.socket(socket.AF_UNIX) as knocking:
        try:
            knocking.connect(str(path))
        except ConnectionRefusedError:
            left.append(str(path))
        except FileNotFoundError:
            pass
    locks = Path("/tmp").glob(f".X{display.removeprefix(':')}-lock")
    return [*left, *(str(one) for one in locks if not alive(int(one.read_text())))]
