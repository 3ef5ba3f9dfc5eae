"""A device, a scale, and how time and memory are taken on it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.subject import Scale

Result = dict[str, object]


@dataclass
class Bench:
    device: torch.device
    scale: Scale
    repeats: int = 3
    """Calls that are timed, after one that is not; 0: one call alone, to see that it runs."""
    fused: bool = True
    """`trainer.fused_kernels`."""
    peak: float | None = None
    """Measured bfloat16 operations per second of a large matrix product; None until it has been measured."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """The median of `repeats` calls, after one that is not counted."""
        if self.repeats:
            call()
        taken = []
        for _ in range(max(1, self.repeats)):
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most bytes allocated during the call, with those from before it; None on a CPU, where it is not made."""
        if not self.on_gpu:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.wait()
        return int(torch.cuda.max_memory_allocated(self.device))

    def clear(self) -> None:
        """Give back what nothing holds any more."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def utilisation(self, operations: float, seconds: float) -> float | None:
        """Of the measured peak; None where that is unknown."""
        return None if self.peak is None else round(operations / seconds / self.peak, 4)
