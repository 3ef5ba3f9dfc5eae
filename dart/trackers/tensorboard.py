"""TensorBoard's event files, written by tensorboardX, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import JsonValue
from tensorboardX import SummaryWriter

from dart.core.json_text import to_json
from dart.trackers.base import Picture, Tracked


class TensorBoard:
    def __init__(self, tracked: Tracked) -> None:
        self._writer = SummaryWriter(str(tracked.folder))
        self._writer.add_text("config", f"```json\n{to_json(dict(tracked.config))}\n```", 0)

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def pictures(self, update: int, pictures: Sequence[Picture]) -> None:
        for number, picture in enumerate(pictures):
            self._writer.add_image(f"trajectories/{number}", np.asarray(picture.image), update, dataformats="HWC")
            self._writer.add_text(f"trajectories/{number}", picture.caption, update)
        self._writer.flush()

    def outcome(self, summary: Mapping[str, JsonValue], curve: Path | None) -> None:
        self._writer.add_text("summary", f"```json\n{to_json(dict(summary))}\n```", 0)
        if curve is not None:
            with Image.open(curve) as picture:
                self._writer.add_image("learning_curve", np.asarray(picture.convert("RGB")), 0, dataformats="HWC")

    def close(self, state: str) -> None:
        self._writer.close()
