"""Access to a database: URL, threads, connection settings, and waiting for one that is locked."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError

from dart.errors import UserError
from dart.shortage import of_database, ready_threads
from dart.store.patience import Patience

T = TypeVar("T")

_DRIVERS = {"sqlite+aiosqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
_SEARCH_PATH = "-csearch_path="
_ANSWERS = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,  # milliseconds
}
"""When a PostgreSQL server counts as away: by the system's own settings that takes a quarter of an hour, or two hours.
What the URL says goes before it."""
_AWAY_SECONDS = 1.0
"""Between two tries to reach a PostgreSQL server that was reached before, and while the machine is short of
something."""
_UNEXPLAINED_SECONDS = 10.0
"""How long SQLite may fail to open or write its file where nothing is missing: a disk that fails is not waited for."""
BUSY_SECONDS = 5
"""How long SQLite itself waits for a lock; after that the wait is reported, and the transaction is tried again."""
_WRITE_AHEAD_SECONDS = 30.0
_KEPT_WAL_BYTES = 64 << 20
_SQLITE_SETTINGS = (
    f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}",
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
    f"PRAGMA journal_size_limit={_KEPT_WAL_BYTES}",
)
_READER_SETTINGS = (*_SQLITE_SETTINGS, "PRAGMA cache_size=-256")
"""A reader keeps 256 KB of pages, because the kernel holds the file anyway: the default of 2 MB would be added whenever
a further reader is needed for the first time, hours after the start."""
READERS = 4


def parse_url(url: str | URL) -> URL:
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


def in_schema(url: URL, schema: str) -> URL:
    """The PostgreSQL database's schema of that name, as a URL that psql takes, too."""
    return url.update_query_dict({"options": f"{_SEARCH_PATH}{schema}"})


def schema_of(url: URL) -> str | None:
    """What `in_schema` was given; None: the database's own default."""
    options = url.query.get("options")
    return options.removeprefix(_SEARCH_PATH) if isinstance(options, str) and _SEARCH_PATH in options else None


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def shown(url: URL) -> str:
    """The URL without its password, for messages."""
    return url.render_as_string(hide_password=True)


class DatabaseFailed(UserError):
    """The database cannot be reached, read or written: a full disk, or an unreachable server."""


