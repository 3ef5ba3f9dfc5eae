"""How a database is reached: URL, connection settings, schema version. Nothing here knows a table but the version's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, event, insert, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from dart.errors import UserError
from dart.store import tables

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
_SQLITE_SETTINGS = (
    "PRAGMA busy_timeout=30000",
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
)
READERS = 4


def parse_url(url: str) -> URL:
    """The URL with its asynchronous driver. Raises UserError."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise UserError(
            f"database {url!r} is not a URL: write sqlite:///path/to/dart.db or postgresql://user@host/name"
        ) from None
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise UserError(f"database {url!r} is in memory only, where a restart finds nothing: name a file")
    return parsed.set(drivername=_DRIVERS.get(parsed.drivername, parsed.drivername))


def sqlite_url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


def shown(url: URL) -> str:
    """For messages: no password."""
    return url.render_as_string(hide_password=True)


def make_engines(url: URL) -> tuple[AsyncEngine, AsyncEngine]:
    """(writer, reader). The writer has one connection, and its transactions take SQLite's write lock at their start."""
    try:
        writer = create_async_engine(url, pool_size=1, max_overflow=0, pool_reset_on_return=None)
        reader = create_async_engine(url, pool_size=READERS, max_overflow=0)
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f"database {shown(url)}: {error}: install its driver, or use sqlite:///path/to/dart.db"
        ) from None
    if url.get_backend_name() == "sqlite":
        for engine, begin in ((writer, "BEGIN IMMEDIATE"), (reader, "BEGIN")):
            _configure_sqlite(engine, begin)
    return writer, reader


def _configure_sqlite(engine: AsyncEngine, begin: str) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # else the driver begins transactions itself, and late
        cursor = connection.cursor()
        for setting in _SQLITE_SETTINGS:
            cursor.execute(setting)
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


async def prepare(url: URL, writer: AsyncEngine, reader: AsyncEngine, create: bool) -> None:
    """Checks the schema version; makes the tables where there are none and `create` says so. Raises UserError."""
    if not create and not _there(url):
        raise UserError(f"database {shown(url)} does not exist: name the run directory of a run that has started")
    try:
        async with reader.connect() as connection:
            if await connection.run_sync(_stamped, url):
                return
        if not create:
            raise UserError(f"database {shown(url)} has no tables of dart: name the database of a run that has started")
        async with writer.begin() as connection:
            await connection.run_sync(_create, url)
    except DBAPIError as error:
        raise UserError(
            f"database {shown(url)} cannot be opened ({error.orig}): name a database of dart's in a writable folder"
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
