"""Copies each new checkpoint to `checkpoint.upload`, in the background, and removes the copies that are too many or
that broke off.

One copy at a time, and nothing waits for one but the end of the phase. A copy that fails is an event, and the run
continues: the next checkpoint is copied all the same. After an interruption, the copy under way ends within a block,
and is incomplete (`dart.store.elsewhere.copies`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

from dart.coordinator.service.journal import Journal
from dart.errors import UserError
from dart.store.elsewhere.copies import Stopped, copies, copy_out, incomplete_copies, remove_copy

log = logging.getLogger(__name__)


class Uploads:
    """`url`: the run's own folder; None: nothing is copied. `keep`: how many of the newest stay. `start`: the version
    that this process of the run started from."""

    def __init__(self, url: str | None, keep: int, journal: Journal, start: int = 0) -> None:
        self._url, self._keep, self._journal, self._start = url, keep, journal, start
        self._made: set[str] = set()
        """The copies of this process."""
        self._one = asyncio.Lock()
        self._newest = ""
        self._copying = ""
        self._waiting: set[str] = set()
        """The names of folders whose turn has not come."""

    async def copy(self, folder: Path) -> None:
        """Copy a sealed folder, unless a newer one waits for its turn by then."""
        if self._url is None:
            return
        self._newest = max(self._newest, folder.name)
        self._waiting.add(folder.name)
        try:
            async with self._one:
                if folder.name == self._newest:
                    self._copying = folder.name
                    try:
                        await self._copy(folder, self._url)
                    finally:
                        self._copying = ""
        finally:
            self._waiting.discard(folder.name)

    def needs(self, name: str) -> bool:
        """Whether the folder of this name must stay: it is being copied, or will be."""
        return name == self._copying or (name == self._newest and name in self._waiting)

    async def _copy(self, folder: Path, url: str) -> None:
        began, stop = time.monotonic(), threading.Event()
        try:
            size = await asyncio.to_thread(copy_out, folder, url, stop)
            self._made.add(folder.name)
            self._journal.event(
                "checkpoint_uploaded",
                path=f"{url}/{folder.name}",
                bytes=size,
                seconds=round(time.monotonic() - began, 2),
            )
            broken = await asyncio.to_thread(incomplete_copies, url) - {folder.name}
            whole = [name for name in await asyncio.to_thread(copies, url) if name not in broken]
            for old in [*broken, *sorted(whole, key=self._age)[: -self._keep]]:
                await asyncio.to_thread(remove_copy, f"{url}/{old}")
        except (OSError, UserError) as error:
            self._journal.event("checkpoint_upload_failed", path=f"{url}/{folder.name}", why=str(error))
            log.warning("%s could not be copied to %s: %s", folder, url, error)
        except Stopped:
            log.info("the copy of %s was interrupted", folder)
        finally:
            stop.set()

    def _age(self, name: str) -> tuple[bool, int]:
        """A copy's place, oldest first. Those of later versions than this process started from, but not its own, are
        abandoned: the run has gone another way since, and whatever it makes is newer."""
        version = int(name.removeprefix("v"))
        return version <= self._start or name in self._made, version
