"""A trajectory's steps as pictures: each screenshot with its action drawn on it, and a caption below."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import JsonValue

from dart.errors import UserError
from dart.inspection.records import TrajectoryDetail
from dart.inspection.wording import plain
from dart.screenshots.picture import FORMATS

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

LEAST_SIDE, MOST_SIDE = 480, 1280
"""Screenshots are enlarged or reduced until their longer side is between these, in pixels."""
CAPTION_PIXELS = 56
INK, BACKGROUND, MARK = (235, 238, 242), (24, 27, 32), (255, 64, 64)

Point = tuple[float, float]
_Action = Mapping[str, JsonValue]


def frames(detail: TrajectoryDetail, screenshots: Mapping[str, tuple[bytes, str]]) -> Iterator[Image.Image]:
    """One RGB picture for each step, and one of the last image, all of the same even size. Raises UserError if no
    screenshot is left."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("exports need Pillow: run `pip install 'dart-gui-rl[view]'`") from None
    sizes = [step.image for step in detail.steps if step.image is not None and step.image.sha256 in screenshots]
    if not sizes:
        raise UserError(f"no screenshot of {detail.row.id} is left: there is nothing to show")
    width, height = _size(sizes[0].width, sizes[0].height)
    shown = [(step.image, step.action, f"{step.index + 1}/{len(detail.steps)}  {step.label}") for step in detail.steps]
    if detail.last_image is not None:
        shown.append((detail.last_image, None, "after the last action"))
    for number, (image, action, caption) in enumerate(shown, 1):
        canvas = Image.new("RGB", (width, height + CAPTION_PIXELS), BACKGROUND)
        if image is not None and image.sha256 in screenshots:
            with Image.open(io.BytesIO(screenshots[image.sha256][0]), formats=FORMATS) as opened:
                picture = opened.convert("RGB")
            way = Image.Resampling.NEAREST if width > picture.width else Image.Resampling.LANCZOS
            canvas.paste(picture.resize((width, height), way), (0, 0))
        outcome = f"   reward {detail.row.reward:g}, {detail.row.termination}" if number == len(shown) else ""
        _draw(canvas, action, caption + outcome, detail.row.instruction, (width, height))
        yield canvas


def _size(width: int, height: int) -> tuple[int, int]:
    """Even numbers of pixels, as video needs them; small screenshots are enlarged by a whole number."""
    longer = max(width, height)
    scale: float = 1.0
    if longer < LEAST_SIDE:
        scale = math.ceil(LEAST_SIDE / longer)
    elif longer > MOST_SIDE:
        scale = MOST_SIDE / longer
    return max(2, round(width * scale / 2) * 2), max(2, round(height * scale / 2) * 2)


def _draw(canvas: Image.Image, action: _Action | None, caption: str, instruction: str, size: tuple[int, int]) -> None:
    from PIL import ImageDraw, ImageFont

    pen = ImageDraw.Draw(canvas)
    width, height = size
    for one in _single(action):
        _mark(pen, one, width, height)
    small, large = ImageFont.load_default(13), ImageFont.load_default(16)
    pen.text((10, height + 7), plain(caption, width // 8), fill=INK, font=large)
    pen.text((10, height + 32), plain(instruction, width // 6), fill=(160, 168, 178), font=small)


def _single(action: _Action | None) -> Sequence[_Action]:
    if action is None:
        return ()
    several = action.get("actions") if action.get("kind") == "several" else None
    return [one for one in several if isinstance(one, dict)] if isinstance(several, list) else (action,)


def _mark(pen: ImageDraw.ImageDraw, action: _Action, width: int, height: int) -> None:
    """Draw where the action is: a ring for a click, an arrow for a drag or a scroll, a chip for text."""
    at = _point(action.get("at"), width, height)
    path = action.get("path")
    kind = action.get("kind")
    if isinstance(path, list):
        points = [point for one in path if (point := _point(one, width, height))]
        if len(points) > 1:
            pen.line(points, fill=MARK, width=3)
            _arrow(pen, points[-2], points[-1])
        return
    if kind == "scroll":
        dx, dy = (_whole(action.get(name)) for name in ("dx", "dy"))
        start = at or (width / 2, height / 2)
        end = (start[0] + 40 * (dx > 0) - 40 * (dx < 0), start[1] + 40 * (dy > 0) - 40 * (dy < 0))
        pen.line([start, end], fill=MARK, width=4)
        _arrow(pen, start, end)
        return
    if at is not None:
        for ring in range(2 if _whole(action.get("count")) > 1 else 1):
            radius = 14 + 6 * ring
            pen.ellipse([at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius], outline=MARK, width=3)
        pen.ellipse([at[0] - 3, at[1] - 3, at[0] + 3, at[1] + 3], fill=MARK)


def _whole(value: JsonValue) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _point(value: JsonValue, width: int, height: int) -> Point | None:
    if not isinstance(value, dict):
        return None
    x, y = value.get("x"), value.get("y")
    return (x * width, y * height) if isinstance(x, int | float) and isinstance(y, int | float) else None


def _arrow(pen: ImageDraw.ImageDraw, start: Point, end: Point) -> None:
    angle = math.atan2(end[1] - start[1], end[0] - start[0])
    wings = [(end[0] - 14 * math.cos(angle + turn), end[1] - 14 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
    pen.polygon([end, *wings], fill=MARK)
