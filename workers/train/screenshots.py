"""Screenshots as model inputs, by digest, processed by the checkpoint's own image processor.

A processed screenshot is kept as the bytes of its resized pixels, in the order of the model's patches, and becomes the
model's float32 values where they are needed: the same values, since the processor computes with these bytes, at an
eighth of the size (Qwen's processors repeat every frame).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from dart.core.types import Image
from dart.screenshots.held import Held
from dart.screenshots.lookup import UnknownScreenshot, filled
from dart.screenshots.picture import decoded
from dart.screenshots.shared import SharedScreenshots
from dart.shortage import ready_threads

CACHE_BYTES = 512 << 20
"""Bound on the processed screenshots kept; the least recently used is evicted first. Steps of one trajectory share
most of theirs."""
AHEAD = 16
"""The most screenshots that are being prepared, or are ready and have not been asked for: 101 MB at 1920 × 1080."""


@dataclass(frozen=True, slots=True)
class PixelForm:
    """How bytes of pixels become the model's values. mean, std: float32 [channels], in units of a byte; frames: how
    often the model wants each frame."""

    mean: torch.Tensor
    std: torch.Tensor
    frames: int

    @classmethod
    def of(cls, processor: Any) -> PixelForm | None:
        """None for a processor that does other things with pixels than Qwen's; its values are then kept as they are."""
        known = all(hasattr(processor, name) for name in ("image_mean", "image_std", "temporal_patch_size"))
        if not known or not (processor.do_rescale and processor.do_normalize):
            return None
        # In the processor's own order of operations, so that every bit is the same.
        unit = 1.0 / processor.rescale_factor
        mean, std = (torch.tensor(values) * unit for values in (processor.image_mean, processor.image_std))
        return cls(mean, std, int(processor.temporal_patch_size))

    def values(self, patches: torch.Tensor) -> torch.Tensor:
        """patches: uint8 [N, channels · size²]. Returns float32 [N, channels · frames · size²] on their device."""
        mean, std = (one.to(patches.device)[:, None] for one in (self.mean, self.std))
        by_channel = (patches.unflatten(1, (len(mean), -1)).float() - mean) / std
        return by_channel.unsqueeze(2).expand(-1, -1, self.frames, -1).flatten(1)

    def first_frames(self, patches: torch.Tensor) -> torch.Tensor:
        """patches: [N, channels · frames · size²], of bytes. Returns a copy, uint8 [N, channels · size²]."""
        return patches.unflatten(1, (len(self.mean), self.frames, -1))[:, :, 0].flatten(1).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class Processed:
    """patches: uint8 [patches, channels · size²], or the processor's values if there is no form. grid: patches in time,
    height, width. tokens: after merging."""

    patches: torch.Tensor
    form: PixelForm | None
    grid: tuple[int, int, int]
    tokens: int

    @property
    def pixel_values(self) -> torch.Tensor:
        """float32 [patches, patch size], as the processor gives them."""
        return self.patches if self.form is None else self.form.values(self.patches)


class ProcessedScreenshots:
    """Owns the cache. Not thread-safe: only the thread that trains calls it.

    `shared`: where to find the bytes of screenshots that come without any. `threads`: how many prepare screenshots
    beside the one that trains; 0: that one does it itself.
    """

    def __init__(
        self,
        processor: Any,
        cache_bytes: int = CACHE_BYTES,
        shared: SharedScreenshots | None = None,
        threads: int = 0,
    ) -> None:
        self._processor, self._form = processor, PixelForm.of(processor)
        self.shared = shared
        self._held: Held[Processed] = Held(cache_bytes, lambda one: one.patches.nbytes)
        self._pool = ready_threads(threads, "screenshots") if threads else None
        self._wanted: deque[Image] = deque()
        self._begun: dict[bytes, Future[Processed]] = {}

    def ahead(self, screenshots: Iterable[Image]) -> None:
        """Prepare these meanwhile, in the order in which `get` will want them. Replaces what was asked for before.

        Does nothing without threads. What is wrong with one of them is said when `get` wants it.
        """
        self._wanted = deque({image.sha256: image for image in screenshots}.values())
        wanted = {image.sha256 for image in self._wanted}
        # What failed is prepared anew: this time its bytes may have come, or may be readable.
        failed = {digest for digest, begun in self._begun.items() if begun.done() and begun.exception() is not None}
        for digest in [digest for digest in self._begun if digest not in wanted or digest in failed]:
            self._begun.pop(digest).cancel()
        self._begin()

    def get(self, screenshots: Iterable[Image]) -> dict[bytes, Processed]:
        """Every screenshot by digest. Raises UnknownScreenshot, BadScreenshot."""
        wanted = {image.sha256: image for image in screenshots}
        found = {digest: held for digest in wanted if (held := self._held.get(digest)) is not None}
        for digest, held in found.items():
            self._held.note(digest, held)
        missing = [image for digest, image in wanted.items() if digest not in found]
        if self._pool is not None:
            # All of them first, so that they are prepared at the same time.
            for image in missing:
                if image.sha256 not in self._begun:
                    self._begun[image.sha256] = self._pool.submit(self._processed, image)
        for image in missing:
            begun = self._begun.pop(image.sha256, None)
            found[image.sha256] = self._processed(image) if begun is None else begun.result()
            self._held.note(image.sha256, found[image.sha256])
        self._begin()
        return found

    def check_there(self, screenshots: Iterable[Image]) -> None:
        """Raises UnknownScreenshot if one without bytes is neither kept nor shared; called before training begins."""
        for image in screenshots:
            if image.data or image.sha256 in self._held or (self.shared and self.shared.has(image.sha256)):
                continue
            raise UnknownScreenshot(image, "came without data and is not held: send it with data")

    def close(self) -> None:
        """End the threads; what is being prepared is given up."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self) -> None:
        """Prepare the next ones, as far as there is room."""
        while self._pool is not None and self._wanted and len(self._begun) < AHEAD:
            image = self._wanted.popleft()
            if image.sha256 not in self._held and image.sha256 not in self._begun:
                self._begun[image.sha256] = self._pool.submit(self._processed, image)

    def _processed(self, image: Image) -> Processed:
        """Called from any thread."""
        as_bytes = {} if self._form is None else {"do_rescale": False, "do_normalize": False}
        picture = decoded(filled(image, self.shared))
        batch = self._processor(images=[picture], return_tensors="pt", **as_bytes)
        time, height, width = batch["image_grid_thw"][0].tolist()
        patches = torch.as_tensor(batch["pixel_values"])
        if self._form is not None:
            patches = self._form.first_frames(patches)
        return Processed(
            patches, self._form, (time, height, width), time * height * width // self._processor.merge_size**2
        )
