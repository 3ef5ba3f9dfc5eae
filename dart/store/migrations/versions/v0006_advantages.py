"""Stores one advantage for each step of a trajectory, instead of one for all of its steps."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_ROWS_AT_ONCE = 10_000


def upgrade() -> None:
    """Every step has had its trajectory's advantage."""
    op.add_column("trajectories", sa.Column("advantages_json", sa.Text()))
    connection = op.get_bind()
    rows = connection.execute(
        sa.text("SELECT id, advantage, steps FROM trajectories WHERE advantage IS NOT NULL")
    ).fetchall()
    values = [{"id": name, "value": json.dumps([advantage] * steps)} for name, advantage, steps in rows]
    change = sa.text("UPDATE trajectories SET advantages_json = :value WHERE id = :id")
    for first in range(0, len(values), _ROWS_AT_ONCE):
        connection.execute(change, values[first : first + _ROWS_AT_ONCE])
    op.drop_column("trajectories", "advantage")
