"""Adds the evidence for each trajectory's verdict, as its world wrote it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Trajectories without evidence from their world, and all older ones, have none."""
    op.add_column("trajectories", sa.Column("evidence_json", sa.Text()))
