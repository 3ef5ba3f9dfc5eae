"""The whole config, and the checks across its sections."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from dart.config.base import Section
from dart.config.cluster import Cluster
from dart.config.curation import Curation
from dart.config.environment import Environment
from dart.config.policy import Agent, Model, Rollout
from dart.config.run import Checkpoint, Dashboard, Evaluation, Retention, Run, Server, Stop, Tracking, Watchdog
from dart.config.trainer import Schedule, Supervised, Sync, Trainer


class Config(Section):
    """The config of a run."""

    algorithm: Literal["grpo", "sft"] = Field(
        "grpo", description="`sft` imitates demonstrations: no sampling, and trainer.loss is the likelihood alone."
    )
    run: Run = Field(default_factory=Run)
    model: Model
    agent: Agent = Field(default_factory=Agent)
    environment: Environment
    rollout: Rollout = Field(default_factory=Rollout)
    curation: Curation = Field(default_factory=Curation)
    trainer: Trainer = Field(default_factory=Trainer)
    schedule: Schedule = Field(default_factory=Schedule)
    sync: Sync = Field(default_factory=Sync)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    retention: Retention = Field(default_factory=Retention)
    sft: Supervised = Field(default_factory=Supervised)
    stop: Stop
    server: Server = Field(default_factory=Server)
    watchdog: Watchdog = Field(default_factory=Watchdog)
    dashboard: Dashboard = Field(default_factory=Dashboard)
    tracking: Tracking = Field(default_factory=Tracking)
    cluster: Cluster = Field(default_factory=Cluster)

    def as_json(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The config, with its defaults, as JSON has it. `without`: sections that are left out."""
        return self.model_dump(mode="json", exclude=set(without))

    def as_yaml(self, *, without: Collection[str] = ()) -> str:
        """The text of a config file, with every default."""
        return yaml.safe_dump(self.as_json(without=without), sort_keys=False)

    @property
    def samples(self) -> bool:
        """True if the run needs environments and replicas."""
        return self.algorithm != "sft" or self.evaluation.episodes > 0

    @property
    def effective_trainer(self) -> Trainer:
        """`trainer` as its ranks get it: imitation has the likelihood as its loss, whatever `trainer.loss` says."""
        if self.algorithm != "sft":
            return self.trainer
        alone = {"kind": "likelihood", "importance": "none", "kl_coefficient": 0.0, "entropy_quantile": 0.0,
                 "entropy_coefficient": 0.0}  # fmt: skip
        return self.trainer.model_copy(update={"loss": self.trainer.loss.model_copy(update=alone)})

    def step_limit(self, task: str) -> int:
        """The most steps of a trajectory of the task with this name."""
        limit = self.environment.tasks.step_limits.get(task, self.curation.step_limit)
        return min(self.curation.step_limit, limit)

    @model_validator(mode="after")
    def _together(self) -> Config:
        if self.algorithm == "sft" and not self.sft.sources:
            raise ValueError("algorithm sft needs sft.sources: name folders that `dart collect` made")
        if self.algorithm != "sft" and self.sft.sources:
            raise ValueError(
                "sft.sources is set but algorithm is grpo: set algorithm: sft, or name the folders in "
                "curation.pool.sources"
            )
        if self.algorithm == "sft" and self.stop.updates is None and self.stop.train_seconds is None:
            raise ValueError("algorithm sft has no success rate to stop at: set stop.updates or stop.train_seconds")
        if self.algorithm == "sft" and self.schedule.training == "synchronous":
            raise ValueError(
                "schedule.training is synchronous but algorithm sft samples nothing that updates could wait for: "
                "leave it out"
            )
        if self.curation.dynamic_rollouts.enabled and self.curation.dynamic_rollouts.minimum > self.curation.rollouts:
            raise ValueError(
                f"curation.dynamic_rollouts.minimum is {self.curation.dynamic_rollouts.minimum}, more than "
                f"curation.rollouts ({self.curation.rollouts}): lower it or set dynamic_rollouts.enabled: false"
            )
        if self.curation.dynamic_rollouts.enabled and self.curation.dynamic_rollouts.window < self.curation.rollouts:
            raise ValueError(
                f"curation.dynamic_rollouts.window is {self.curation.dynamic_rollouts.window}, less than "
                f"curation.rollouts ({self.curation.rollouts}), so no success rate would ever be known: raise it"
            )
        if self.trainer.advantage.overlong_buffer > self.rollout.max_tokens:
            raise ValueError(
                f"trainer.advantage.overlong_buffer is {self.trainer.advantage.overlong_buffer}, more than "
                f"rollout.max_tokens ({self.rollout.max_tokens}): lower it"
            )
        if self.rollout.max_tokens >= self.rollout.max_model_len:
            raise ValueError(
                f"rollout.max_tokens is {self.rollout.max_tokens}, and prompt and answer together have at most "
                f"rollout.max_model_len ({self.rollout.max_model_len}) tokens, so that no prompt would fit: lower "
                "max_tokens, or raise max_model_len"
            )
        if (age := self.sync.every_updates - 1) > self.curation.max_staleness:
            raise ValueError(
                f"sync.every_updates is {self.sync.every_updates}, so samples would be up to {age} versions old when "
                f"they begin, and curation.max_staleness is {self.curation.max_staleness}: raise it, or lower "
                "sync.every_updates"
            )
        if self.sync.max_unavailable > self.rollout.replicas:
            raise ValueError(
                f"sync.max_unavailable is {self.sync.max_unavailable} "
                f"but there are only {self.rollout.replicas} replicas"
            )
        if self.samples and self.trainer.serves_adapter and self.sync.transport != "gloo":
            raise ValueError(
                f"sync.transport is {self.sync.transport}, and an adapter goes to the replicas over gloo, while they "
                "serve: set sync.transport: gloo, or trainer.lora.sync: merged to send whole weights"
            )
        if self.rollout.quantization != "none":
            self._quantised()
        self._enough_instances()
        return self

    def _quantised(self) -> None:
        quantization = self.rollout.quantization
        if self.model.dtype != "bfloat16":
            raise ValueError(
                f"rollout.quantization is {quantization} and model.dtype {self.model.dtype}, which vLLM does not "
                "quantise: set model.dtype: bfloat16, or leave rollout.quantization out"
            )
        if self.algorithm != "sft" and self.trainer.loss.importance == "none":
            raise ValueError(
                f"rollout.quantization is {quantization}, so that replicas sample from a policy slightly other than "
                "the trainer's, and trainer.loss.importance none would not correct for it: set it to truncated"
            )

    def _enough_instances(self) -> None:
        episodes, tasks = self.evaluation.episodes, self.environment.tasks
        names, (first, last) = len(tasks.evaluation), tasks.eval_seeds
        if tasks.single_instance and episodes > tasks.instances:
            raise ValueError(
                f"evaluation.episodes is {episodes}, and the {names} tasks of the evaluation have {tasks.instances} "
                f"instances, because some have only one: set it to {tasks.instances} or less; evaluation.samples "
                "repeats instances"
            )
        if not tasks.single_instance and (needed := -(-episodes // names)) > last - first:
            raise ValueError(
                f"evaluation.episodes: {episodes} episodes of {names} tasks need {needed} held-out seeds, and "
                f"environment.tasks.eval_seeds has {last - first}: widen it or evaluate fewer"
            )
