"""One rank's share of an update as messages: pages of samples, and of the screenshots that they name.

Invariants: every sample is on one page; every screenshot's bytes are on at most one, if the worker can look for them
there; no page is larger than a message may be. A sample that is too large by itself is reported by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dart.core.types import Image, Sample
from dart.v1 import session_pb2 as pb
from dart.wire.capabilities import IMAGES_APART, IMAGES_ONCE, has
from dart.wire.channel import IMAGE_BYTES, MAX_MESSAGE_BYTES, ROOM_BYTES
from dart.wire.convert import write_image, write_sample

PAGE_BYTES = MAX_MESSAGE_BYTES * 3 // 4
NAME_BYTES = 1024
"""The most bytes of a sample's names and numbers."""


class TooLarge(Exception):
    """A sample does not fit into any message."""

    def __init__(self, sample: Sample, what: str, size: int) -> None:
        super().__init__(
            f"{sample.name} {what} {size} bytes, and a message has room for {ROOM_BYTES}: shorten the history "
            "(agent.history_turns, history_screenshots) or make screenshots smaller"
        )
        self.trajectories = (sample.trajectory_id,)


def pages_of(samples: Sequence[Sample], rank: pb.Hello) -> list[pb.SessionResponse]:
    """The messages for the rank with this Hello: at least one, which may be empty. Raises TooLarge."""
    pages = _Pages()
    sent: set[bytes] = set()
    apart, once = has(rank, IMAGES_APART), has(rank, IMAGES_ONCE)
    for sample in samples:
        if apart:
            for image in sample.images:
                if image.data and image.sha256 not in sent:
                    size = _image_bytes(image)
                    write_image(pages.with_room(size, sample, "has a screenshot of").images.add(), image)
                    sent.add(image.sha256)
        size = _sample_bytes(sample, sent)
        write_sample(pages.with_room(size, sample, "has").samples.add(), sample, held=sent)
        if once:
            sent.update(image.sha256 for image in sample.images)
    return pages.messages


class _Pages:
    def __init__(self) -> None:
        self.messages = [pb.SessionResponse(train_batch=pb.TrainBatch())]
        self._size = 0

    def with_room(self, size: int, sample: Sample, what: str) -> pb.TrainBatch:
        """A page with room for `size` bytes of the sample."""
        if size > ROOM_BYTES:
            raise TooLarge(sample, what, size)
        if self._size and self._size + size > PAGE_BYTES:
            self.messages.append(pb.SessionResponse(train_batch=pb.TrainBatch()))
            self._size = 0
        self._size += size
        return self.messages[-1].train_batch


def _image_bytes(image: Image) -> int:
    return IMAGE_BYTES + len(image.data)


def _sample_bytes(sample: Sample, sent: Collection[bytes]) -> int:
    """An upper bound: five bytes a token, four a log-probability, names and numbers, and screenshots sent with it."""
    generation = sample.generation
    images = sum(IMAGE_BYTES if image.sha256 in sent else _image_bytes(image) for image in sample.images)
    return images + 5 * sample.tokens + 4 * len(generation.logprobs) + 32 * len(generation.versions) + NAME_BYTES
