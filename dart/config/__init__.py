"""The run's configuration: one YAML file, one pydantic model, no torch.

Every number that the algorithm uses is a field with a default here, never a literal in code. Defaults are the paper's
(arXiv 2509.23866) where it gives them. `load` reports any mistake as one `ConfigError` that names the field, the value
and the remedy.
"""

from dart.config.base import ConfigError, Fraction, Positive, Seconds, Section
from dart.config.curation import Curation, DynamicLength, DynamicRollouts, Pool
from dart.config.environment import BUILTIN_SUITE, Delay, Environment
from dart.config.loading import load, parse
from dart.config.policy import BUILTIN_MODELS, Agent, Model, PromptTexts, Rollout
from dart.config.run import Checkpoint, Dashboard, Evaluation, Retention, Run, Server, Stop, Tracking
from dart.config.tasks import TaskSet
from dart.config.told import (
    ADAPTER_FOLDER,
    EnvWorkerConfig,
    RolloutWorkerConfig,
    ServedAdapter,
    SharedBlobs,
    TrainWorkerConfig,
)
from dart.config.trainer import LOSS_KINDS, OWN_LOSS, Advantage, Lora, Loss, Schedule, Supervised, Sync, Trainer
from dart.config.whole import Config

__all__ = [
    "ADAPTER_FOLDER",
    "BUILTIN_MODELS",
    "BUILTIN_SUITE",
    "LOSS_KINDS",
    "OWN_LOSS",
    "Advantage",
    "Agent",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Curation",
    "Dashboard",
    "Delay",
    "DynamicLength",
    "DynamicRollouts",
    "EnvWorkerConfig",
    "Environment",
    "Evaluation",
    "Fraction",
    "Lora",
    "Loss",
    "Model",
    "Pool",
    "Positive",
    "PromptTexts",
    "Retention",
    "Rollout",
    "RolloutWorkerConfig",
    "Run",
    "Schedule",
    "Seconds",
    "Section",
    "ServedAdapter",
    "Server",
    "SharedBlobs",
    "Stop",
    "Supervised",
    "Sync",
    "TaskSet",
    "Tracking",
    "TrainWorkerConfig",
    "Trainer",
    "load",
    "parse",
]
