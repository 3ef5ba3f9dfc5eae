"""Weights over NCCL, with vLLM's own trainer engine (0.32 and 0.33): the GPU transport, the trainer's end.

The receiving end is vLLM's built-in "nccl" engine. Here the coordinator tells both ends when to act, so the `client`
through which vLLM's trainer engine would call the replica does nothing.

CI has no GPU: tests/workers/weights/test_weights_nccl.py runs this with the transfer files of both vLLM versions and a
communicator that copies in memory, and NCCL itself is not run. NCCL does not time out by itself: if a replica dies
during a broadcast, the sending thread hangs in it, and so does the GPU: vLLM's streams, which all transfers share, wait
for the broadcast's end. `open` and `send` therefore give up waiting after the timeout, or when they are told that the
transfer has ended (`make_sender`). They then do what `close` does: they abort the communicator, which ends the
broadcast on the GPU. The thread is abandoned.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from dart.core.capacity.memory import PACK
from dart.v1 import weights_pb2 as wpb
from dart.workers.weights.transfer import TransferError, reason

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

EVERYWHERE = "0.0.0.0"
"""vLLM listens on the address that it is given. The name by which replicas reach this machine may, here, be that of the
loopback (127.0.1.1 on Debian), or a router's."""
ABORT_SECONDS = 10.0
"""How long an abort is waited for; vLLM gives it 5 s."""
DISABLED = (
    "vLLM has disabled NCCL in this process, and would send nothing: unset VLLM_DISABLE_PYNCCL or, if it is not set, "
    "set VLLM_NCCL_SO_PATH to a libnccl that can be loaded (the log says which cannot); or set sync.transport: gloo"
)
T = TypeVar("T")
Named = Sequence[tuple[str, torch.Tensor]]


class NcclSender:
    """`Sender` over NCCL; see `dart.workers.weights.transfer`."""

    def __init__(self, timeout_seconds: float, ended: Future[str] | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._ended = ended or Future()
        self._group_id = ""
        self._engine: TrainerWeightTransferEngine | None = None

    def open(self, group: wpb.TransferGroup) -> None:
        if self._engine is not None and self._group_id == group.group_id:
            return
        self.close()

        def join() -> TrainerWeightTransferEngine:
            info = NCCLTrainerInitInfo(
                master_address=EVERYWHERE, master_port=group.port, world_size=group.world_size, rank=0,
                packed_buffer_size_bytes=PACK,
            )  # fmt: skip
            engine = WeightTransferTrainerFactory.trainer_init(info, client=_NoClient(), source=source_of([]))
            if engine.model_update_group.disabled:
                raise TransferError(DISABLED)
            engine.model_update_group = _Guarded(engine.model_update_group)
            return engine

        self._engine = self._bounded(
            join, f"group {group.group_id} was not joined", too_late=lambda engine: engine.shutdown()
        )
        self._group_id = group.group_id

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        engine, named = self._engine, list(tensors)
        if engine is None:
            raise TransferError("no group is open")
        # A source of its own for each transfer: vLLM 0.33 asks a source for its metadata once, for good.
        engine.source = source_of(named)
        try:
            self._bounded(engine.send_weights, f"group {self._group_id}: the transfer did not finish")
            return sum(tensor.numel() * tensor.element_size() for _, tensor in named)
        finally:
            engine.source = source_of([])

    def close(self) -> None:
        """Abort the communicator, in a thread of its own in case that hangs, too."""
        engine, self._engine = self._engine, None
        if engine is None:
            return

        def abort() -> None:
            with contextlib.suppress(Exception):  # nothing is left to be done about it
                engine.shutdown()

        thread = threading.Thread(target=abort, daemon=True, name="nccl-abort")
        thread.start()
        thread.join(ABORT_SECONDS)

    def _bounded(self, work: Callable[[], T], what: str, too_late: Callable[[T], object] = lambda _: None) -> T:
        """Run `work` in a thread of its own and wait for it, no longer than the timeout and until the transfer has
        ended. `too_late` gets what it returns afterwards. Raises TransferError."""
        device = torch.accelerator.current_device_index()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                torch.accelerator.set_device_index(device)  # A new thread starts on device 0.
                made = work()
            except Exception as error:  # noqa: BLE001 - whatever it is, the transfer has failed and the worker goes on
                with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
                    outcome.set_exception(error)
                return
            try:
                outcome.set_result(made)
            except InvalidStateError:
                too_late(made)

        threading.Thread(target=run, daemon=True, name="nccl-transfer").start()
        awaited: list[Future[Any]] = [outcome, self._ended]
        first = wait(awaited, self._timeout_seconds, FIRST_COMPLETED).done
        try:
            if outcome in first or not outcome.cancel():
                return outcome.result()
            why = self._ended.result() if first else f"no answer within {self._timeout_seconds:.0f} s"
        except Exception as error:  # noqa: BLE001 - the one that `run` caught
            why = reason("nccl", error)
        self.close()
        raise TransferError(f"{what}: {why}")


class _Guarded:
    """A communicator that is not used once its destruction has begun.

    NCCL's abort first ends the broadcast on the GPU, so that the sending thread wakes and goes on with the next pack,
    and then frees the communicator; a broadcast does not ask whether it is being aborted, and would use freed memory
    (ncclCommAbort and ncclEnqueueCheck in NCCL 2.30). A flag alone would leave a moment between the question and the
    broadcast, so both are done under a lock, and the abort begins only when nobody is inside NCCL. It seldom waits for
    that, because a broadcast only joins the GPU's queue. The first one of a group may also wait for the replica to
    connect; then an abort waits, too, and nothing of the group occupies the GPU meanwhile.
    """

    def __init__(self, communicator: PyNcclCommunicator) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._destroyed = False

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        with self._lock:
            if self._destroyed:
                raise TransferError("the group has been left")
            self._communicator.broadcast(tensor, src=src)

    def destroy(self) -> None:
        with self._lock:
            self._destroyed = True
        self._communicator.destroy()


class _Snapshot(WeightSource):  # type: ignore[misc]
    """The tensors of one transfer, which never change. What vLLM asks for has other names in each version."""

    def __init__(self, tensors: Named) -> None:
        self._tensors = tensors
        accelerator = torch.accelerator.current_accelerator()
        self._device = torch.device(
            accelerator.type if accelerator else "cpu", torch.accelerator.current_device_index()
        )

    def _described(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors]

    def _moved(self) -> Iterator[tuple[str, torch.Tensor]]:
        # A snapshot is in host memory, where training does not change it; NCCL sends from the accelerator's memory.
        return ((name, tensor.to(self._device, non_blocking=True)) for name, tensor in self._tensors)


def source_of(tensors: Named) -> WeightSource:
    """The tensors as the installed vLLM's trainer engine reads them, in this order."""
    return _source_class()(tensors)


def _source_class() -> Callable[[Named], WeightSource]:
    if hasattr(WeightSource, "iter_full"):  # vLLM 0.33 has two ways to iterate, and an attribute for the metadata

        class WithAttribute(_Snapshot):
            @cached_property
            def metadata(self) -> list[ParamMeta]:
                return self._described()

            def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
                return self._moved()

        return WithAttribute

    class WithMethod(_Snapshot):
        def metadata(self) -> list[ParamMeta]:
            return self._described()

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self._moved()

    return WithMethod


class _NoClient:
    """The replica's side of the handshake is driven by the coordinator's LoadWeights."""

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: object) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
