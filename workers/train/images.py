"""Screenshots as the model takes them, by digest, through the checkpoint's own image processor."""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image as PIL
from PIL import UnidentifiedImageError

from dart.v1 import image_pb2 as ipb
from dart.workers.shared import SharedScreenshots
from dart.workers.train.errors import SampleError, UnknownImageError

CACHE_BYTES = 512 << 20
"""Processed screenshots kept; the least recently used goes first. Steps of one trajectory share most of theirs."""


@dataclass(frozen=True, slots=True)
class Processed:
    """pixel_values: float32 [patches, patch size]. grid: patches in time, height, width. tokens: after merging."""

    pixel_values: torch.Tensor
    grid: tuple[int, int, int]
    tokens: int


class Images:
    """Owns the cache. Not thread-safe: only the thread that trains calls it.

    `shared`: where the bytes are of screenshots that come without any.
    """

    def __init__(self, processor: Any, cache_bytes: int = CACHE_BYTES, shared: SharedScreenshots | None = None) -> None:
        self._processor = processor
        self.shared = shared
        self._limit = cache_bytes
        self._held = 0
        self._cache: OrderedDict[bytes, Processed] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def get(self, images: Iterable[ipb.Image]) -> dict[bytes, Processed]:
        """Every image by digest. Raises SampleError for bytes that are not the image that the digest names."""
        wanted = {image.sha256: image for image in images}
        found = {}
        for digest in wanted:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                found[digest] = self._cache[digest]
        missing = [image for digest, image in wanted.items() if digest not in found]
        self.hits += len(found)
        self.misses += len(missing)
        if missing:
            found.update(self._process(missing))
        return found

    def check_there(self, images: Iterable[ipb.Image]) -> None:
        """Raises UnknownImageError where one without bytes is neither kept nor shared: before anything is trained."""
        for image in images:
            if image.data or image.sha256 in self._cache or (self.shared and self.shared.has(image.sha256)):
                continue
            raise _unknown(image)

    def _process(self, images: list[ipb.Image]) -> dict[bytes, Processed]:
        batch = self._processor(images=[self._decode(image) for image in images], return_tensors="pt")
        grids = [(int(t), int(h), int(w)) for t, h, w in batch["image_grid_thw"].tolist()]
        pixels = torch.as_tensor(batch["pixel_values"]).split([t * h * w for t, h, w in grids])
        merged = self._processor.merge_size**2
        done = {}
        for image, grid, values in zip(images, grids, pixels, strict=True):
            # A clone, so that dropping one image from the cache frees its memory and not only its view.
            done[image.sha256] = Processed(values.clone(), grid, grid[0] * grid[1] * grid[2] // merged)
            self._keep(image.sha256, done[image.sha256])
        return done

    def _keep(self, digest: bytes, processed: Processed) -> None:
        self._cache[digest] = processed
        self._held += processed.pixel_values.nbytes
        while self._held > self._limit and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._held -= dropped.pixel_values.nbytes

    def _decode(self, image: ipb.Image) -> PIL.Image:
        name = image.sha256.hex()[:12]
        data = image.data or (self.shared.get(image.sha256) if self.shared else b"")
        if not data:
            raise _unknown(image)
        if hashlib.sha256(data).digest() != image.sha256:
            raise SampleError(f"image {name} does not have the digest that it is sent under")
        try:
            return PIL.open(io.BytesIO(data)).convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise SampleError(f"image {name} ({image.media_type}) cannot be decoded: {error}") from None


def _unknown(image: ipb.Image) -> UnknownImageError:
    return UnknownImageError(f"image {image.sha256.hex()[:12]} came without data and is not held: send it with data")
