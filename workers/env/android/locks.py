"""A lock for each device, so that no two env workers of a machine use it. A worker that dies loses its locks."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from dart.workers.env.android.options import Device


class Locks:
    """The devices that this process holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser()
        self._held: dict[str, int] = {}

    def take(self, device: Device) -> bool:
        """Whether the device was free and is now ours. Raises OSError if the folder cannot be written."""
        if device.key in self._held:
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(device.key.encode()).hexdigest()[:16]
        file = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._held[device.key] = file
        return True

    def give_back(self, device: Device) -> None:
        if (file := self._held.pop(device.key, None)) is not None:
            os.close(file)
