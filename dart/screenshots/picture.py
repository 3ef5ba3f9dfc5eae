"""Screenshots as Pillow images, for the workers that decode. Pillow is loaded when it is first needed."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

from dart.core.types import Image
from dart.screenshots import header
from dart.screenshots.lookup import BadScreenshot

FORMATS = ("PNG", "JPEG", "WEBP")
"""Those of screenshots. Pillow would try all formats that it knows, some with programs of their own."""
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error)
"""What Pillow's decoders raise for bytes that are not a picture."""

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def opened(image: Image) -> Picture:
    """The picture, with pixels decoded on first access. Raises BadScreenshot if it is not a picture, if its size is not
    the stated one, and above `header.MAX_PIXELS`."""
    from PIL import Image as pillow

    try:
        picture = pillow.open(io.BytesIO(image.data), formats=FORMATS)
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
