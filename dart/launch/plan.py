"""What a run consists of, whatever starts it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dart.config import Config
from dart.config.cluster import Needs
from dart.job import Train

Part = Literal["coordinator", "env", "rollout", "train"]
GOODBYE_SECONDS = 30
"""How long a coordinator may take to end, apart from saving its checkpoint."""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal processes of one role.

    `gpus`: of each process. `environment`: variables of each process; tokens are not among them.
    """

    part: Part
    count: int
    needs: Needs
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    def name(self, number: int) -> str:
        """The name of one of its processes; the same after a restart."""
        return self.part if self.part in ("coordinator", "train") else f"{self.part}-{number}"


def plan(config: Config) -> tuple[Group, ...]:
    """The coordinator first. Groups that the run does not need are left out."""
    cluster, job = config.cluster, Train()
    on_gpus = cluster.device == "gpu"
    rollout, trainer = config.rollout, config.trainer
    return tuple(
        group
        for group in (
            Group("coordinator", 1, cluster.coordinator),
            Group("env", job.environments(config), cluster.env),
            Group(
                "rollout",
                job.replicas(config),
                cluster.rollout,
                rollout.tensor_parallel * rollout.pipeline_parallel if on_gpus else 0,
                rollout.environment,
            ),
            Group("train", trainer.ranks, cluster.train, 1 if on_gpus else 0),
        )
        if group.count
    )


def ending_seconds(config: Config) -> float:
    """How long after SIGTERM the coordinator may take to end: it saves."""
    return max(2.0 * GOODBYE_SECONDS, config.checkpoint.interrupt_seconds + GOODBYE_SECONDS)
