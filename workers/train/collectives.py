"""Collective operations: sums and maxima over ranks, values shown to all, and work that all ranks do or none.

With one rank, the results are its own values. A rank that gives up must not leave the others waiting for it in a
collective: `together` is for work that may fail.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState

from dart.core.loopback import is_loopback
from dart.errors import UserError
from dart.screenshots.lookup import UnknownScreenshot
from dart.workers.train.errors import CancelledUpdateError, SampleError, TrainError, UnknownScreenshotError
from dart.workers.weights.gloo import own_address

T = TypeVar("T")

LONGEST_WAIT = timedelta(minutes=30)
"""How long a rank waits in a collective before it ends: another may load a large model from a slow file system."""
LONGEST_WRITE = timedelta(days=1)
"""How long a rank waits for the others while a checkpoint is written."""
INTERFACE = "GLOO_SOCKET_IFNAME"
BUCKET_ELEMENTS = 1 << 26
"""Gradients are added in flat buckets of at most this many elements (one tensor may be larger)."""


def all_sum(values: Sequence[float], device: torch.device) -> list[float]:
    """Each value summed over ranks. float64, so that token counts stay exact."""
    return _reduce(values, device, dist.ReduceOp.SUM)


def all_max(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over ranks."""
    return _reduce(values, device, dist.ReduceOp.MAX)


def init() -> PartialState:
    """Make this process a rank: its process group, and the settings of torch that all ranks share. Raises UserError for
    GPUs that torch cannot use.

    vLLM, which sends weights over NCCL, switches cuDNN's attention off in the whole process when it is imported. Ranks
    that differ in it wait for the slowest, so all of them have torch's default.
    """
    usable = torch.cuda.is_available()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if torch.version.cuda and not usable and not hidden and Path("/dev/nvidia0").exists():
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's GPUs: most likely the NVIDIA driver is too old for "
            f"its CUDA {torch.version.cuda} (CUDA 13 needs 580): update the driver, or set CUDA_VISIBLE_DEVICES= to "
            "train on the CPU"
        )
    if usable:
        torch.backends.cuda.enable_cudnn_sdp(True)
        # Rows of ever other lengths would leave memory in pieces that no later row fits into.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    _name_interface()
    return PartialState(cpu=not usable, timeout=LONGEST_WAIT)


def _name_interface() -> None:
    """Where ranks are on several machines, gloo would use the address of this one's own name, which Debian makes a
    loopback one."""
    host = os.environ.get("MASTER_ADDR", "")
    if not host or is_loopback(host) or INTERFACE in os.environ:
        return
    with contextlib.suppress(OSError):
        own = own_address(host, int(os.environ.get("MASTER_PORT", "29500")))
        for name, addresses in psutil.net_if_addrs().items():
            if own in (one.address for one in addresses):
                os.environ[INTERFACE] = name


def take(device: torch.device) -> torch.device:
    """Make the rank's GPU the calling thread's current device, so that its collectives use it. Returns the device.

    Accelerate chooses it once for a process, in one thread, and a worker that is prepared anew has another.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def rank() -> int:
    """This rank's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def group_of_all() -> dist.ProcessGroup:
    """All ranks once more, in host memory: for a thread whose collectives must not mix with those of the others.

    They wait as long as the slowest of them works: one rank writes and reads a whole checkpoint while the others wait,
    and a group that has given up once is of no use any more. A rank that dies ends the wait.
    """
    return dist.new_group(backend="gloo", timeout=LONGEST_WRITE)


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank. Values travel as pickles, so keep them small. group: another than the usual one."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values  # type: ignore[return-value]


def _reduce(values: Sequence[float], device: torch.device, operation: dist.ReduceOp) -> list[float]:
    if not dist.is_initialized():
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    result: list[float] = tensor.tolist()
    return result


def add_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors of one dtype over ranks, in place. All ranks pass the same shapes in the same order."""
    if not dist.is_initialized():
        return
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS:
            _add_bucket(bucket)
            bucket = []
        bucket.append(tensor)
    if bucket:
        _add_bucket(bucket)


def _add_bucket(bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank reports to the others about its problem."""

    kind: str
    message: str
    trajectories: tuple[str, ...]


def together(work: Callable[[], T], what: str, device: torch.device) -> T:
    """This rank's result, if no rank has failed. All ranks call it at the same time.

    If any has failed, every rank raises SampleError with the trajectories that any of them blames,
    UnknownScreenshotError if any lacks a screenshot, else TrainError. (The equations raise ValueError for bad numbers.)
    """
    result, problem = attempt(work)
    raise_together(problem, what, device)
    return result  # type: ignore[return-value]


def attempt(work: Callable[[], T]) -> tuple[T | None, TrainError | None]:
    """This rank's result, or its problem as a TrainError."""
    try:
        return work(), None
    except TrainError as error:
        return None, error
    except UnknownScreenshot as error:
        return None, UnknownScreenshotError(str(error))
    except ValueError as error:
        return None, TrainError(str(error))
    except torch.OutOfMemoryError as error:
        return None, TrainError(f"the device's memory is full ({error}): lower trainer.microbatch_tokens")


def raise_together(problem: TrainError | None, what: str, device: torch.device) -> None:
    """Raise on every rank if any has a problem."""
    (failed,) = all_sum([float(problem is not None)], device)
    if not failed:
        return
    reports = [report for report in all_gather(_report(problem)) if report is not None]
    if isinstance(problem, CancelledUpdateError):
        raise problem
    for kind, error in (("unknown", UnknownScreenshotError), ("sample", SampleError)):
        if these := [report for report in reports if report.kind == kind]:
            mine = isinstance(problem, error)
            message = str(problem) if mine else f"another rank could not {what}: {these[0].message}"
            # Every rank blames the same ones: the coordinator goes by whichever answer comes first.
            blamed = sorted({trajectory for report in these for trajectory in report.trajectories})
            raise error(message, blamed) from problem
    raise problem or TrainError(f"another rank could not {what}: {reports[0].message}")


def _report(problem: TrainError | None) -> _Report | None:
    match problem:
        case None:
            return None
        case UnknownScreenshotError():
            return _Report("unknown", str(problem), problem.trajectories)
        case SampleError():
            return _Report("sample", str(problem), problem.trajectories)
        case _:
            return _Report("other", str(problem), ())
