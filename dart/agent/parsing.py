"""What the grammars share: the typed error, the resize rule, and the checks that every parsed value passes.

Everything that a parser returns can be sent: no lone surrogates in strings, integers within 32 bits, points in [0, 1).
"""

from __future__ import annotations

import functools
import math

from dart.config import Agent
from dart.core.action import Point
from dart.errors import UserError

STOP_TOKEN = "<|im_end|>"
MAX_ASPECT_RATIO = 200  # Qwen's processor refuses longer images


class ParseError(ValueError):
    """The policy's text is not one action of its grammar.

    `kind` is a short slug for counting: no_action, unknown_action, bad_arguments, out_of_bounds, leading_text,
    trailing_text, many_actions, truncated, bad_json.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def without_stop_token(text: str) -> str:
    """`text` without the end-of-turn token, which an engine may or may not decode."""
    return text.rstrip().removesuffix(STOP_TOKEN).rstrip()


def shown(text: str, limit: int = 80) -> str:
    """`text` quoted for an error message, shortened."""
    return ascii(text if len(text) <= limit else text[:limit] + "…")


def checked_text(text: str, what: str) -> str:
    """`text` if it can be encoded; a lone surrogate (an escape such as \\ud800 makes one) is a ParseError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParseError("bad_arguments", f"{what} {shown(text)} is not valid Unicode") from None
    return text


def grid_point(x: float, y: float, width: int, height: int) -> Point:
    """(x, y) on a grid of `width` × `height` → a point of the observation. Outside is a ParseError."""
    if not (0 <= x < width and 0 <= y < height):
        raise ParseError("out_of_bounds", f"({x:g}, {y:g}) is outside the screen's [0, {width}) × [0, {height})")
    return Point(x / width, y / height)


def grid_pixels(at: Point, width: int, height: int) -> tuple[int, int]:
    """The nearest cell of a grid of `width` × `height`: the inverse of `grid_point` up to rounding."""
    return min(round(at.x * width), width - 1), min(round(at.y * height), height - 1)


@functools.lru_cache(1024)
def smart_resize(width: int, height: int, multiple: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Qwen-VL's resize rule: (width, height) in pixels of the image that the model sees.

    Both sides become multiples of `multiple`, their product lies in [min_pixels, max_pixels] (up to rounding), and the
    aspect ratio is kept as well as that allows. The same arithmetic as the model's image processor, to the pixel.
    Raises UserError for an empty side, or a ratio above MAX_ASPECT_RATIO.
    """
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise UserError(
            f"screenshot of {width}x{height} pixels: the model takes sides of at least 1 and a ratio of at most "
            f"{MAX_ASPECT_RATIO}; change the environment's viewport"
        )
    wide, high = round(width / multiple) * multiple, round(height / multiple) * multiple
    if wide * high > max_pixels:
        shrink = math.sqrt(width * height / max_pixels)
        wide = max(multiple, math.floor(width / shrink / multiple) * multiple)
        high = max(multiple, math.floor(height / shrink / multiple) * multiple)
    elif wide * high < min_pixels:
        grow = math.sqrt(min_pixels / (width * height))
        wide = math.ceil(width * grow / multiple) * multiple
        high = math.ceil(height * grow / multiple) * multiple
    return wide, high


def screenshot_tokens(agent: Agent, viewport: tuple[int, int]) -> int:
    """Tokens of a screenshot of the whole viewport: one for each square of `agent.resize_multiple` pixels.

    Raises UserError for a viewport that models do not take.
    """
    width, height = smart_resize(*viewport, agent.resize_multiple, agent.min_pixels, agent.max_pixels)
    return (width // agent.resize_multiple) * (height // agent.resize_multiple)
