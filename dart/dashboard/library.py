"""The runs that a dashboard shows: found below its folders, opened when somebody looks, closed when nobody does."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dart.errors import UserError
from dart.inspection.inspector import Inspector
from dart.inspection.opening import NotFound, shown
from dart.inspection.records import RunRow
from dart.inspection.runs import Kept, by_id, rows_of, run_directories
from dart.rundir import RunDirectory

MOST_OPEN = 8
"""Runs that are kept open, unless more are in use; each holds a few file descriptors."""
LISTED_SECONDS = 2.0


class Library:
    """`paths`: run directories, or folders of them; a run that begins later is found, too."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._open: OrderedDict[str, Inspector] = OrderedDict()
        self._used = Counter[Inspector]()
        """How many callers of `run` use each now."""
        self._opening = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """By run: one that is copied and migrated, or whose server does not answer, holds up no other."""
        self._rows: list[RunRow] = []
        self._directories: dict[str, RunDirectory] = {}
        self._kept: Kept = {}
        self._listed = float("-inf")
        self._listing = asyncio.Lock()

    async def rows(self) -> list[RunRow]:
        """Every run, newest first. At most two seconds old; all who ask meanwhile wait for the same listing."""
        async with self._listing:
            if time.monotonic() - self._listed > LISTED_SECONDS:
                directories = run_directories(self._paths)
                self._rows, self._directories = await rows_of(directories, self._kept), by_id(directories)
                await self._close_renamed()
                self._listed = time.monotonic()
        return self._rows

    async def _close_renamed(self) -> None:
        """Another run of the same name may have come, and has the id of one that is open."""
        for row in self._rows:
            found = self._open.get(row.id)
            if found is not None and shown(found.files.directory.path) != row.directory:
                await self._forget(row.id)

    @asynccontextmanager
    async def run(self, run_id: str) -> AsyncIterator[Inspector]:
        """The run, which stays open until the block ends. Raises NotFound for one that is in none of the folders,
        UserError for one that cannot be read."""
        inspector = await self._opened(run_id)
        try:
            await self._close_unused()
            yield inspector
        finally:
            self._used -= Counter([inspector])
            if not self._used[inspector] and self._open.get(run_id) is not inspector:
                await inspector.close()

    async def _opened(self, run_id: str) -> Inspector:
        """The run, in use from now on."""
        async with self._opening[run_id]:
            known = self._open.get(run_id)
            if known is not None and await asyncio.to_thread(known.files.outdated) and self._open.get(run_id) is known:
                await self._forget(run_id)
            found = self._open.get(run_id)  # others may have closed it meanwhile
            if found is None:
                found = self._open[run_id] = await Inspector.open(self._directory(run_id), run_id)
            self._open.move_to_end(run_id)
            self._used[found] += 1
        return found

    async def _close_unused(self) -> None:
        """Close what was asked for longest ago, where too many are open that nobody uses."""
        unused = [name for name, one in self._open.items() if not self._used[one]]
        for name in unused[: max(0, len(self._open) - MOST_OPEN)]:
            await self._forget(name)

    async def _forget(self, run_id: str) -> None:
        """Whoever asks for the run from now on has it opened anew; those who use it now close it at the end."""
        found = self._open.pop(run_id, None)
        if found is not None and not self._used[found]:
            await found.close()

    def _directory(self, run_id: str) -> RunDirectory:
        found = self._directories.get(run_id) if time.monotonic() - self._listed < LISTED_SECONDS else None
        found = found or by_id(run_directories(self._paths)).get(run_id)
        if found is None:
            raise NotFound(f"run {run_id!r} is not below {', '.join(map(str, self._paths))}: `dart runs` lists what is")
        return found

    async def close(self) -> None:
        while self._open:
            _, inspector = self._open.popitem()
            await inspector.close()


def check_paths(paths: Sequence[Path]) -> None:
    """Raises UserError where a path holds no run."""
    if not run_directories(paths):
        raise UserError(f"no run below {', '.join(map(str, paths))}: name a run directory, or a folder of them")
