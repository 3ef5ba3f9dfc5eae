"""Looks after a run for weeks: keeps its disk use within bounds, and checks that its files are still its own.

`Housekeeping` runs two loops, and nothing waits for either of them:

    guard    every GUARD_SECONDS: run.db is the file that was opened, run.lock is held; ends the run if run.db is gone
    tidy     every SWEEP_SECONDS, two things:
             sweep    screenshots, folder by folder, each a few file calls on another thread; left out where they are
                      in an object store, or soon after a sweep that took long (PAUSES)
             trim     events, metrics.jsonl, SQLite's write-ahead log, memory that malloc holds free

Screenshots that no trajectory refers to are removed when no running episode can have stored them and
`retention.unused_seconds` have passed; if there is a bound, the oldest that nothing needs are removed until it is
met (`dart.store.upkeep` says which). One that is stored again at that moment stays (`dart.screenshots.directory`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dart.config import Retention
from dart.coordinator.fleet.environments import Underway
from dart.coordinator.service.journal import Journal
from dart.failpoints import failpoint
from dart.malloc import release_free_memory
from dart.rundir import Guard
from dart.screenshots.directory import SHARDS, ScreenshotDirectory, StoredFile
from dart.shortage import shortage
from dart.store import lines
from dart.store.database import Database
from dart.store.patience import Patience
from dart.store.records import STORY
from dart.store.upkeep import Unneeded, Upkeep

log = logging.getLogger(__name__)

GUARD_SECONDS = 2.0
SWEEP_SECONDS = 60.0
PAUSES = 20
"""How many times as long as a sweep worked the pause after it is at least: there may be millions of screenshots."""
SHARD_PAUSE_SECONDS = 0.05
"""The pause between two folders of screenshots, so that a sweep of a million leaves the disk to others."""
TRAJECTORIES_AT_ONCE = 32
LEAST_AGE_SECONDS = 60.0
"""Younger screenshots stay, whatever the bound says: clocks differ, and those of files are coarse."""
ROOM = 0.95
"""Removing ends at this share of the bound, so that it does not begin again with the next screenshot."""
WAL_BYTES = 64 << 20
TELL_SECONDS = 30.0


@dataclass(slots=True)
class Sweep:
    """The result of one pass over all screenshots."""

    files: int = 0
    bytes: int = 0
    """Left on the disk, as far as this sweep has seen."""
    unused: int = 0
    trajectories: int = 0
    removed: int = 0
    freed: int = 0

    def took(self, freed: Sequence[int]) -> int:
        """Count removed files, given their lengths. Returns their number."""
        self.removed += len(freed)
        self.freed += sum(freed)
        self.bytes -= sum(freed)
        return len(freed)


class Waits:
    """Records that threads wait for something that is away, or that the machine is short of: at once, every
    TELL_SECONDS, and when it is back.

    `why`: the event's text, with a place for the seconds. Make it where the event loop runs.
    """

    def __init__(self, journal: Journal, patience: Patience, away: str, back: str, why: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._journal, self._patience, self._usual, self._why = journal, patience, (away, back), why
        self._last: float | None = None
        """The seconds waited when it was recorded last, since it went away."""
        self._back = back

    def told(self, seconds: float, over: bool) -> None:
        """A thread has waited so long; `over`: and need not any longer."""
        self._loop.call_soon_threadsafe(self._record, seconds, over, self._patience.short)

    def _record(self, seconds: float, over: bool, short: str) -> None:
        if over and self._last is not None:
            self._last = None
            self._journal.event(self._back, seconds=round(seconds, 1))
        elif not over and (self._last is None or seconds - self._last >= TELL_SECONDS):
            self._last = seconds
            away, self._back = ("machine_short", "machine_recovered") if short else self._usual
            why = short or self._why.format(seconds)
            log.warning("what has finished waits to be stored, for %.0f s so far: %s", seconds, why)
            self._journal.event(away, seconds=round(seconds, 1), why=why)
        with contextlib.suppress(OSError):  # they are kept, and written when there is room
            self._journal.flush_lines()


class Housekeeping:
    """`pooled`: how many successes of each task keep their screenshots for the experience pool. `checkpoints`: how many
    of the newest a resumed run may go back to. `bounded`: whether the disk bound applies to the run's own trajectories;
    not for a collection, because they are its result."""

    def __init__(
        self,
        retention: Retention,
        guard: Guard,
        database: Database,
        journal: Journal,
        underway: Underway,
        *,
        pooled: int,
        checkpoints: int,
        bounded: bool,
    ) -> None:
        self._retention, self._guard, self._database, self._journal = retention, guard, database, journal
        self._underway, self._pooled, self._checkpoints = underway, pooled, checkpoints
        self._most_bytes = retention.screenshot_bytes if bounded else None
        self._upkeep = Upkeep(database)
        self._told_full = False
        self._failing: set[str] = set()

    @property
    def unstored(self) -> tuple[float, str]:
        """How long and for what the run has waited to store something; (0, "") if it does not."""
        return max((one.waited, one.waits_for) for one in (self._database.patience, self._database.blobs.patience))

    async def run(self) -> None:
        """Runs until cancelled. Raises UserError when the run's database is gone."""
        database, screenshots = self._database.patience, self._database.blobs.patience
        database.told = Waits(
            self._journal, database, "database_locked", "database_unlocked",
            "another process has locked the database for {:.0f} s, or its server is away: the run continues when it is "
            "there again",
        ).told  # fmt: skip
        screenshots.told = Waits(
            self._journal, screenshots, "screenshots_away", "screenshots_back",
            "run.blobs has failed for {:.0f} s: what needs its screenshots waits until it is there again",
        ).told  # fmt: skip
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._keep_bounds())
        finally:
            database.told = screenshots.told = None

    async def _watch(self) -> None:
        while True:
            if await asyncio.to_thread(self._guard.look):
                self._journal.event("lock_renewed", path=str(self._guard.lock_file))
            await asyncio.sleep(GUARD_SECONDS)

    async def _keep_bounds(self) -> None:
        directory, put_back, due = self._database.blobs.directory, False, 0.0
        while True:
            if directory and not put_back:
                with self._put_off("put back"):
                    if again := await asyncio.to_thread(directory.put_back):
                        self._journal.event("screenshots_put_back", files=again)
                    put_back = True
            await asyncio.sleep(SWEEP_SECONDS)
            if directory and put_back and (began := time.monotonic()) >= due:
                with self._put_off("sweep"):
                    self._tell(await self.sweep(directory))
                ended = time.monotonic()
                due = ended + PAUSES * (ended - began - SHARDS * SHARD_PAUSE_SECONDS)
            with self._put_off("trim"):
                await self.trim()

    @contextlib.contextmanager
    def _put_off(self, work: str) -> Iterator[None]:
        """Nothing waits for this work, so a file system that fails for a moment must not end the run: it is recorded
        once, and the work is tried again in the next round."""
        try:
            yield
        except OSError as error:
            why = shortage(error) or str(error)
            log.warning("tidying up (%s) failed: %s", work, why)
            if work not in self._failing:
                self._journal.event("housekeeping_failed", work=work, why=why)
            self._failing.add(work)
        else:
            self._failing.discard(work)

    # ---- screenshots ----

    async def sweep(self, directory: ScreenshotDirectory) -> Sweep:
        """Look at every screenshot once, and remove those that may be removed. Raises OSError, and records what it had
        removed."""
        done = Sweep()
        try:
            await self._sweep(directory, done)
        except OSError:
            self._tell_removed(done)
            raise
        return done

    async def _sweep(self, directory: ScreenshotDirectory, done: Sweep) -> None:
        before = self._untouched_since(self._retention.unused_seconds)
        for shard in range(SHARDS):
            files = await asyncio.to_thread(directory.files, shard)
            done.files += len(files)
            done.bytes += sum(file.bytes for file in files)
            await self._remove_unused(directory, files, before, done)
            await asyncio.sleep(SHARD_PAUSE_SECONDS)
        if self._most_bytes is not None and done.bytes > self._most_bytes:
            await self._make_room(directory, self._most_bytes * ROOM, done)

    def _untouched_since(self, seconds: float) -> float:
        """The earlier of: this many seconds ago, and well before the oldest running episode began (Unix seconds)."""
        return min(time.time() - seconds, self._underway.oldest - LEAST_AGE_SECONDS)

    async def _remove_unused(
        self, directory: ScreenshotDirectory, files: Sequence[StoredFile], before: float, done: Sweep
    ) -> None:
        old = [file.digest for file in files if file.touched < before]
        if old and (unused := await self._upkeep.unreferenced(old)):
            done.unused += done.took(await asyncio.to_thread(_removed, directory, unused, before))

    async def _make_room(self, directory: ScreenshotDirectory, enough: float, done: Sweep) -> None:
        before = self._untouched_since(LEAST_AGE_SECONDS)
        # What is pooled meanwhile finished after `before`.
        pooled = await self._database.newest_success_ids(self._pooled) if self._pooled else frozenset[str]()
        which = Unneeded(before, self._checkpoints, pooled, evaluations=not self._retention.evaluation_screenshots)
        while done.bytes > enough:
            forgotten = await self._upkeep.forget_oldest(which, TRAJECTORIES_AT_ONCE)
            failpoint("screenshots-forgotten")
            if not forgotten.trajectories:
                return
            done.trajectories += forgotten.trajectories
            done.took(await asyncio.to_thread(_removed, directory, forgotten.digests, before))

    def _tell_removed(self, done: Sweep) -> None:
        if done.removed:
            self._journal.event(
                "screenshots_removed",
                files=done.removed,
                bytes=done.freed,
                unused=done.unused,
                trajectories=done.trajectories,
                left_bytes=done.bytes,
            )

    def _tell(self, done: Sweep) -> None:
        self._tell_removed(done)
        full = self._most_bytes is not None and done.bytes > self._most_bytes
        if full and not self._told_full:
            self._journal.event(
                "screenshots_over_bound",
                bytes=done.bytes,
                bound=self._most_bytes,
                why="all that is left is needed: by unfinished groups, by what a resumed run may train on again, by "
                "the experience pool, or by evaluations: raise retention.screenshot_bytes, or save checkpoints more "
                "often",
            )
        self._told_full = full

    # ---- events, metrics.jsonl, the write-ahead log, free memory ----

    async def trim(self) -> None:
        more = True
        while more:
            more = await self._upkeep.trim_events(self._retention.events)
            await asyncio.sleep(SHARD_PAUSE_SECONDS)
        metrics = self._guard.directory.metrics
        if self._journal.bytes > self._retention.metrics_bytes // 2:
            self._journal.begin_anew()
        await asyncio.to_thread(lines.fold, metrics, tells_the_story)
        if await asyncio.to_thread(_size, self._guard.directory.write_ahead_log) > WAL_BYTES:
            await self._database.fold_wal()
        await asyncio.to_thread(release_free_memory)


def _removed(directory: ScreenshotDirectory, digests: Sequence[bytes], before: float) -> list[int]:
    """Remove these screenshots. Returns the lengths of the files that were removed."""
    return [freed for digest in digests if (freed := directory.remove(digest, before))]


def tells_the_story(line: str) -> bool:
    """Whether this line of metrics.jsonl is kept as long as the run itself."""
    kind = line.removeprefix('{"event": "').partition('"')[0]
    return kind in STORY


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
