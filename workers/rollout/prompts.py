"""Prompts as vLLM takes them, with the names under which it caches what it has computed of them. Loads no vLLM.

vLLM's image cache has a half on each side of a process boundary, and either half may believe that the other one has a
picture. Where they may disagree the picture gets another name, because vLLM would fail every later request with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Required, TypedDict

from dart.core.types import Image
from dart.screenshots.picture import opened

if TYPE_CHECKING:  # vLLM takes seconds to import, and is imported when the engine starts.
    from PIL.Image import Image as Picture
    from vllm.multimodal.media import MediaWithBytes


MOST_RENAMED = 50_000
"""Names kept, some 10 MB; with one more, everything that is cached gets another name instead."""


class EnginePrompt(TypedDict, total=False):
    """What vLLM takes as a prompt: token ids with one pad per screenshot, and the screenshots in that order."""

    prompt_token_ids: Required[list[int]]
    cache_salt: Required[str]
    multi_modal_data: dict[str, list[Picture | MediaWithBytes[Picture]]]
    multi_modal_uuids: dict[str, list[str]]


class Prompts:
    """The prompts of one engine. `caches_images`: whether vLLM keeps processed screenshots."""

    def __init__(self, *, caches_images: bool) -> None:
        self._caches_images = caches_images
        self._salt = 0
        """Part of every cache key: incrementing it invalidates everything that is cached."""
        self._renamed: Counter[bytes] = Counter()
        """How often each screenshot, by its SHA-256, has been renamed under this salt."""

    def forget(self) -> None:
        """Nothing that vLLM has cached up to now is used again."""
        self._salt += 1
        self._renamed.clear()

    def rename(self, images: Iterable[Image]) -> None:
        """Nothing that vLLM has cached of these screenshots is used again."""
        self._renamed.update(image.sha256 for image in images)
        if len(self._renamed) > MOST_RENAMED:
            self.forget()

    def made(self, ids: list[int], images: Sequence[Image]) -> EnginePrompt:
        """The prompt with these token ids and screenshots, one for each pad."""
        prompt: EnginePrompt = {"prompt_token_ids": ids, "cache_salt": f"{self._salt}"}
        if images:
            # With an id of its own an image is not hashed, and within `MediaWithBytes` not decoded while vLLM still
            # holds its processed form. It is always passed along, because vLLM may have evicted that.
            prompt["multi_modal_data"] = {"image": [self._undecoded(image) for image in images]}
            prompt["multi_modal_uuids"] = {"image": [self._name(image) for image in images]}
        return prompt

    def _name(self, image: Image) -> str:
        return f"{image.sha256.hex()}-{self._salt}-{self._renamed[image.sha256]}"

    def _undecoded(self, image: Image) -> Picture | MediaWithBytes[Picture]:
        """A picture that vLLM decodes when it processes it, which it does once while its cache holds the result."""
        from vllm.multimodal.media import MediaWithBytes

        # Without a cache vLLM takes what is within as it is, where it should be turned upright and made RGB.
        return MediaWithBytes(opened(image), image.data) if self._caches_images else opened(image)
