"""What is sampled, for how long, and what is trained on (arXiv 2509.23866, adaptive data curation)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from dart.config.base import Fraction, Positive, Section


class DynamicRollouts(Section):
    enabled: bool = True
    minimum: int = Field(2, ge=2, description="N of a task that always succeeds.")
    threshold: Fraction = Field(0.6, description="Up to this success rate N is curation.rollouts; above, it falls.")
    window: Positive = Field(16, description="Roll-outs of the task that its success rate is taken over.")


class DynamicLength(Section):
    enabled: bool = True
    margin: int = Field(2, ge=0, description="Steps allowed beyond the longest success.")
    floor: Positive = Field(5, description="The limit never falls below this.")
    window: Positive | None = Field(None, description="Successes that count; none: all of them.")


class Pool(Section):
    enabled: bool = True
    per_task: Positive = Field(8, description="Successes kept per task name, the newest.")
    max_age: Positive | None = Field(None, description="Updates after which a success leaves the pool; none: never.")
    sources: tuple[Path, ...] = Field((), description="Folders that `dart collect` made; read when the run starts.")


class Curation(Section):
    rollouts: int = Field(8, ge=2, description="N: trajectories per group, at most. One alone has no advantage.")
    step_limit: Positive = Field(30, description="The cap on a trajectory's steps.")
    dynamic_rollouts: DynamicRollouts = Field(default_factory=DynamicRollouts)
    dynamic_length: DynamicLength = Field(default_factory=DynamicLength)
    pool: Pool = Field(default_factory=Pool)
    task_preference: Fraction = Field(
        0.75, description="0: all tasks equally often; 1: only those whose roll-outs differ from each other."
    )
    success_threshold: Fraction = Field(1.0, description="A reward of at least this is a success.")
    max_staleness: int = Field(
        4, ge=0, description="Trainer version minus a sample's oldest token's; older is dropped."
    )
