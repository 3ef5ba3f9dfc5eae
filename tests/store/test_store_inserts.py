"""Many rows in one statement: every row arrives, in its own columns, however many there are."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine, event, select
from sqlalchemy.dialects.postgresql import psycopg

from dart.store import tables as t
from dart.store.inserts import _statement, insert_rows


@pytest.mark.parametrize("count", [0, 1, 30, 449, 450, 451, 1_000])
def test_every_row_arrives_in_statements_of_at_most_900_values(count: int) -> None:
    engine, seen = create_engine("sqlite://"), []
    event.listen(engine, "before_cursor_execute", lambda *given: seen.append((given[2], given[3])))
    # Not in the table's order, which is that of the statement.
    rows = [{"trajectory_id": f"t{n}", "sha256": n.to_bytes(32)} for n in range(count)]
    with engine.begin() as connection:
        t.metadata.create_all(connection, [t.screenshots])
        seen.clear()
        insert_rows(connection, t.screenshots, rows)
        assert [len(values) for _, values in seen] == [900] * (count // 450) + [2 * (count % 450)] * (count % 450 > 0)
        found = connection.execute(select(t.screenshots.c.trajectory_id, t.screenshots.c.sha256)).all()
    assert sorted(found) == sorted((row["trajectory_id"], row["sha256"]) for row in rows)


def test_a_driver_with_named_parameters_gets_the_rows_in_the_same_order() -> None:
    statement, names = _statement(psycopg.dialect(), t.screenshots, ("sha256", "trajectory_id"), 2)
    assert names == ("sha256_0", "trajectory_id_0", "sha256_1", "trajectory_id_1")
    assert [statement.index(f"%({name})s") for name in names] == sorted(statement.index(f"%({n})s") for n in names)