class Lane:
    """An engine and its own threads, which alone use it. One call is one transaction and one hop to a thread.

    A cancelled caller stops waiting, but its transaction still completes: with an asynchronous driver, a cancelled
    transaction held SQLite's write lock until the next one had waited out its busy timeout.
    """

    def __init__(self, engine: Engine, threads: int, name: str, patience: Patience) -> None:
        self._engine, self._patience = engine, patience
        self._threads = ready_threads(threads, name)
        self._reached = False
        """A transaction has succeeded, so a server that is away comes back, and the URL is not a mistake."""

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Returns what `work` returns, after the commit. An exception rolls everything back."""
        # Shielded, because a transaction that still waits for its thread would be cancelled with its caller.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, self._transact, work))

    def _transact(self, work: Callable[[Connection], T]) -> T:
        began, patience, told = time.monotonic(), self._patience, False
        while True:
            ends = False
            try:
                with self._engine.connect() as connection, connection.begin() as transaction:
                    result = work(connection)
                    ends = True  # if the connection is lost from here on, nobody knows whether it was committed
                    transaction.commit()
            except DatabaseError as error:
                if not isinstance(error, OperationalError) and type(error) is not DatabaseError:
                    raise  # a mistake of ours, such as a broken constraint
                waited, away, short = time.monotonic() - began, self._is_away(error) and not ends, self._short(error)
                most = patience.seconds if short != "" else min(patience.seconds, _UNEXPLAINED_SECONDS)
                if not (is_locked(error) or away or short is not None) or waited >= most:
                    patience.end()
                    raise self._failed(error, short) from error
                told = True
                patience.tell(waited, over=False, short=short or "")
                if not is_locked(error):
                    time.sleep(_AWAY_SECONDS)
            else:
                self._reached = True
                if told:
                    patience.tell(time.monotonic() - began, over=True)
                return result

    def _is_away(self, error: DatabaseError) -> bool:
        """A PostgreSQL server that worked before has ended the connection, or takes none."""
        state = getattr(error.orig, "sqlstate", None)
        lost = error.connection_invalidated or state is None or state[:2] in ("08", "57")
        return self._reached and self._engine.dialect.name == "postgresql" and lost

    def _short(self, error: DatabaseError) -> str | None:
        """What the machine is short of, as `of_database` has it, of a SQLite file that was opened before."""
        sqlite = self._reached and self._engine.dialect.name == "sqlite"
        return of_database(error.orig, Path(self._engine.url.database or "")) if sqlite else None

    def _failed(self, error: DatabaseError, short: str | None = None) -> DatabaseFailed:
        cause = "a program that has locked it" if is_locked(error) else "a full disk, a server that is away"
        cause = short or cause
        return DatabaseFailed(
            f"the database {shown(self._engine.url)} failed: {error.orig}: fix that ({cause}), then continue with "
            "--resume"
        )

    async def fold_wal(self) -> bool:
        """Move SQLite's write-ahead log into the database and empty it. Returns False if a reader prevents it.

        SQLite moves it by itself, but restarts the log only at a moment when nobody reads.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._fold_wal)

    def _fold_wal(self) -> bool:
        if self._engine.dialect.name != "sqlite":
            return True
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout=100")  # current readers may continue
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            row = cursor.fetchone()
            cursor.execute(_SQLITE_SETTINGS[0])
            return row is not None and not row[0]
        except sqlite3.OperationalError:
            return False  # locked: it is tried again later
        finally:
            connection.close()

    def close(self) -> None:
        """Waits for the transactions under way."""
        self._threads.shutdown()
        self._engine.dispose()


def is_locked(error: Exception) -> bool:
    """True if another process holds SQLite's lock: BUSY or LOCKED, with any extended code."""
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def make_lanes(url: URL, patience: Patience) -> tuple[Lane, Lane]:
    """(writer, reader). The writer's transactions run one after another and take SQLite's write lock when they
    begin."""
    if url.get_backend_name() == "sqlite":
        writer = create_engine(url, pool_size=1, max_overflow=0)
        reader = create_engine(url, pool_size=READERS, max_overflow=0)
        _configure_sqlite(writer, "BEGIN IMMEDIATE", _SQLITE_SETTINGS)
        _configure_sqlite(reader, "BEGIN", _READER_SETTINGS)
    else:
        writer, reader = server_engine(url, 1), server_engine(url, READERS, read_only=True)
    return Lane(writer, 1, "database-writer", patience), Lane(reader, READERS, "database-reader", patience)


def server_engine(url: URL, connections: int, *, read_only: bool = False) -> Engine:
    """For PostgreSQL. With `read_only`, every transaction sees one state, as with SQLite, and cannot write.

    Raises UserError where there is no driver.
    """
    settings = {"isolation_level": "REPEATABLE READ", "execution_options": {"postgresql_readonly": True}}
    try:
        connect_args = {name: value for name, value in _ANSWERS.items() if name not in url.query}
        return create_engine(
            url, pool_size=connections, max_overflow=0, connect_args=connect_args, **(settings if read_only else {})
        )
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            f"database {shown(url)}: {error}: install its driver (the extra postgres), or leave run.database out, for "
            "run.db"
        ) from None


def _configure_sqlite(engine: Engine, begin: str, settings: Sequence[str]) -> None:
    @event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # else the driver begins transactions itself, and late
        for setting in settings:
            connection.execute(setting)
        _write_ahead(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL. SQLite's busy timeout does not apply when two processes do this at once."""
    give_up = time.monotonic() + _WRITE_AHEAD_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.02)
        else:
            return
