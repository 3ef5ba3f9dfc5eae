"""Screenshots as Pillow sees them, for the workers that decode; Pillow is loaded here, when it is first needed."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

from dart.core.types import Image
from dart.screenshots import header
from dart.screenshots.lookup import BadScreenshot

DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)
"""What Pillow's decoders raise for bytes that are no picture."""

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def opened(image: Image) -> Picture:
    """Its pixels are decoded when they are first looked at. Raises BadScreenshot for what is no picture, for another
    size than it is said to have, and for more pixels than `header.MAX_PIXELS`."""
    from PIL import Image as pillow

    try:
        picture = pillow.open(io.BytesIO(image.data))
        header.check_pixels(*picture.size)
    except header.BadHeader as error:
        raise BadScreenshot(image, str(error)) from None
    except (pillow.DecompressionBombError, *DECODE_ERRORS) as error:
        raise BadScreenshot(image, f"({image.media_type}) cannot be read: {error}") from None
    if picture.size != (image.width, image.height):
        width, height = picture.size
        raise BadScreenshot(image, f"is {width}×{height} pixels, not {image.width}×{image.height}")
    return picture


def decoded(image: Image) -> Picture:
    """All its pixels, as RGB. Raises BadScreenshot as `opened` does, and for bytes that do not decode."""
    picture = opened(image)
    try:
        return picture.convert("RGB")
    except DECODE_ERRORS as error:
        raise BadScreenshot(image, f"({image.media_type}) cannot be decoded: {error}") from None
