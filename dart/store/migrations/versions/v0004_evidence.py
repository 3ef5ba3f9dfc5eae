"""What each trajectory's verdict rests on, as its world said it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Worlds that said nothing, and those before this column, have none."""
    op.add_column("trajectories", sa.Column("evidence_json", sa.Text()))
