"""A trajectory as a GIF (Pillow) or an MP4 (PyAV): one second for each step, two for the last."""

from __future__ import annotations

import io
from collections.abc import Mapping
from fractions import Fraction

from dart.dashboard.exports.frames import frames
from dart.errors import UserError
from dart.inspection.records import TrajectoryDetail

STEP_SECONDS, LAST_SECONDS = 1.0, 2.0
FRAMES_PER_SECOND = 4
"""The MP4's frame rate: players handle one frame a second badly."""


def gif(detail: TrajectoryDetail, screenshots: Mapping[str, tuple[bytes, str]]) -> bytes:
    """Raises UserError where Pillow is missing, or no screenshot is left."""
    first, *others = frames(detail, screenshots)
    durations = [int(1000 * STEP_SECONDS)] * len(others) + [int(1000 * LAST_SECONDS)]
    written = io.BytesIO()
    first.save(written, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
    return written.getvalue()


def mp4(detail: TrajectoryDetail, screenshots: Mapping[str, tuple[bytes, str]]) -> bytes:
    """H.264. Raises UserError where PyAV or Pillow is missing, or no screenshot is left."""
    try:
        import av
    except ImportError:
        raise UserError("MP4 needs PyAV: run `pip install 'dart-gui-rl[view]'`, or export a GIF") from None
    pictures = list(frames(detail, screenshots))
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as film:
        stream = film.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"crf": "20"})
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        number = 0
        for place, picture in enumerate(pictures):
            seconds = LAST_SECONDS if place == len(pictures) - 1 else STEP_SECONDS
            for _ in range(round(seconds * FRAMES_PER_SECOND)):
                frame = av.VideoFrame.from_image(picture)  # type: ignore[no-untyped-call]
                frame.pts, number = number, number + 1
                film.mux(stream.encode(frame))
        film.mux(stream.encode())
    return written.getvalue()
