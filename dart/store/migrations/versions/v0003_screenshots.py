"""Which trajectories refer to which screenshots, so that those that nothing refers to can be found and removed."""

from __future__ import annotations

import json
from itertools import groupby

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_STEPS_AT_ONCE = 10_000


def upgrade() -> None:
    """Add a row for each screenshot of each stored trajectory, and whether they are still kept (all are)."""
    op.add_column("trajectories", sa.Column("screenshots_kept", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.create_index("trajectories_by_screenshots", "trajectories", ["run_id", "screenshots_kept", "finished"])
    screenshots = op.create_table(
        "screenshots",
        sa.Column("sha256", sa.LargeBinary(), primary_key=True),
        sa.Column("trajectory_id", sa.Text(), sa.ForeignKey("trajectories.id"), primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_index("screenshots_by_trajectory", "screenshots", ["trajectory_id"])
    connection = op.get_bind()
    steps = connection.execute(
        sa.text("SELECT trajectory_id, images_json FROM steps ORDER BY trajectory_id"),
        execution_options={"yield_per": _STEPS_AT_ONCE},
    )
    for trajectory, rows in groupby(steps, key=lambda row: row[0]):
        digests = {image[0] for row in rows for image in json.loads(row[1])}
        if digests:
            references = [{"sha256": bytes.fromhex(one), "trajectory_id": trajectory} for one in sorted(digests)]
            connection.execute(screenshots.insert(), references)
