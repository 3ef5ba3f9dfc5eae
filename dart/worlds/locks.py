"""Locks on what the env workers of one machine share, such as devices or virtual machines that all of them are told of,
and on temporary folders, which another worker cleans up if their owner was killed.

The system releases them when the process that holds them ends, for whatever reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dart.worlds.missing import at_home

_OWNER = "owner"
"""The locked file in an owned folder."""


def of_this_machine(key: str) -> str:
    """The key of what no other machine has, even if its name there is the same and the folder of the locks is shared,
    as a home folder on a network file system is."""
    return f"{socket.gethostname()}/{key}"


class Locks:
    """What this process holds. `folder`: the same for all that must not use the same thing; `~` is the user's home."""

    def __init__(self, folder: Path) -> None:
        self._folder = at_home(folder)
        self._held: dict[str, int] = {}

    def take(self, key: str) -> bool:
        """Whether it was free and is now ours. Raises OSError if the folder cannot be written."""
        if key in self._held:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        file = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._held[key] = file
        return True

    def give_back(self, key: str) -> None:
        if (file := self._held.pop(key, None)) is not None:
            os.close(file)

    def close(self) -> None:
        """Give back all of it."""
        for key in tuple(self._held):
            self.give_back(key)


def owned_folder(prefix: str) -> tuple[Path, int]:
    """A new temporary folder, and the descriptor that holds its lock: until every process that has it closes it or
    ends, the folder is not `abandoned`."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    # The file gets its name only once it is locked, so that nobody takes this folder for an abandoned one.
    unlocked = folder / f"{_OWNER}.new"
    lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(folder / _OWNER)
    return folder, lock


def abandoned(prefix: str) -> Iterator[Path]:
    """The folders of `owned_folder` whose owners have ended, each locked until the next is asked for."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        # An OSError means that its owner lives, that it is just being made or removed, or that it is not ours.
        with contextlib.suppress(OSError), (folder / _OWNER).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
