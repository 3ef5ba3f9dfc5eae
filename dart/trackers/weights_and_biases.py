"""Weights & Biases, and Trackio, which has its interface."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import JsonValue

from dart.store.records import RunState
from dart.trackers.base import Picture, Tracked


class WeightsAndBiases:
    """With WANDB_MODE=offline everything stays in the run directory until `wandb sync` sends it.

    Each process makes a folder of its own there, and `wandb sync` of one replaces what was sent of another, so each has
    to hold the whole run (`base.begins_anew`).
    """

    def __init__(self, tracked: Tracked) -> None:
        import wandb

        self._wandb = wandb
        tracked.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=tracked.project, id=tracked.id, name=tracked.name, resume="allow", config=dict(tracked.config),
            dir=str(tracked.folder), settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="update")

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log({"update": update, **values})

    def pictures(self, update: int, pictures: Sequence[Picture]) -> None:
        shown = [self._wandb.Image(picture.image, caption=picture.caption) for picture in pictures]
        self._run.log({"update": update, "trajectories": shown})

    def outcome(self, summary: Mapping[str, JsonValue], curve: Path | None) -> None:
        self._run.summary.update({"outcome": dict(summary)})
        if curve is not None:
            self._run.log({"learning_curve": self._wandb.Image(str(curve))})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state in (RunState.FAILED, RunState.INTERRUPTED)))


class Trackio:
    """Keeps everything in the run directory; `trackio show` needs the TRACKIO_DIR that is in its `folder`."""

    def __init__(self, tracked: Tracked) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(tracked.folder))
        import trackio

        self._trackio: Any = trackio
        self._updates = 0
        trackio.init(
            project=tracked.project, name=tracked.id, resume="allow", config=dict(tracked.config),
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        self._updates = update
        self._trackio.log(dict(values), step=update)

    def pictures(self, update: int, pictures: Sequence[Picture]) -> None:
        shown = {
            f"trajectories/{number}": self._trackio.Image(picture.image, caption=picture.caption)
            for number, picture in enumerate(pictures)
        }
        self._trackio.log(shown, step=update)

    def outcome(self, summary: Mapping[str, JsonValue], curve: Path | None) -> None:
        self._trackio.log({"outcome": dict(summary)}, step=self._updates)
        if curve is not None:
            with Image.open(curve) as picture:
                self._trackio.log({"learning_curve": self._trackio.Image(picture.convert("RGB"))}, step=self._updates)

    def close(self, state: str) -> None:
        self._trackio.finish()
