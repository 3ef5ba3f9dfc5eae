"""Screenshots as model inputs, by digest, processed by the checkpoint's own image processor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dart.core.types import Image
from dart.screenshots.held import Held
from dart.screenshots.lookup import UnknownScreenshot, filled
from dart.screenshots.picture import decoded
from dart.screenshots.shared import SharedScreenshots

CACHE_BYTES = 512 << 20
"""Bound on the processed screenshots kept; the least recently used is evicted first. Steps of one trajectory share
most of theirs."""


@dataclass(frozen=True, slots=True)
class Processed:
    """pixel_values: float32 [patches, patch size]. grid: patches in time, height, width. tokens: after merging."""

    pixel_values: torch.Tensor
    grid: tuple[int, int, int]
    tokens: int


class ProcessedScreenshots:
    """Owns the cache. Not thread-safe: only the thread that trains calls it.

    `shared`: where to find the bytes of screenshots that come without any.
    """

    def __init__(self, processor: Any, cache_bytes: int = CACHE_BYTES, shared: SharedScreenshots | None = None) -> None:
        self._processor = processor
        self.shared = shared
        self._held: Held[Processed] = Held(cache_bytes, lambda one: one.pixel_values.nbytes)
        self.hits = 0
        self.misses = 0

    def get(self, screenshots: Iterable[Image]) -> dict[bytes, Processed]:
        """Every screenshot by digest. Raises UnknownScreenshot, BadScreenshot."""
        wanted = {image.sha256: image for image in screenshots}
        found = {digest: held for digest in wanted if (held := self._held.get(digest)) is not None}
        for digest, held in found.items():
            self._held.note(digest, held)
        missing = [image for digest, image in wanted.items() if digest not in found]
        self.hits += len(found)
        self.misses += len(missing)
        if missing:
            found.update(self._process(missing))
        return found

    def check_there(self, screenshots: Iterable[Image]) -> None:
        """Raises UnknownScreenshot if one without bytes is neither kept nor shared; called before training begins."""
        for image in screenshots:
            if image.data or image.sha256 in self._held or (self.shared and self.shared.has(image.sha256)):
                continue
            raise UnknownScreenshot(image, "came without data and is not held: send it with data")

    def _process(self, screenshots: list[Image]) -> dict[bytes, Processed]:
        pictures = [decoded(filled(image, self.shared)) for image in screenshots]
        batch = self._processor(images=pictures, return_tensors="pt")
        grids = [(int(t), int(h), int(w)) for t, h, w in batch["image_grid_thw"].tolist()]
        pixels = torch.as_tensor(batch["pixel_values"]).split([t * h * w for t, h, w in grids])
        merged = self._processor.merge_size**2
        done = {}
        for image, grid, values in zip(screenshots, grids, pixels, strict=True):
            # A clone, so that evicting a screenshot frees its memory and not only a view.
            done[image.sha256] = Processed(values.clone(), grid, grid[0] * grid[1] * grid[2] // merged)
            self._held.note(image.sha256, done[image.sha256])
        return done
