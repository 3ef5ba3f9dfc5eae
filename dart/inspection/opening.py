"""A run's database and screenshots, opened for reading alone. Nothing in the run's directory is changed.

A database that an older dart wrote is copied into a temporary folder and migrated there. One that was left behind by a
killed process still has its write-ahead log, which SQLite reads. Where the folder cannot be written to, SQLite cannot
make the index of that log either, and the file is read as it is, without the log. One in PostgreSQL is read there, in
transactions that may not write.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, RowMapping, Select, create_engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool
from sqlalchemy.util import LRUCache

from dart.core.json_text import read_object
from dart.errors import UserError
from dart.rundir import RunDirectory
from dart.screenshots.directory import ScreenshotDirectory, file_name
from dart.shortage import shortage
from dart.store import tables as t
from dart.store.blobs import files_at
from dart.store.database import Database, sqlite_url
from dart.store.elsewhere.place import Place
from dart.store.engine import is_locked, server_engine
from dart.store.lock import is_held
from dart.store.records import RunRecord, run_from_row
from dart.store.regular import is_regular, open_regular, read_regular

log = logging.getLogger(__name__)
T = TypeVar("T")

READERS = 4
QUERY_SECONDS = 5.0
"""Of the processor, for what is read of a run at once; also what another program wrote must come to an end."""
MOST_VALUE = 32 << 20
"""Bytes of one row."""
MOST_COPIED = 8 << 30
MOST_PICTURE = 64 << 20
STEPS_BETWEEN_LOOKS = 10_000
"""Of SQLite's machine, some 0.1 ms."""
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
    struct.error,
)
"""What reading a value of another kind or size than dart writes raises."""
LIVE = "mode=ro"
AS_IT_IS = "mode=ro&immutable=1"
"""SQLite does not notice then that the file changes."""
BUSY_SECONDS = 0.2
"""dart locks a database that others read only for a moment, when it opens or closes it."""
_SQLITE = create_engine("sqlite://")
_STATEMENTS: LRUCache[Any, Any] = LRUCache(500)
"""Compiled once for all runs, whose engines therefore share a dialect: it takes longer than to execute them."""
MEDIA_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp", b"GIF8": "image/gif"}
"""The first bytes of the pictures that a browser is given."""


NOT_DARTS = "it is not a dart database, or is damaged, or not yours to read: name the directory of another run"


def shown(name: str | Path) -> str:
    """A file's name as a text that every reader accepts: bytes of it that are no UTF-8 stand as \\xff."""
    return str(name).encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")


class NotFound(UserError):
    """The run has no such trajectory, group, task or screenshot."""


class TooSlow(UserError):
    """The database takes longer to read than it may."""


def state_of(directory: RunDirectory) -> object:
    """Changes when the run has. Reading makes an empty write-ahead log, which does not count."""
    found = []
    for file in (directory.database, directory.write_ahead_log):
        with suppress(OSError):
            if (status := file.stat()).st_size:
                found.append((status.st_mtime_ns, status.st_size))
    return is_held(directory.lock_file), found


def _identity(directory: RunDirectory, *, changes: bool) -> object:
    """Device and inode of the database's file, which change when it is replaced; None if it is not there.

    With `changes`, also its time and size, which change when it is written to.
    """
    with suppress(OSError):
        status = directory.database.stat()
        return status.st_dev, status.st_ino, *((status.st_mtime_ns, status.st_size) if changes else ())
    return None


@contextmanager
def told(what: str) -> Iterator[None]:
    """What a run's damage raises becomes a UserError: it costs the page, or the row, that needed the value. The log has
    where it was raised, at level DEBUG: it may be a mistake of dart's."""
    try:
        yield
    except DAMAGE as error:
        log.debug("%s", what, exc_info=True)
        raise UserError(f"{what} is damaged: {type(error).__name__}: {str(error)[:300]}") from error


def said(text: str) -> dict[str, Any]:
    """What an event says; a damaged one says nothing, and costs no page of the others."""
    try:
        return read_object(text)
    except ValueError:
        return {}


