"""The config that each role gets in its Welcome."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dart.config.base import Section, remedy
from dart.config.environment import Environment
from dart.config.policy import Model, Rollout
from dart.config.trainer import Sync, Trainer
from dart.errors import UserError

ADAPTER_FOLDER = "adapter"
"""In a checkpoint: the adapter alone, in PEFT's form."""

Told = TypeVar("Told", bound=Section)


def read_told(kind: type[Told], text: str) -> Told:
    """What the coordinator sent as JSON. Raises UserError if this release of dart cannot read it."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join(filter(None, [".".join(map(str, first["loc"])), remedy(first)]))
        raise UserError(
            f"the coordinator's config for this worker cannot be read ({problem}): use the same dart release on both "
            "ends"
        ) from None


class SharedBlobs(Section):
    """The run's screenshots, for workers with access to the directory: its file `id` holds this word."""

    directory: Path
    id: str


class EnvWorkerConfig(Section):
    environment: Environment
    shared_blobs: SharedBlobs | None = None


class ServedAdapter(Section):
    """The adapter with which a replica serves `model.path`, and of which it gets new versions instead of weights."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    folder: Path | None = None
    """The adapter of `weight_version`, in PEFT's form; None: it adds nothing yet."""


class RolloutWorkerConfig(Section):
    model: Model
    rollout: Rollout
    sync: Sync
    max_images: int
    screenshot_tokens: int = 0
    """Tokens of one screenshot in the prompt; 0: not known."""
    packed_token_ids: bool = False
    """Answer with `Generated.packed_prompt_token_ids`."""
    seed: int
    weight_version: int = 0
    adapter: ServedAdapter | None = None
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
