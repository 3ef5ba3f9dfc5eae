"""What became of a trajectory, in the words that a run stores, counts and shows: its fate.

One of an evaluation, or of a collection, has the name of that instead (`dart.store.records.GroupState`).
"""

from __future__ import annotations

PENDING = "pending"
"""It is undecided."""
TRAINED = "trained"
DROPPED = "dropped"
"""How the fates of those that will not be trained on begin."""


def dropped(cause: str) -> str:
    """The fate of one that will not be trained on, for example "dropped: all succeeded"."""
    return f"{DROPPED}: {cause}"


def cause_of(fate: str) -> str | None:
    """Why it was dropped; None if it was not."""
    start = dropped("")
    return fate.removeprefix(start) if fate.startswith(start) else None
