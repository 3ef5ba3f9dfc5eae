"""How a database is reached: URL, threads, connection settings, schema version."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, insert, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from dart.errors import UserError
from dart.store import tables

T = TypeVar("T")

_DRIVERS = {"sqlite+aiosqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
BUSY_SECONDS = 30
_SQLITE_SETTINGS = (
    f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
)
READERS = 4


def parse_url(url: str) -> URL:
    """The URL, with the driver that is used here. Raises UserError."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError(
            f"database {url!r} is not a URL: write sqlite:///path/to/dart.db or postgresql://user@host/name"
        ) from None
    parsed = parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UserError(f"database {url!r} is in memory only, where a restart finds nothing: name a file")
    return parsed


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def shown(url: URL) -> str:
    """For messages: no password."""
    return url.render_as_string(hide_password=True)


class DatabaseFailed(UserError):
    """It cannot be reached, read or written: a full disk, a server that is away."""


class Lane:
    """An engine and the threads that alone use it. One call is one transaction and one hop to a thread.

    A caller that is cancelled stops waiting, and the transaction ends as it would have: on an asynchronous driver a
    cancelled one was seen to hold SQLite's write lock until the next had waited out its busy timeout.
    """

    def __init__(self, engine: Engine, threads: int, name: str) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, after the commit. What it raises rolls everything back."""
        # Shielded, because one that still waits for its thread would be cancelled with its caller.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, self._transact, work))

    def _transact(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except OperationalError as error:
            raise DatabaseFailed(
                f"the database {shown(self._engine.url)} failed: {error.orig}: mend that (a full disk, a server "
                "that is away), then go on with --resume"
            ) from error

    def close(self) -> None:
        """Waits for the transactions under way."""
        self._threads.shutdown()
        self._engine.dispose()


def make_lanes(url: URL) -> tuple[Lane, Lane]:
    """(writer, reader). The writer's transactions come one after the other and take SQLite's write lock at once."""
    try:
        writer = create_engine(url, pool_size=1, max_overflow=0)
        reader = create_engine(url, pool_size=READERS, max_overflow=0)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f"database {shown(url)}: {error}: install its driver, or use sqlite:///path/to/dart.db"
        ) from None
    if url.get_backend_name() == "sqlite":
        for engine, begin in ((writer, "BEGIN IMMEDIATE"), (reader, "BEGIN")):
            _configure_sqlite(engine, begin)
    return Lane(writer, 1, "database-writer"), Lane(reader, READERS, "database-reader")


def _configure_sqlite(engine: Engine, begin: str) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # else the driver begins transactions itself, and late
        for setting in _SQLITE_SETTINGS:
            connection.execute(setting)
        _write_ahead(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _write_ahead(connection: Any) -> None:
    """Switch the file to WAL. SQLite does not apply its busy timeout to that when two processes do it at once."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.02)
        else:
            return


async def prepare(url: URL, writer: Lane, reader: Lane, create: bool) -> None:
    """Checks the schema version; makes the tables where there are none and `create` says so. Raises UserError."""
    if not create and not _there(url):
        raise UserError(f"database {shown(url)} does not exist: name the run directory of a run that has started")
    try:
        if await reader.run(lambda connection: _stamped(connection, url)):
            return
        if not create:
            raise UserError(f"database {shown(url)} has no tables of dart: name the database of a run that has started")
        await writer.run(lambda connection: _create(connection, url))
    except (DBAPIError, DatabaseFailed) as error:
        cause = error.__cause__ if isinstance(error, DatabaseFailed) else error
        raise UserError(
            f"database {shown(url)} cannot be opened ({getattr(cause, 'orig', cause)}): name a database of dart's in a "
            "writable folder"
        ) from None


def _there(url: URL) -> bool:
    return url.get_backend_name() != "sqlite" or Path(url.database or "").is_file()


def _stamped(connection: Connection, url: URL) -> bool:
    """False for an empty database. Raises UserError for one that this code cannot use."""
    names = set(inspect(connection).get_table_names())
    if tables.schema.name not in names:
        if names & set(tables.metadata.tables):
            raise UserError(f"database {shown(url)} has tables that are not dart's: name another, or an empty one")
        return False
    version = connection.execute(select(tables.schema.c.version)).scalar_one()
    if version == tables.SCHEMA_VERSION:
        return True
    remedy = (
        "a newer dart wrote it; upgrade dart, or start a new run"
        if version > tables.SCHEMA_VERSION
        else "an older dart wrote it; read it with that version, or start a new run"
    )
    raise UserError(
        f"database {shown(url)} has schema version {version}, this dart has {tables.SCHEMA_VERSION}: {remedy}"
    )


def _create(connection: Connection, url: URL) -> None:
    if _stamped(connection, url):
        return  # another process was first; SQLite's write lock put this look after it
    tables.metadata.create_all(connection)
    connection.execute(insert(tables.schema), {"version": tables.SCHEMA_VERSION})
