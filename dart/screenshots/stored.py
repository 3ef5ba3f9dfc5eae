"""How the coordinator gets a screenshot's bytes: from its `Image`, or, if that has none, from the run's store.

They are with the image if a worker sent them, and only in the store if an env worker wrote them there itself
(`dart.screenshots.shared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from dart.config import SharedBlobs
from dart.core.types import Image, Trajectory
from dart.errors import UserError
from dart.screenshots.directory import ScreenshotDirectory


class ScreenshotLost(Exception):
    """A screenshot's bytes are not available."""


class Store(Protocol):
    """The part of `dart.store.blobs.BlobStore` that is used here."""

    directory: ScreenshotDirectory | None
    """The directory where other processes may see it, if any."""

    async def get_many_async(self, digests: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """Digest → bytes. Raises UserError, OSError, ValueError."""


class StoredScreenshots:
    """Without a `store`, nothing is kept and workers send all bytes."""

    def __init__(self, store: Store | None) -> None:
        self._store = store

    def share(self) -> SharedBlobs | None:
        """Where workers of this run find them from now on; None if they are not in a directory."""
        directory = self._store.directory if self._store else None
        return SharedBlobs(directory=directory.root, id=directory.mark()) if directory else None

    async def missing(self, images: Iterable[Image]) -> Mapping[bytes, bytes]:
        """Digest → bytes, for images whose `data` is empty. Raises ScreenshotLost."""
        digests = {image.sha256 for image in images if not image.data}
        if self._store is None or not digests:
            return dict.fromkeys(digests, b"")
        try:
            return await self._store.get_many_async(digests)
        except (UserError, OSError, ValueError) as error:
            raise ScreenshotLost(f"a screenshot is not available: {error}") from error

    async def filled(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with the bytes of every screenshot. Raises ScreenshotLost."""
        found = await self.missing(image for step in trajectory.steps for image in step.images)
        if not found:
            return trajectory
        steps = []
        for step in trajectory.steps:
            images = tuple(image if image.data else replace(image, data=found[image.sha256]) for image in step.images)
            steps.append(replace(step, images=images))
        return replace(trajectory, steps=tuple(steps))
