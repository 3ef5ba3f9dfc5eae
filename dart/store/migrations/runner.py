"""Runs the steps that a database lacks, within a transaction that the caller has begun."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, update

from dart.store import tables

_ALONE = threading.Lock()
"""Alembic keeps what it works on in module-level variables: one migration at a time in a process."""


def revision(version: int) -> str:
    """Alembic's name of a schema version."""
    return f"{version:04d}"


def migrate(connection: Connection, version: int) -> None:
    """Upgrade a database from `version` to this one. If a step fails, the caller rolls back, so nothing is changed."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    with _ALONE:
        if MigrationContext.configure(connection).get_current_revision() is None:
            command.stamp(config, revision(version))  # made before there were migrations, or by `create_all`
        command.upgrade(config, revision(tables.SCHEMA_VERSION))
    connection.execute(update(tables.schema).values(version=tables.SCHEMA_VERSION))
