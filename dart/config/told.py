"""The config that each role gets in its Welcome."""

from __future__ import annotations

from pathlib import Path

from dart.config.base import Section
from dart.config.environment import Environment
from dart.config.policy import Model, Rollout
from dart.config.trainer import Sync, Trainer


class SharedBlobs(Section):
    """The run's screenshots, for workers with access to the directory: its file `id` holds this word."""

    directory: Path
    id: str


class EnvWorkerConfig(Section):
    environment: Environment
    shared_blobs: SharedBlobs | None = None


class RolloutWorkerConfig(Section):
    model: Model
    rollout: Rollout
    sync: Sync
    max_images: int
    screenshot_tokens: int = 0
    """Tokens of one screenshot in the prompt; 0: not known."""
    seed: int
    weight_version: int = 0
    shared_blobs: SharedBlobs | None = None


class TrainWorkerConfig(Section):
    model: Model
    trainer: Trainer
    sync: Sync
    temperature: float
    seed: int
    total_updates: int | None
    resume_from: Path | None = None
    shared_blobs: SharedBlobs | None = None
