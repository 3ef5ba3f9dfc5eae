"""One trajectory as a file: an HTML page that opens anywhere, a GIF, or an MP4."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping

from dart.dashboard.exports.film import gif, mp4
from dart.dashboard.exports.page import page
from dart.inspection.inspector import Inspector
from dart.inspection.opening import NotFound
from dart.inspection.records import TrajectoryDetail
from dart.store.records import RunState

FORMS = {"html": "text/html", "gif": "image/gif", "mp4": "video/mp4"}
"""The forms of an export, with their media types."""


async def export(inspector: Inspector, detail: TrajectoryDetail, form: str) -> bytes:
    """The trajectory in one of `FORMS`. Raises UserError where a package is missing, or no screenshot is left."""
    files = inspector.files
    ended = files.directory.state(await files.record()) != RunState.RUNNING
    make: Mapping[str, Callable[..., bytes]] = {"html": functools.partial(page, ended=ended), "gif": gif, "mp4": mp4}
    return await asyncio.to_thread(make[form], detail, await screenshots(inspector, detail))


async def screenshots(inspector: Inspector, detail: TrajectoryDetail) -> Mapping[str, tuple[bytes, str]]:
    """Digest → (bytes, media type) of what the run still holds."""
    found = {}
    pictures = [step.image for step in detail.steps] + [detail.last_image, *detail.goal_images]
    for digest in {image.sha256 for image in pictures if image is not None and image.held}:
        try:
            found[digest] = await inspector.image(digest)
        except NotFound:
            continue  # removed just now
    return found
