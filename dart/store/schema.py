"""The schema of a database: created if there is none, migrated if it is older, refused if it is newer."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, Connection, func, insert, inspect, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from dart.errors import UserError
from dart.store import tables
from dart.store.engine import DatabaseFailed, Lane, schema_of, shown


class OlderSchema(UserError):
    """The database has to be migrated before it can be used, and the caller has not asked for that."""


async def prepare(url: URL, writer: Lane, reader: Lane, *, create: bool, migrate: bool) -> None:
    """Checks the schema; with `create` it makes missing tables, with `migrate` it upgrades an older schema.

    Raises UserError, and OlderSchema where `migrate` would have helped.
    """
    if not create and not _there(url):
        raise UserError(f"database {shown(url)} does not exist: name the run directory of a run that has started")
    try:
        version = await reader.run(lambda connection: _version(connection, url))
        if version is None:
            if not create:
                raise UserError(
                    f"database {shown(url)} has no tables of dart: name the database of a run that has started"
                )
            await writer.run(lambda connection: _create(connection, url))
        elif version < tables.SCHEMA_VERSION:
            if not migrate:
                raise OlderSchema(f"database {shown(url)} has schema version {version}: {_REMEDY}")
            await writer.run(lambda connection: _migrate(connection, url))
    except (DBAPIError, DatabaseFailed) as error:
        cause = error.__cause__ if isinstance(error, DatabaseFailed) else error
        full = "disk is full" in str(getattr(cause, "orig", cause))
        remedy = "make room on its disk" if full else "name a database of dart's in a writable folder"
        if url.get_backend_name() == "postgresql":
            remedy = "start the server, or correct the URL, PGPASSWORD, ~/.pgpass or the rights of its user"
        raise UserError(f"database {shown(url)} cannot be opened ({getattr(cause, 'orig', cause)}): {remedy}") from None


_REMEDY = f"an older dart wrote it, and this one has {tables.SCHEMA_VERSION}; open it for writing, which migrates it"


def _there(url: URL) -> bool:
    return url.get_backend_name() != "sqlite" or Path(url.database or "").is_file()


def _version(connection: Connection, url: URL) -> int | None:
    """The schema version; None for an empty database. Raises UserError if this code can neither use nor migrate it."""
    names = set(inspect(connection).get_table_names())
    if tables.schema.name not in names:
        if names & set(tables.metadata.tables):
            raise UserError(f"database {shown(url)} has tables that are not dart's: name another, or an empty one")
        return None
    version: int = connection.execute(select(tables.schema.c.version)).scalar_one()
    if tables.OLDEST_MIGRATED <= version <= tables.SCHEMA_VERSION:
        return version
    remedy = (
        "a newer dart wrote it; upgrade dart, or start a new run"
        if version > tables.SCHEMA_VERSION
        else f"a dart that is too old to migrate from wrote it (it takes {tables.OLDEST_MIGRATED} or later); read it "
        "with that version, or start a new run"
    )
    raise UserError(
        f"database {shown(url)} has schema version {version}, this dart has {tables.SCHEMA_VERSION}: {remedy}"
    )


# Another process may have done either first: SQLite's write lock, or PostgreSQL's lock here, makes these checks come
# after it.


def _alone(connection: Connection, url: URL) -> None:
    if url.get_backend_name() == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(f"dart {schema_of(url)}"))))


def _create(connection: Connection, url: URL) -> None:
    _alone(connection, url)
    if schema := schema_of(url):
        connection.execute(CreateSchema(schema, if_not_exists=True))
    if _version(connection, url) is None:
        tables.metadata.create_all(connection)
        connection.execute(insert(tables.schema), {"version": tables.SCHEMA_VERSION})


def _migrate(connection: Connection, url: URL) -> None:
    from dart.store.migrations.runner import migrate  # Alembic is loaded only if there is something to migrate

    _alone(connection, url)
    version = _version(connection, url)
    if version is not None and version < tables.SCHEMA_VERSION:
        migrate(connection, version)
