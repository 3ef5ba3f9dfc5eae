"""Screenshots as Pillow sees them, for the workers that decode; Pillow is loaded here, when it is first needed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from dart.core.types import Image
from dart.screenshots import header
from dart.screenshots.lookup import BadScreenshot

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


def opened(image: Image) -> Picture:
    """Its pixels are decoded when they are first looked at. Raises BadScreenshot for what is no picture, for another
    size than it is said to have, and for more pixels than `header.MAX_PIXELS`."""
    from PIL import Image as pillow
    from PIL import UnidentifiedImageError

    try:
        picture = pillow.open(io.BytesIO(image.data))
        header.check_pixels(*picture.size)
    except header.BadHeader as error:
        raise BadScreenshot(image, str(error)) from None
    except (UnidentifiedImageError, pillow.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
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
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:  # what Pillow's decoders raise
        raise BadScreenshot(image, f"({image.media_type}) cannot be decoded: {error}") from None
