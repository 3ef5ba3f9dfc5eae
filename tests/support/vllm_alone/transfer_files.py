"""vLLM's own weight-transfer files without the rest of vLLM, on a CPU: of the installed version or of the pinned one.

Everything that the files import from the rest of vLLM is replaced by the little that they use of it. NCCL is replaced
by `Communicator`, which copies from one thread to another, and CUDA streams by nothing: the copies are made at once.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_alone.stand_ins import replaced_modules

GPU_FILES = Path(__file__).parents[3] / "build" / "vllm-gpu"
"""Where `make gpu-files` puts the files of the vLLM that the extra `gpu` pins."""
RENDEZVOUS_SECONDS = 20.0


def installed() -> Path | None:
    """The folder of the installed vLLM, which is not imported."""
    found = importlib.util.find_spec("vllm")
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


@dataclass
class Wire:
    """One group: a barrier where its ranks meet, and for each rank but 0 what was sent to it and has not arrived."""

    met: threading.Barrier
    sent: dict[int, queue.Queue[torch.Tensor]] = field(default_factory=dict)


class Communicator:
    """Takes the place of vLLM's PyNcclCommunicator. `broadcast` of a receiving rank waits for ever, as NCCL does."""

    disabled = False
    """Whether vLLM has found that it cannot use NCCL."""

    def __init__(self, group: SimpleNamespace, device: object) -> None:
        self._rank, self._wire = group.rank, group.wire
        self.closed = False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        assert src == 0 and not self.closed
        if self._rank:
            tensor.copy_(self._wire.sent[self._rank].get())
        else:
            for line in self._wire.sent.values():
                line.put(tensor.clone())

    def destroy(self) -> None:
        self.closed = True


class _Stream:
    def synchronize(self) -> None: ...

    def wait_event(self, event: object) -> None: ...


class _Event:
    def record(self, stream: object) -> None: ...


def _groups() -> Any:
    wires: dict[int, Wire] = {}  # by port: the trainer listens on every address
    lock = threading.Lock()

    def create(host: str, port: int, rank: int, world_size: int, **_: object) -> SimpleNamespace:
        with lock:
            wire = wires.setdefault(port, Wire(threading.Barrier(world_size)))
            if rank:
                wire.sent[rank] = queue.Queue()
        try:
            wire.met.wait(RENDEZVOUS_SECONDS)
        except threading.BrokenBarrierError:
            raise RuntimeError("nobody came") from None
        return SimpleNamespace(rank=rank, wire=wire)

    return SimpleNamespace(create=create)


def _stand_ins(vllm: Path) -> dict[str, dict[str, object]]:
    """What the rest of vLLM is for its transfer files, by module; a module with `__path__` has real files below it."""
    return {
        "vllm": {},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.config": {},
        "vllm.config.parallel": {"ParallelConfig": object},
        "vllm.config.weight_transfer": {"WeightTransferConfig": object},
        "vllm.distributed": {"__path__": [str(vllm / "distributed")]},
        "vllm.distributed.utils": {"StatelessProcessGroup": _groups()},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": Communicator},
        "vllm.distributed.device_communicators.pynccl_wrapper": {"NCCL_UNIQUE_ID_BYTES": 128},
        "vllm.utils": {},
        "vllm.utils.nccl": {"unpinned_nccl_env": contextlib.nullcontext},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.mtp_validation": {"disable_mtp_completeness_check": contextlib.nullcontext},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: None,
            "finalize_layerwise_reload": lambda model, config: None,
        },
    }


@contextlib.contextmanager
def transfer_files(vllm: Path) -> Iterator[ModuleType]:
    """`dart.workers.weights.nccl`, as it is with the transfer files of the vLLM in this folder."""
    name = "dart.workers.weights.nccl"
    with pytest.MonkeyPatch.context() as patch, replaced_modules(_stand_ins(vllm), name):
        patch.setattr(torch.cuda, "Stream", lambda device: _Stream())
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        patch.setattr(torch.cuda, "current_stream", _Stream)
        patch.setattr(torch.accelerator, "current_stream", _Stream)
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        patch.setattr(torch, "Event", _Event)
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
        yield importlib.import_module(name)
