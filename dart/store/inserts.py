"""Rows of one table, inserted by one statement where a driver's `executemany` would take one for each row.

The event loop's thread is busy, and sqlite3 gives the GIL away at every row: a thread that writes a trajectory of 30
steps had to win it back 60 times, and orders that waited behind it left environments idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from sqlalchemy import BindParameter, Connection, Dialect, Table, bindparam, insert

from dart.store.elsewhere.text import escaped

_MOST_VALUES = 900
"""Values in a statement. SQLite before 3.32 takes 999, others tens of thousands."""


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert the rows, which all have the same columns, of types that the driver takes as they are.

    SQLAlchemy's own `values([...])` compiles the statement anew each time, which costs more than it saves.
    """
    if not rows:
        return
    columns = tuple(column.name for column in table.columns if column.name in rows[0])  # the statement's own order
    at_once = max(1, _MOST_VALUES // len(columns))
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        statement, names = _statement(connection.dialect, table, columns, len(some))
        values = tuple(row[column] for row in some for column in columns)
        if connection.dialect.positional:
            connection.exec_driver_sql(statement, values)
        else:  # PostgreSQL
            connection.exec_driver_sql(statement, dict(zip(names, map(escaped, values), strict=True)))


@lru_cache(maxsize=256)
def _statement(dialect: Dialect, table: Table, columns: tuple[str, ...], rows: int) -> tuple[str, tuple[str, ...]]:
    """The dialect's statement for so many rows, and its parameters' names: those of the first row first."""
    names = tuple(f"{column}_{row}" for row in range(rows) for column in columns)
    named = iter(names)
    values: list[dict[str, BindParameter[object]]] = [
        {column: bindparam(next(named)) for column in columns} for _ in range(rows)
    ]
    return str(insert(table).values(values).compile(dialect=dialect)), names
