"""The screenshots that a replica keeps by digest, so that each travels to it once, or is read once.

The coordinator leaves out the bytes of the newest `image_cache_entries` digests that the replica has had; this store
keeps exactly as many, least recently used out first. What is kept is the encoded bytes: vLLM's own cache keeps what it
made of them, and PIL decodes only when that is missing.
"""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from dataclasses import replace

from PIL import Image as PillowImage
from PIL import UnidentifiedImageError

from dart.core.types import Image
from dart.workers.shared import SharedScreenshots


class UnknownImageError(Exception):
    """An image came without its bytes and is not held: send it again with them."""


class BadImageError(Exception):
    """The bytes are not the image that they are said to be."""


class ImageStore:
    """`shared`: where those are that come without bytes and are not held."""

    def __init__(self, entries: int, shared: SharedScreenshots | None = None) -> None:
        self._entries, self._shared = entries, shared
        self._held: OrderedDict[bytes, Image] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def resolve(self, image: Image) -> Image:
        """The image with its bytes; they are kept. Raises UnknownImageError or BadImageError."""
        held = self._held.get(image.sha256)
        if held is None:
            if not image.data and self._shared is not None:
                image = replace(image, data=self._shared.get(image.sha256))
            if not image.data:
                raise UnknownImageError(f"image {image.sha256.hex()[:12]} is not held here")
            check(image)
            self._held[image.sha256] = held = image
            if len(self._held) > self._entries:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(image.sha256)
        return held


def check(image: Image) -> None:
    """Digest and size are as claimed; pixels are not decoded. Raises BadImageError."""
    name = image.sha256.hex()[:12]
    if hashlib.sha256(image.data).digest() != image.sha256:
        raise BadImageError(f"image {name}: {len(image.data)} bytes do not have this digest")
    try:
        size = opened(image).size
    except (UnidentifiedImageError, OSError) as error:
        raise BadImageError(f"image {name} ({image.media_type}) cannot be read: {error}") from None
    if size != (image.width, image.height):
        raise BadImageError(f"image {name} is {size[0]}×{size[1]} pixels, not {image.width}×{image.height}")


def opened(image: Image) -> PillowImage.Image:
    """As PIL sees it; pixels are decoded when first looked at."""
    return PillowImage.open(io.BytesIO(image.data))
