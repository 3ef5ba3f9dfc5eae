"""Where the bytes of a screenshot are: in its `Image`, or, where that has none, in the run's blob store.

They are with the image when a worker sent them, and in the store alone when an env worker wrote them there itself
(`dart.workers.shared`). Whoever needs them finds out whether they are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dart.config import SharedBlobs
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.core.types import Image, Trajectory
from dart.store.blobs import BlobError, BlobStore


class Screenshots:
    """No `blobs`: nothing is kept, and workers send all bytes."""

    def __init__(self, blobs: BlobStore | None) -> None:
        self._blobs = blobs

    def share(self) -> SharedBlobs | None:
        """Where workers of this run find them from now on; None where they are in no directory."""
        directory = self._blobs.directory if self._blobs else None
        return SharedBlobs(directory=directory.root, id=directory.mark()) if directory else None

    async def missing(self, images: Iterable[Image]) -> Mapping[bytes, bytes]:
        """Digest → bytes, of those that have none with them. Raises InfrastructureError where they cannot be had."""
        digests = {image.sha256 for image in images if not image.data}
        if self._blobs is None or not digests:
            return dict.fromkeys(digests, b"")
        try:
            return await self._blobs.get_many_async(digests)
        except (BlobError, OSError, ValueError) as error:
            raise InfrastructureError(f"a screenshot cannot be had: {error}") from error

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
