"""Screenshots as Pillow images, for the workers that decode. Pillow is loaded when it is first needed."""

from __future__ import annotations

import contextlib
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
    """All its pixels, as RGB, as vLLM shows them to the model: turned upright by the orientation in its metadata, and
    on white where it is transparent. Raises BadScreenshot as `opened` does, and for bytes that do not decode."""
    picture = opened(image)
    try:
        picture.load()
        return _on_white(_upright(picture))
    except DECODE_ERRORS as error:
        raise BadScreenshot(image, f"({image.media_type}) cannot be decoded: {error}") from None


def _upright(picture: Picture) -> Picture:
    from PIL import ImageOps

    with contextlib.suppress(Exception):  # metadata may be anything; vLLM leaves the picture as it is, too
        return ImageOps.exif_transpose(picture)
    return picture


def _on_white(picture: Picture) -> Picture:
    from PIL import Image as pillow

    if picture.mode == "RGB" or not picture.has_transparency_data:
        return picture.convert("RGB")
    painted = picture.convert("RGBA")
    white = pillow.new("RGB", painted.size, "white")
    white.paste(painted, mask=painted.getchannel("A"))
    return white
