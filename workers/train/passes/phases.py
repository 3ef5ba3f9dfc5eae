"""The seconds of an update by phase, which tell where its time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

READ, SCORE, GRADIENT, REDUCE, STEP = NAMES = ("read", "score", "gradient", "reduce", "step")
"""Reading and checking the samples; the forward pass that scores them before the first optimiser step; forward and
backward passes of the micro-batches, and their inputs; adding gradients over ranks and their norm; clipping, and the
optimiser's step."""


class Phases:
    """Times the phases of one update on this rank. A phase that is timed several times is added up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = dict.fromkeys(NAMES, 0.0)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Counts what is run within, until this thread's stream on the device has finished it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                # Kernels run on after they were started, and would be counted with the next phase. Only this stream's
                # are waited for: a broadcast of weights may be waiting for its replica on another.
                torch.cuda.current_stream(self._device).synchronize()
            self._seconds[name] += time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`read_seconds` and so on. What they leave of `update_seconds` is selection and metrics."""
        return {f"{name}_seconds": seconds for name, seconds in self._seconds.items()}
