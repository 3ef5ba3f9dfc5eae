"""Weights over NCCL, with vLLM's own trainer engine (0.32 and 0.33): the GPU transport, the trainer's end.

The receiving end is vLLM's built-in "nccl" engine. Here the coordinator tells both ends when to act, so the `client`
through which vLLM's trainer engine would call the replica does nothing.

CI has no GPU and does not run this, so it is kept small and written against vLLM's source. NCCL does not time out by
itself: if a replica dies during a broadcast, the sending thread hangs in it. `send` therefore gives up waiting after
the timeout and abandons that thread and its communicator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from dart.v1 import weights_pb2 as wpb
from dart.workers.weights.transfer import TransferError

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

T = TypeVar("T")


class NcclSender:
    """`Sender` over NCCL; see `dart.workers.weights.transfer`."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._group_id = ""
        self._engine: TrainerWeightTransferEngine | None = None
        self._source = _Snapshot()

    def open(self, group: wpb.TransferGroup) -> None:
        if self._engine is not None and self._group_id == group.group_id:
            return
        self.close()
        self._source.device = _device()
        info = NCCLTrainerInitInfo(
            master_address=group.host, master_port=group.port, world_size=group.world_size, rank=0
        )
        self._engine = self._bounded(
            lambda: WeightTransferTrainerFactory.trainer_init(info, client=_NoClient(), source=self._source),
            f"group {group.group_id} was not joined",
        )
        self._group_id = group.group_id

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        if self._engine is None:
            raise TransferError("no group is open")
        self._source.tensors = list(tensors)
        try:
            self._bounded(self._engine.send_weights, f"group {self._group_id}: the transfer did not finish")
            return sum(tensor.numel() * tensor.element_size() for _, tensor in self._source.tensors)
        finally:
            self._source.tensors = []

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _bounded(self, work: Callable[[], T], what: str) -> T:
        """Run `work` in a thread of its own and wait for it no longer than the timeout."""
        import torch

        device = torch.accelerator.current_device_index()
        outcome: list[T] = []
        failure: list[Exception] = []

        def run() -> None:
            torch.accelerator.set_device_index(device)  # A new thread starts on device 0.
            try:
                outcome.append(work())
            except (RuntimeError, ValueError, OSError, AssertionError) as error:
                failure.append(error)

        thread = threading.Thread(target=run, daemon=True, name="nccl-transfer")
        thread.start()
        thread.join(self._timeout_seconds)
        if outcome:
            return outcome[0]
        self._engine = None  # Not shut down: a stuck communicator would block that, too.
        reason = failure[0] if failure else f"no answer within {self._timeout_seconds:.0f} s"
        raise TransferError(f"{what}: {reason}")


def _device() -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type if accelerator else "cpu", torch.accelerator.current_device_index())


class _Snapshot(WeightSource):  # type: ignore[misc]
    """The tensors of the transfer in progress."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.device: torch.device | None = None

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A snapshot is in host memory, where training does not change it; NCCL sends from the accelerator's memory.
        return ((name, tensor.to(self.device, non_blocking=True)) for name, tensor in self.tensors)


class _NoClient:
    """The replica's side of the handshake is driven by the coordinator's LoadWeights."""

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
