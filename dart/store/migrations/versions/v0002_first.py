"""The schema with which migrations began; older ones are not migrated."""

from __future__ import annotations

revision = "0002"
down_revision = None


def upgrade() -> None:
    """Nothing to do: databases of this version were created complete."""
