"""The schema: what a run leaves behind and what a restart needs.

It uses only types that both SQLite and PostgreSQL have; `dart.store.elsewhere.text` makes texts the same in both. Times
are Unix seconds. JSON is kept as text, exactly as written. Token ids are little-endian uint32 and log-probabilities
little-endian float32, packed (`dart.store.records`). Ids of groups and trajectories are unique in a database, or in
PostgreSQL in a run's schema (`dart.store.elsewhere.place`). Any change here requires a higher SCHEMA_VERSION and a step
in `dart.store.migrations`. A plain field of a trajectory or a step that no query asks for needs no column: `more_json`
holds it (`dart.store.records`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    true,
)

from dart.store.elsewhere.text import Text

SCHEMA_VERSION = 7
OLDEST_MIGRATED = 2
"""Databases of this version and later are migrated in place."""


class Bytes(LargeBinary):
    """SQLite takes any type in any column, and SQLAlchemy would make so many zeros of a number."""

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], bytes | None]:
        return _bytes


def _bytes(value: object) -> bytes | None:
    if isinstance(value, memoryview):  # as PostgreSQL's driver may return it
        return bytes(value)
    if not isinstance(value, bytes | None):
        raise ValueError(f"bytes were expected, and not {str(value)[:40]!r}")
    return value


metadata = MetaData()

schema = Table("dart_schema", metadata, Column("version", Integer, primary_key=True, autoincrement=False))

runs = Table(
    "runs",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    # dart.store.records.RunKind
    Column("kind", Text, nullable=False),
    Column("config_json", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("started", Double, nullable=False),
    Column("finished", Double),
    Column("summary_json", Text),
    Column("control_address", Text),
)

tasks = Table(
    "tasks",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("suite", Text, primary_key=True),
    Column("name", Text, primary_key=True),
)

groups = Table(
    "groups",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run_id", Text, nullable=False),
    # dart.store.records.GroupKind: statistics cover training only.
    Column("kind", Text, nullable=False),
    Column("suite", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("planned", Integer, nullable=False),
    # Why this many roll-outs, and why this step limit.
    Column("plan", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("fate", Text, nullable=False),
    Column("opened", Double, nullable=False),
    Column("closed", Double),
    Column("consumed_by_update", BigInteger),
    ForeignKeyConstraint(["run_id", "suite", "task_name"], ["tasks.run_id", "tasks.suite", "tasks.name"]),
    Index("groups_by_state", "run_id", "state"),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("id", Text, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("suite", Text, nullable=False),
    Column("task_name", Text, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("instruction", Text, nullable=False),
    Column("termination", Text, nullable=False),
    Column("reward", Double, nullable=False),
    Column("success", Boolean, nullable=False),
    Column("step_limit", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    # None where nothing was sampled.
    Column("oldest_version", BigInteger),
    Column("newest_version", BigInteger),
    # A JSON list with one number per step; None if none were computed.
    Column("advantages_json", Text),
    Column("fate", Text, nullable=False),
    # The success that this is a copy of, if it replaces a failure; else empty.
    Column("pooled_from", Text, nullable=False),
    # Evidence for the reward: the world's own JSON object; None if it gave none.
    Column("evidence_json", Text),
    # The trajectory's plain fields that have no column, as a JSON object; None if there are none.
    Column("more_json", Text),
    Column("started", Double, nullable=False),
    Column("finished", Double, nullable=False),
    # False if its screenshots were removed to stay within the disk bound.
    Column("screenshots_kept", Boolean, nullable=False, server_default=true()),
    Index("trajectories_by_group", "group_id"),
    Index("trajectories_by_fate", "run_id", "fate"),
    Index("trajectories_by_time", "run_id", "finished", "id"),
    Index("trajectories_by_task", "run_id", "task_name", "finished", "id"),
    Index("trajectories_by_screenshots", "run_id", "screenshots_kept", "finished"),
)

screenshots = Table(
    "screenshots",
    metadata,
    # One row for each screenshot of each trajectory: bytes that no row names can be removed (`dart.store.upkeep`).
    Column("sha256", Bytes, primary_key=True),
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True),
    Index("screenshots_by_trajectory", "trajectory_id"),
    sqlite_with_rowid=False,
)

steps = Table(
    "steps",
    metadata,
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True),
    Column("index", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    # None if the text could not be parsed.
    Column("action_json", Text),
    Column("parse_error", Text, nullable=False),
    Column("truncated", Boolean, nullable=False),
    Column("prompt_token_ids", Bytes, nullable=False),
    Column("token_ids", Bytes, nullable=False),
    Column("logprobs", Bytes, nullable=False),
    # None where nothing was sampled.
    Column("mean_logprob", Double),
    Column("versions_json", Text, nullable=False),
    # As `Step.images`: the instruction's pictures, then screenshots, oldest first; the bytes are in the blob store.
    Column("images_json", Text, nullable=False),
    # As in `trajectories`, for the plain fields of the step and its generation.
    Column("more_json", Text),
)

step_entropies = Table(
    "step_entropies",
    metadata,
    # What high-entropy step selection saw in the last update that had the trajectory; no row where every step trains.
    Column("trajectory_id", ForeignKey("trajectories.id"), primary_key=True),
    Column("step_index", Integer, primary_key=True, autoincrement=False),
    Column("update", BigInteger, nullable=False),
    Column("entropy", Double, nullable=False),
    Column("selected", Boolean, nullable=False),
    # float16, little-endian, one for each token; empty where they were not told.
    Column("token_entropies", Bytes, nullable=False),
    sqlite_with_rowid=False,
)

versions = Table(
    "versions",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("update", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("metrics_json", Text, nullable=False),
)

syncs = Table(
    "syncs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", ForeignKey("runs.id"), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("replica", Text, nullable=False),
    Column("started", Double, nullable=False),
    Column("finished", Double, nullable=False),
    Column("pause_seconds", Double, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Index("syncs_by_version", "run_id", "version"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("path", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("success_rate", Double),
    Column("kept", Boolean, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("unix_seconds", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("json", Text, nullable=False),
)
