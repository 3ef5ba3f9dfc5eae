"""Which of this machine's GPUs each local worker gets, so that no two share one where there are enough."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from dart.config import Config
from dart.core.capacity import devices
from dart.errors import UserError
from dart.job import Job, Train

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
DESCRIBE = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
LIST_SECONDS = 30.0
LEAST_DRIVER = 580
"""What CUDA 13 needs, for which the pinned torch and vLLM are built."""


@dataclass(frozen=True, slots=True)
class Placement:
    """`trainer`: a GPU for each rank. `replicas`: for each replica, one for each rank of its engine. Empty: none."""

    trainer: tuple[str, ...] = ()
    replicas: tuple[tuple[str, ...], ...] = ()

    def of_trainer(self) -> dict[str, str]:
        """Environment variables."""
        return _visible(self.trainer)

    def of_replica(self, index: int) -> dict[str, str]:
        return _visible(self.replicas[index]) if self.replicas else {}


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    """CUDA by itself numbers the fastest card first; nvidia-smi, by which they were chosen, goes by their slots."""
    by_slot = {} if VISIBLE in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {VISIBLE: ",".join(gpus), **by_slot} if gpus else {}


def gpus_here() -> list[str]:
    """By CUDA_VISIBLE_DEVICES where it is set, else all that nvidia-smi lists; none without it."""
    if (named := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return _asked(LIST).split()


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as nvidia-smi describes it."""

    name: str
    bytes: int


def cards_of(gpus: Sequence[str]) -> dict[str, Card]:
    """The cards of those of `gpus` (indexes or UUIDs, also shortened) that nvidia-smi describes; not of MIG slices."""
    if not gpus:
        return {}
    found: dict[str, Card] = {}
    for line in _asked(DESCRIBE).splitlines():
        index, uuid, mebibytes, name = (*(cell.strip() for cell in line.split(",", 3)), "", "", "", "")[:4]
        if name and mebibytes.isdigit():
            here = (gpu for gpu in gpus if gpu == index or (gpu.startswith("GPU-") and uuid.startswith(gpu)))
            found |= dict.fromkeys(here, Card(name, int(mebibytes) << 20))
    return found


def old_driver() -> str | None:
    """The NVIDIA driver's version if it is older than CUDA 13 needs. NVIDIA's cuda-compat may make up for that."""
    version = next(iter(_asked(DRIVER).split()), "")
    major = version.split(".")[0]
    return version if major.isdigit() and int(major) < LEAST_DRIVER else None


def _asked(command: Sequence[str]) -> str:
    """What nvidia-smi prints; empty without it, or if it fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIST_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def place(config: Config, job: Job, gpus: Sequence[str]) -> Placement:
    """The trainer's ranks first, then the replicas, each on GPUs of its own; over gloo replicas share those of ranks
    and of each other.

    Raises UserError where there are too few for the ranks or for one replica, or for NCCL, which cannot work between
    two processes on one GPU.
    """
    ranks = config.trainer.ranks if isinstance(job, Train) else 0
    replicas, parallel = job.replicas(config), config.rollout.gpus
    needed = ranks + replicas * parallel
    if ranks and replicas and config.sync.transport == "nccl" and len(gpus) < needed:
        raise UserError(
            f"sync.transport: nccl needs a GPU for each of trainer.ranks ({ranks}) and rollout.replicas ({replicas}) "
            f"x rollout.tensor_parallel ({config.rollout.tensor_parallel}) x rollout.pipeline_parallel "
            f"({config.rollout.pipeline_parallel}), {needed} in all, and this machine has {len(gpus)}: lower one of "
            "them, or set sync.transport: gloo, with which a rank and a replica may share one"
        )
    if not gpus:
        return Placement()
    uses_them = not devices.on_cpu()
    if uses_them and ranks > len(gpus):  # over NCCL among themselves, whatever the transport to the replicas is
        raise UserError(
            f"trainer.ranks ({ranks}): each needs a GPU of its own, and this machine has {len(gpus)}: lower it"
        )
    if uses_them and replicas and parallel > len(gpus):
        raise UserError(
            f"rollout.tensor_parallel ({config.rollout.tensor_parallel}) x rollout.pipeline_parallel "
            f"({config.rollout.pipeline_parallel}): each replica needs {parallel} GPUs, and this machine has "
            f"{len(gpus)}: lower one of them"
        )

    def some(first: int, number: int) -> tuple[str, ...]:
        return tuple(gpus[(first + i) % len(gpus)] for i in range(number))

    return Placement(some(0, ranks), tuple(some(ranks + i * parallel, parallel) for i in range(replicas)))
