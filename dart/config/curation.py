"""What is sampled, for how long, and what is trained on (arXiv 2509.23866, adaptive data curation)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from dart.config.base import Fraction, Positive, Section


class DynamicRollouts(Section):
    enabled: bool = Field(True, description="false: every group has curation.rollouts.")
    minimum: int = Field(2, ge=2, description="N for a task that always succeeds.")
    threshold: Fraction = Field(0.6, description="Up to this success rate, N is curation.rollouts; above it, N falls.")
    window: Positive = Field(16, description="Recent roll-outs over which a task's success rate is taken.")


class DynamicLength(Section):
    enabled: bool = Field(True, description="false: the limit is always curation.step_limit, or the task's own.")
    margin: int = Field(2, ge=0, description="Steps allowed beyond those of the longest success.")
    floor: Positive = Field(5, description="The limit never falls below this.")
    window: Positive | None = Field(None, description="Recent successes to consider; none: all of them.")


class Pool(Section):
    enabled: bool = Field(True, description="false: a group in which all roll-outs fail is dropped.")
    per_task: Positive = Field(8, description="Newest successes to keep per task name.")
    max_age: Positive | None = Field(
        None, description="Updates after which a success is removed from the pool; none: never."
    )
    sources: tuple[Path, ...] = Field((), description="Folders that `dart collect` made; read when the run starts.")


class Curation(Section):
    rollouts: int = Field(8, ge=2, description="N: the most roll-outs per group; a single one would have no advantage.")
    step_limit: Positive = Field(30, description="The cap on a trajectory's steps.")
    dynamic_rollouts: DynamicRollouts = Field(default_factory=DynamicRollouts)
    dynamic_length: DynamicLength = Field(default_factory=DynamicLength)
    pool: Pool = Field(default_factory=Pool)
    task_preference: Fraction = Field(
        0.75,
        description="0: all tasks equally often; 1: in proportion to how likely a task's roll-outs are to differ "
        "(docs/curation.md).",
    )
    success_threshold: Fraction = Field(1.0, description="A reward of at least this is a success.")
    max_staleness: int = Field(
        4,
        ge=0,
        description="The most weight versions that a token may be behind the trainer; a group with an older one is "
        "dropped.",
    )
