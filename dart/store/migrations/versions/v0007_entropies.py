"""Adds what high-entropy step selection saw of each step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Nothing is known of the steps of older updates."""
    op.create_table(
        "step_entropies",
        sa.Column("trajectory_id", sa.Text(), sa.ForeignKey("trajectories.id"), primary_key=True),
        sa.Column("step_index", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("update", sa.BigInteger(), nullable=False),
        sa.Column("entropy", sa.Double(), nullable=False),
        sa.Column("selected", sa.Boolean(), nullable=False),
        sa.Column("token_entropies", sa.LargeBinary(), nullable=False),
        sqlite_with_rowid=False,
    )
