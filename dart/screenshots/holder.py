"""The screenshots that a replica keeps by digest, so that each travels to it once, or is read once.

The coordinator leaves out the bytes of the newest `image_cache_entries` digests that the replica was told of; this
keeps exactly those. What is kept is the encoded bytes: vLLM's own cache keeps what it made of them, and they are
decoded only where that is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from dart.core.types import Image
from dart.screenshots.held import Held
from dart.screenshots.lookup import BadScreenshot, UnknownScreenshot, filled
from dart.screenshots.shared import SharedScreenshots


class Holder:
    """`shared`: where those are that come without bytes and are not held."""

    def __init__(self, entries: int, shared: SharedScreenshots | None = None) -> None:
        self._shared = shared
        self.held: Held[Image | None] = Held(entries)
        """None for one that was told of and could not be had: its place is taken all the same, as in the mirror."""

    def resolve(self, images: Sequence[Image]) -> list[Image]:
        """One message's screenshots, in order, with their bytes; they are kept.

        Raises the first UnknownScreenshot or BadScreenshot, after all of them are noted: the coordinator has noted all
        of them, too.
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
