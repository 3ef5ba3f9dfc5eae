"""The staged weights of the newest versions, each immutable, kept for as long as a transfer may want them.

Kept are the newest version, those being sent, and the one before the newest until a transfer of the newest is asked
for: a command to send the older one may have crossed the report of the newer one on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Weights = dict[str, torch.Tensor]


class Snapshots:
    """Owned by the role; used from the event loop only."""

    def __init__(self) -> None:
        self._weights: dict[int, Weights] = {}
        self._sending: dict[int, int] = {}
        self._newest = -1
        self._newest_asked_for = False

    @property
    def versions(self) -> list[int]:
        return sorted(self._weights)

    def stage(self, version: int, weights: Weights) -> None:
        if version <= self._newest:
            raise ValueError(f"version {version} is not newer than {self._newest}")
        previous, self._newest, self._newest_asked_for = self._newest, version, False
        self._weights[version] = weights
        self._drop(keep=previous)

    @contextmanager
    def sending(self, version: int) -> Iterator[Weights]:
        """The version's weights, kept for as long as the context is open. Raises KeyError when they are gone."""
        weights = self._weights[version]
        self._sending[version] = self._sending.get(version, 0) + 1
        self._newest_asked_for = self._newest_asked_for or version == self._newest
        try:
            yield weights
        finally:
            self._sending[version] -= 1
            if not self._sending[version]:
                del self._sending[version]
            previous = max((v for v in self._weights if v != self._newest), default=None)
            self._drop(keep=None if self._newest_asked_for else previous)

    def _drop(self, keep: int | None) -> None:
        for version in list(self._weights):
            if version not in (self._newest, keep) and version not in self._sending:
                del self._weights[version]
