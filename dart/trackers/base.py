"""The interface of trackers, and the kinds there are."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from dart.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Tracked:
    """The run. `id`: also the tracker's, so that a run that is continued stays one. `config`: without secrets."""

    project: str
    id: str
    name: str
    config: Mapping[str, JsonValue]
    folder: Path
    """Where a tracker that has no server keeps its files."""
    over: bool = False
    """It has been told how the run ended."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A trajectory: its screenshots side by side, with its actions drawn on them."""

    name: str
    caption: str
    image: Image.Image


class Tracker(Protocol):
    """Methods block, and raise whatever the tracker's library raises."""

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        """Curves at an update. Names have a slash after their section: "trainer/loss"."""

    def pictures(self, update: int, pictures: Sequence[Picture]) -> None: ...

    def outcome(self, summary: Mapping[str, JsonValue], curve: Path | None) -> None:
        """The run is over. `curve`: the picture of its learning curve, if there is one."""

    def close(self, state: str) -> None:
        """Send what is left. `state`: the run's (RunState); one that is running, or was interrupted, may go on."""


@dataclass(frozen=True, slots=True)
class _Kind:
    module: str
    name: str
    remedy: str


KINDS: dict[str, _Kind] = {
    "tensorboard": _Kind("dart.trackers.tensorboard", "TensorBoard", "pip install tensorboardX tensorboard"),
    "wandb": _Kind("dart.trackers.weights_and_biases", "WeightsAndBiases", "pip install wandb"),
    "trackio": _Kind("dart.trackers.weights_and_biases", "Trackio", "pip install trackio"),
    "mlflow": _Kind("dart.trackers.mlflow", "MLflow", "pip install mlflow (or mlflow-skinny)"),
    "swanlab": _Kind("dart.trackers.swanlab", "SwanLab", "pip install swanlab"),
}


def make_tracker(kind: str, tracked: Tracked) -> Tracker:
    """Begin to track the run, or go on. `kind`: one of KINDS. Raises UserError if its package is not installed."""
    found = KINDS[kind]
    try:
        made: Tracker = getattr(importlib.import_module(found.module), found.name)(tracked)
    except ImportError as error:
        raise UserError(f"it needs {error.name or error}: {found.remedy}") from None
    return made


def begins_anew(kind: str) -> bool:
    """Whether each process sends the run from its beginning: W&B cannot join what several have recorded offline."""
    return kind == "wandb" and os.environ.get("WANDB_MODE") in ("offline", "dryrun")


def installed(kind: str) -> bool:
    """Whether the tracker's own package can be found."""
    package = {"tensorboard": "tensorboardX"}.get(kind, kind)
    return importlib.util.find_spec(package) is not None
