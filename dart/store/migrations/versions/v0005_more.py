"""Adds a place for fields of trajectories and steps that have no column of their own."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """All older trajectories and steps have no such fields."""
    op.add_column("trajectories", sa.Column("more_json", sa.Text()))
    op.add_column("steps", sa.Column("more_json", sa.Text()))
