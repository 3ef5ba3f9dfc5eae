"""Where a run keeps its database and its screenshots, as a small file in its directory says.

Without the file, both are in the directory. With it, a PostgreSQL database has the run in a schema of its own, and an
object store has its screenshots in a folder of their own, both named for the run and a few random digits. So the same
tables and statements serve both databases, the ids of two runs never meet, a newer dart migrates one run and leaves
the others alone, and a run is removed with one statement. No password is ever in the file.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import URL, func, select
from sqlalchemy.exc import DatabaseError

from dart.config import Run
from dart.errors import UserError
from dart.shortage import shortage
from dart.store.elsewhere.remote import RemoteFiles
from dart.store.engine import in_schema, parse_url, server_engine, shown
from dart.store.regular import read_regular

_MOST_BYTES = 64 << 10
_LONGEST_NAME = 40
"""Characters of the run's name in the name of its schema, which PostgreSQL silently cuts at 63 bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """None: in the run directory. `database`: postgresql://user@host/name, or env:NAME. `key`: the schema, and the
    run's folder in object stores; empty where neither is used."""

    database: str | None = None
    blobs: str | None = None
    key: str = ""

    @classmethod
    def read(cls, file: Path) -> Place:
        """As the file says; in the directory where there is none. Raises UserError for a damaged one."""
        try:
            told = json.loads(read_regular(file.parent, file.name, _MOST_BYTES))
            if not isinstance(told, dict):
                raise TypeError("it is no object")
            if wrong := [name for name, value in told.items() if not isinstance(value, str | None)]:
                raise TypeError(f"{wrong[0]} is {told[wrong[0]]!r}, and no text")
            return cls(**told)
        except (FileNotFoundError, NotADirectoryError):
            return cls()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            if shortage(error):
                raise
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{file} is damaged ({why}): restore it from a copy") from None

    @classmethod
    def of(cls, run: str, database: str | None, blobs: str | None) -> Place:
        """A new run's."""
        plain = re.sub("[^a-z0-9]+", "_", run.lower()).strip("_")[:_LONGEST_NAME]
        return cls(database, blobs, f"dart_{plain}_{secrets.token_hex(4)}")

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        new.replace(file)

    def url(self) -> URL | None:
        """The database's, with the schema; None: run.db. It may hold a password. Raises UserError."""
        return None if self.database is None else in_schema(server_url(self.database), self.key)

    def shown(self, file: Path) -> str:
        """The database, which is `file` if it is not elsewhere, for messages."""
        return f"{self.database}, schema {self.key}" if self.database else str(file)

    def folder(self) -> str | None:
        """The run's own folder in the object store; None: in the run directory."""
        return None if self.blobs is None else f"{self.blobs.rstrip('/')}/{self.key}"


def server_url(database: str) -> URL:
    """What run.database names. Raises UserError where that is no PostgreSQL database."""
    name = database.removeprefix("env:")
    given = os.environ.get(name, "") if name != database else database
    if not given:
        raise UserError(f"run.database is {database}, and {name} is not set: export it, with the database's URL")
    try:
        url = parse_url(given)
    except UserError:
        # The message would show the URL, with its password.
        raise UserError(f"run.database ({database}) is not a URL: write postgresql://user@host/name") from None
    if url.get_backend_name() != "postgresql":
        raise UserError(
            f"run.database ({database}) names {url.get_backend_name()}, not PostgreSQL: write "
            "postgresql://user@host/name, or leave it out for run.db"
        )
    return url


def check(run: Run, upload: str | None = None) -> None:
    """Raises UserError, before anything starts, where the database or the object store cannot be used."""
    if run.database is not None:
        url = server_url(run.database)
        engine = server_engine(url, 1)
        may = func.has_database_privilege(func.current_database(), "CREATE")
        try:
            with engine.connect() as connection:
                allowed = connection.execute(select(may)).scalar_one()
        except DatabaseError as error:
            raise UserError(
                f"run.database: {shown(url)} cannot be used ({error.orig}): start the server, or correct the URL, "
                "PGPASSWORD or ~/.pgpass"
            ) from None
        finally:
            engine.dispose()
        if not allowed:
            raise UserError(
                f"run.database: the user of {shown(url)} may not create a schema there: GRANT CREATE ON DATABASE "
                f"{url.database} TO {url.username}"
            )
    for field, store in (("run.blobs", run.blobs), ("checkpoint.upload", upload)):
        if store is not None:
            RemoteFiles(store).check(field)
