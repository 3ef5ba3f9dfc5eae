"""The screenshots that a replica keeps by digest, so that each is sent to it or read only once.

The coordinator omits the bytes of the newest `image_cache_entries` digests that it sent to the replica; this keeps
exactly those. It keeps the encoded bytes: vLLM's own cache keeps the processed images, and the bytes are decoded only
when those are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from dart.core.types import Image
from dart.screenshots.held import Held
from dart.screenshots.lookup import BadScreenshot, UnknownScreenshot, filled
from dart.screenshots.shared import SharedScreenshots


class Holder:
    """`shared`: where to find screenshots that come without bytes and are not held."""

    def __init__(self, entries: int, shared: SharedScreenshots | None = None) -> None:
        self._shared = shared
        self.held: Held[Image | None] = Held(entries)
        """None for a screenshot that was not available: it occupies a place all the same, as in the mirror."""

    def resolve(self, images: Sequence[Image]) -> list[Image]:
        """Return one message's screenshots, in order, with their bytes, and keep them.

        Raises the first UnknownScreenshot or BadScreenshot, but only after noting all of them, as the coordinator did.
        """
        found: list[Image] = []
        problem: UnknownScreenshot | BadScreenshot | None = None
        for image in images:
            one = self.held.get(image.sha256)
            if one is None:
                try:
                    one = filled(image, self._shared)
                except (UnknownScreenshot, BadScreenshot) as error:
                    problem = problem or error
            self.held.note(image.sha256, one)
            if one is not None:
                found.append(one)
        if problem is not None:
            raise problem
        return found
