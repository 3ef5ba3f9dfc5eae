"""The one place where a worker gets a screenshot's bytes and checks them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from dart.core.types import Image
from dart.screenshots import header
from dart.screenshots.shared import SharedScreenshots


class ScreenshotError(Exception):
    """A screenshot cannot be used. The message names it by the beginning of its digest."""

    def __init__(self, image: Image, why: str) -> None:
        super().__init__(f"screenshot {image.sha256.hex()[:12]} {why}")
        self.digest = image.sha256


class UnknownScreenshot(ScreenshotError):
    """It came without its bytes, and they are not available here: send it again with them."""


class BadScreenshot(ScreenshotError):
    """The bytes do not match their description; sending them again would not help."""


def filled(image: Image, shared: SharedScreenshots | None) -> Image:
    """The screenshot with its bytes: its own, or those in the run's directory.

    The bytes match their digest and have at most `header.MAX_PIXELS` pixels. Raises UnknownScreenshot, BadScreenshot.
    """
    if not image.data and shared is not None:
        image = replace(image, data=shared.get(image.sha256))
    if not image.data:
        raise UnknownScreenshot(image, "came without data and is not held: send it with data")
    if hashlib.sha256(image.data).digest() != image.sha256:
        raise BadScreenshot(image, f"has {len(image.data)} bytes that do not have the digest that it came under")
    check_size(image)
    return image


def check_size(image: Image) -> None:
    """Check, as far as possible without decoding, that the bytes are a whole PNG or JPEG of the stated size.

    The size of other formats is not known here; `picture` checks it. Raises BadScreenshot.
    """
    try:
        size = header.size_of(image.data)
    except header.BadHeader as error:
        raise BadScreenshot(image, str(error)) from None
    if size is not None and size != (image.width, image.height):
        raise BadScreenshot(image, f"is {size[0]}×{size[1]} pixels, not {image.width}×{image.height}")
