"""SwanLab. Without SWANLAB_API_KEY or SWANLAB_MODE it is offline: `swanlab sync` sends the folder later."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import swanlab
from PIL import Image
from pydantic import JsonValue

from dart.trackers.base import Picture, Tracked


class SwanLab:
    def __init__(self, tracked: Tracked) -> None:
        online = "SWANLAB_API_KEY" in os.environ
        self._updates = 0
        swanlab.init(
            project=tracked.project, name=tracked.name, config=dict(tracked.config), logdir=str(tracked.folder),
            mode=os.environ.get("SWANLAB_MODE", "online" if online else "offline"),
            id=hashlib.sha256(tracked.id.encode()).hexdigest()[:21], resume="allow",
        )  # fmt: skip

    def numbers(self, update: int, values: Mapping[str, float]) -> None:
        self._updates = update
        swanlab.log(dict(values), step=update)

    def pictures(self, update: int, pictures: Sequence[Picture]) -> None:
        shown = [swanlab.Image(picture.image, caption=picture.caption) for picture in pictures]
        swanlab.log({"trajectories": shown}, step=update)

    def outcome(self, summary: Mapping[str, JsonValue], curve: Path | None) -> None:
        swanlab.config.update({"outcome": dict(summary)})
        if curve is not None:
            with Image.open(curve) as picture:
                swanlab.log({"learning_curve": swanlab.Image(picture.convert("RGB"))}, step=self._updates)

    def close(self, state: str) -> None:
        swanlab.finish()