class _Screenshots:
    """A folder of screenshots whose files are read as `store.regular` says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes:
        return read_regular(self._folder.parent, f"{self._folder.name}/{name}", MOST_PICTURE)

    def size(self, name: str) -> int:
        with os.fdopen(open_regular(self._folder.parent, f"{self._folder.name}/{name}")) as file:
            return os.fstat(file.fileno()).st_size


class RunFiles:
    """One run, to be read: `async with await RunFiles.open(directory) as files`."""

    def __init__(
        self,
        directory: RunDirectory,
        place: Place,
        file: Path,
        copied: tempfile.TemporaryDirectory[str] | None = None,
        seconds: float = QUERY_SECONDS,
    ) -> None:
        """`place`: the directory's, as it was checked. `seconds`: of the processor, for each `read`. Raises UserError
        where the database or the screenshots are elsewhere and there is no driver for that."""
        self.directory = directory
        self.database = place.shown(directory.database)
        """For messages."""
        self.screenshots = place.folder() or directory.blobs
        """The directory or the URL where they are."""
        self.id = shown(directory.name)
        """What a reader calls the run: its directory's name, also of one that was renamed, or what `open` was given."""
        self.notes: list[str] = []
        """What is unusual about the files, a sentence each."""
        self.run_id = ""
        self._copied = copied
        where = files_at(self.screenshots)
        self._screenshots = _Screenshots(where.root) if isinstance(where, ScreenshotDirectory) else where
        self._ending, self._seconds = False, seconds
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="inspection")
        self._mode = LIVE
        self._then = self._now()
        self._server = place.url()
        self._engine = server_engine(self._server, READERS, read_only=True) if self._server else self._file_engine(file)

    @classmethod
    async def open(cls, directory: RunDirectory, id: str | None = None, seconds: float = QUERY_SECONDS) -> RunFiles:
        """`id`: where the directory's name would not tell it from another. `seconds`: as of the constructor.

        Raises UserError where there is no database of dart's, or one that this dart cannot read.
        """
        if not directory.is_run:
            raise UserError(f"{directory.path} is not a run directory: it has no {directory.database.name}")
        place = directory.place
        _check_place(directory, place)
        files = cls(directory, place, directory.database, None, seconds)
        try:
            version = await files._schema_version()
            if version < t.SCHEMA_VERSION:
                if files._server:
                    raise UserError(
                        f"{files.database} has schema version {version}, this dart has {t.SCHEMA_VERSION}: `dart "
                        "export` or --resume migrate it, when no process works on the run"
                    )
                await files.close()
                files = await cls._migrated_copy(directory, place, version)
            elif version > t.SCHEMA_VERSION:
                raise UserError(
                    f"{files.database} has schema version {version}, this dart has {t.SCHEMA_VERSION}: a newer "
                    "dart wrote it; upgrade dart"
                )
            newest = select(t.runs.c.id).order_by(t.runs.c.started.desc()).limit(1)
            found = await files.read(lambda connection: connection.execute(newest).scalar_one_or_none())
            if found is not None and not isinstance(found, str):
                raise UserError(f"{files.database} is damaged: the id of its run is no text")
            if found is None:
                begins = is_held(directory.lock_file)
                why = "it is about to begin: look again" if begins else "it ended before it began; remove the directory"
                raise UserError(f"{files.database} holds no run: {why}")
            files.run_id, files.id = found, id or files.id
        except BaseException:
            await files.close()
            raise
        return files

    @classmethod
    async def _migrated_copy(cls, directory: RunDirectory, place: Place, version: int) -> RunFiles:
        copied = tempfile.TemporaryDirectory(prefix="dart-view-")
        try:
            file = Path(copied.name) / directory.database.name
            await asyncio.get_running_loop().run_in_executor(None, _copy, directory.database, file)
            with told(str(directory.database)):
                blobs = Path(copied.name) / "blobs"
                async with await Database.open(sqlite_url(file), blobs, create=False, migrate=True):
                    pass
        except SQLAlchemyError as error:
            copied.cleanup()
            raise UserError(f"{directory.database} is damaged: it cannot be migrated: {str(error)[:300]}") from None
        except BaseException:
            copied.cleanup()
            raise
        files = cls(directory, place, file, copied)
        files.notes.append(
            f"An older dart wrote it (schema version {version}, this one has {t.SCHEMA_VERSION}), so a migrated copy "
            "is shown; what that version did not record is empty."
        )
        return files

    @property
    def migrated(self) -> bool:
        """A migrated copy is read, because an older dart wrote the database."""
        return self._copied is not None

    @property
    def elsewhere(self) -> bool:
        """The database is not in the directory."""
        return self._server is not None

    def _now(self) -> object:
        if self.migrated:
            return state_of(self.directory)
        return _identity(self.directory, changes=self._mode == AS_IT_IS)

    def outdated(self) -> bool:
        """What is read here is not the run that the directory has now: how it was earlier, or one that was removed.

        Where the database is elsewhere, it is never.
        """
        return not self._server and self._now() != self._then

    async def __aenter__(self) -> RunFiles:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._ending = True
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self._engine.dispose()
        if self._copied:
            self._copied.cleanup()

    def _file_engine(self, file: Path) -> Engine:
        """Not of `create_engine`, which would make a dialect for it, and ask a first connection what SQLite can."""
        connect: Any = partial(self._connect, file)
        pool = QueuePool(connect, pool_size=READERS, max_overflow=0, dialect=_SQLITE.dialect)
        return Engine(pool, _SQLITE.dialect, _SQLITE.url, execution_options={"compiled_cache": _STATEMENTS})

    def _connect(self, file: Path) -> sqlite3.Connection:
        uri = file.absolute().as_uri()
        if all(is_regular(one) or not os.path.lexists(one) for one in self.directory.beside_database):
            try:
                return self._connected(f"{uri}?{self._mode}")
            except sqlite3.OperationalError as error:
                if self._mode != LIVE or is_locked(error):
                    raise
        # SQLite would wait for a FIFO, and follow a link. Or the index of the write-ahead log cannot be made, in a
        # folder that is read-only.
        connection = self._connected(f"{uri}?{AS_IT_IS}")
        self._mode = AS_IT_IS
        self._then = self._now()
        log = self.directory.write_ahead_log
        if os.path.lexists(log) and (not is_regular(log) or log.stat().st_size):
            self.notes.append(
                f"{shown(file.parent)} cannot be written to, or one of SQLite's files in it is no regular file, so "
                f"{log.name} was not read: the newest trajectories are missing; copy the directory to see them."
            )
        return connection

    def _connected(self, uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        try:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
            connection.text_factory = _text
            self._limit(connection)
            connection.execute("PRAGMA query_only=ON")
            connection.execute("PRAGMA trusted_schema=OFF")
            check_schema(connection)
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    async def _schema_version(self) -> int:
        version = await self.read(lambda found: found.execute(select(t.schema.c.version)).scalar_one_or_none())
        if not isinstance(version, int):
            raise UserError(f"{self.database} has schema version {str(version)[:40]!r}: {NOT_DARTS}")
        if version < t.OLDEST_MIGRATED:
            raise UserError(
                f"{self.database} has schema version {version}, and this dart reads {t.OLDEST_MIGRATED} or "
                "later: open it with the dart that wrote it"
            )
        return version

    # ---- reading ----

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one read transaction, on another thread. Raises UserError if the database cannot be read."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transact, work)

    def _transact(self, work: Callable[[Connection], T]) -> T:
        try:
            with told(self.database), self._engine.connect() as connection:
                if self._server:
                    return work(connection)
                self._limit(connection.connection.driver_connection)
                connection.exec_driver_sql("BEGIN")
                try:
                    return work(connection)
                finally:
                    connection.exec_driver_sql("ROLLBACK")
        except (SQLAlchemyError, sqlite3.Error) as error:
            if not self._server:
                self._check_shortage()
            why = getattr(error, "orig", error)
            if getattr(why, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT and not self._ending:
                raise TooSlow(
                    f"{self.database} takes more than {self._seconds:g} s of the processor to read: it is too large, "
                    "or made so that it takes long"
                ) from None
            remedy = NOT_DARTS
            if self._server:
                remedy = "start the server, or check its user's rights"
            elif is_locked(error):
                remedy = "look again, or end the program that keeps it locked"
            raise UserError(f"{self.database} cannot be read ({why}): {remedy}") from None

    def _check_shortage(self) -> None:
        """SQLite does not say why it cannot open a file. Raises OSError if the machine is short of what that needs."""
        try:
            os.close(open_regular(self.directory.path, self.directory.database.name))
        except OSError as error:
            if shortage(error):
                raise

    def _limit(self, connection: Any) -> None:
        """From now on it has its seconds, and ends at once where this is closed."""
        until = time.thread_time() + self._seconds
        connection.set_progress_handler(lambda: self._ending or time.thread_time() > until, STEPS_BETWEEN_LOOKS)

    async def rows(self, statement: Select[Any]) -> Sequence[RowMapping]:
        return await self.read(lambda connection: connection.execute(statement).mappings().all())

    async def record(self) -> RunRecord:
        """The run's row as it is now. Raises UserError if it cannot be read."""
        rows = await self.rows(select(t.runs).where(t.runs.c.id == self.run_id))
        with told(f"{self.database}: the row of run {self.run_id[:200]}"):
            return run_from_row(rows[0])

    async def image(self, sha256: str) -> tuple[bytes, str]:
        """A screenshot's bytes and media type. Raises NotFound."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._image, sha256)

    def _image(self, sha256: str) -> tuple[bytes, str]:
        try:
            data = self._screenshots.read(file_name(bytes.fromhex(sha256)))
        except (ValueError, OSError) as error:
            if shortage(error):
                raise
            raise NotFound(f"screenshot {sha256[:64]} is not in {self.screenshots}: it was removed") from None
        media_type = next((kind for start, kind in MEDIA_TYPES.items() if data.startswith(start)), None)
        if media_type is None or hashlib.sha256(data).hexdigest() != sha256.lower():
            raise NotFound(f"screenshot {sha256[:64]} in {self.screenshots} is damaged")
        return data, media_type

    @property
    def are_local(self) -> bool:
        """Whether screenshots are files here, and not objects of a store."""
        return isinstance(self.screenshots, Path)

    def holds(self, sha256: str) -> bool:
        """Whether the directory has the screenshot's bytes. Blocks for a file call."""
        try:
            return self._screenshots.size(file_name(bytes.fromhex(sha256))) > 0
        except (ValueError, OSError):
            return False


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _check_place(directory: RunDirectory, place: Place) -> None:
    """Raises UserError where the run's files are none that may be opened."""
    if not place.database and not is_regular(directory.database):
        raise UserError(f"{directory.database} is no regular file: name the directory of a run")
    if (place.database or place.blobs) and not directory.is_own:
        raise UserError(
            f"{directory.place_file} is another user's, and names {place.database or place.blobs}, which would be "
            "asked with your keys: copy the directory, if you trust it"
        )


def check_schema(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError for what dart never makes, and what may run for ever."""
    for odd in (
        "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger') OR sql LIKE 'CREATE VIRTUAL%'",
        "SELECT 'computed column', c.name FROM sqlite_master m, pragma_table_xinfo(m.name) c WHERE c.hidden",
    ):
        if found := connection.execute(odd).fetchone():
            raise sqlite3.DatabaseError(f"it has a {found[0]} {str(found[1])[:100]!r}, which no database of dart has")


def _copy(source: Path, target: Path) -> None:
    """The database with its write-ahead log. SQLite's own backup sees whole transactions only."""
    if (size := source.stat().st_size) > MOST_COPIED:
        raise UserError(f"{source} has {size >> 30} GiB, too many for a migrated copy: --resume migrates it in place")
    try:
        connection = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        shutil.copyfile(source, target)
        return
    with sqlite3.connect(target) as into:
        connection.backup(into)
    into.close()
    connection.close()
