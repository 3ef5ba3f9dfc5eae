"""Where the bytes of a screenshot are: in its `Image`, or, where that has none, in the run's blob store.

They are with the image when a worker sent them, and in the store alone when an env worker wrote them there itself
(`dart.workers.shared`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dart.config import SharedBlobs
from dart.coordinator.sessions import InfrastructureError
from dart.core.types import Image, Trajectory
from dart.store.blobs import BlobError, BlobStore


class Screenshots:
    """No `blobs`: workers send all bytes."""

    def __init__(self, blobs: BlobStore | None = None) -> None:
        self._blobs = blobs

    def shared(self) -> SharedBlobs | None:
        """Where workers find them; None where they are in no directory."""
        directory = self._blobs.directory if self._blobs else None
        return SharedBlobs(directory=directory.root, id=directory.identity()) if directory else None

    def arrived(self, image: Image) -> None:
        """Raises InfrastructureError where a digest came from an env worker and nothing is stored under it."""
        if not image.data and self._blobs is not None and not self._blobs.has(image.sha256):
            raise InfrastructureError(
                f"screenshot {image.sha256.hex()[:12]} is not in {self._blobs.where}, where its env worker said it is: "
                "is that a full disk, or a network file system that is slow to show new files? "
                "server.share_screenshots: false does without"
            )

    async def missing(self, images: Iterable[Image]) -> Mapping[bytes, bytes]:
        """Digest → bytes, of those that have none with them. Raises InfrastructureError where the store has none."""
        digests = {image.sha256 for image in images if not image.data}
        if not digests or self._blobs is None:
            return {}
        try:
            return await self._blobs.get_many_async(digests)
        except BlobError as error:
            raise InfrastructureError(str(error)) from error

    async def filled(self, trajectory: Trajectory) -> Trajectory:
        """With the bytes of every screenshot. Raises InfrastructureError."""
        found = await self.missing(image for step in trajectory.steps for image in step.images)
        if not found:
            return trajectory
        steps = []
        for step in trajectory.steps:
            images = tuple(image if image.data else replace(image, data=found[image.sha256]) for image in step.images)
            steps.append(replace(step, images=images))
        return replace(trajectory, steps=tuple(steps))
