"""Weights over gloo: the CPU transport, both ends. Needs only torch.

A transfer is one fingerprint (8 bytes), one broadcast per bucket from rank 0, and a barrier, so that `send` returns
when the replica has everything. Gloo notices at once when a peer dies (its connection closes), and after the timeout
when one hangs; nothing else ends a broadcast, so a transfer that is to end early does before its next bucket.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist

from dart.core.loopback import is_loopback
from dart.errors import first_line
from dart.shortage import of_program
from dart.v1 import weights_pb2 as wpb
from dart.workers.weights.transfer import BUCKET_BYTES, TensorSpec, TransferError, fingerprint, plan_buckets, spec_of

ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""
SHORT_SECONDS = 0.5


class Group:
    """One joined group. `close` may be called twice."""

    def __init__(
        self, group_id: str, host: str, port: int, *, rank: int, world_size: int, timeout_seconds: float
    ) -> None:
        """Join, waiting for all ranks. Raises TransferError."""
        self.group_id = group_id
        self.timeout = timedelta(seconds=timeout_seconds)
        try:
            # Otherwise gloo uses the address that the machine's name resolves to, which may be unreachable or absent.
            # First, because a store retries a name that nobody knows until its time is up, and then does not say why.
            device = _device(own_address(host, port), timeout_seconds)
            self._store = dist.TCPStore(
                host, port, world_size, is_master=rank == 0, timeout=self.timeout, wait_for_workers=False
            )
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self.timeout
            options._devices = [device]
            store = dist.PrefixStore(group_id, self._store)
            self._group = dist.ProcessGroupGloo(store, rank, world_size, options)
        except (RuntimeError, OSError) as error:
            raise TransferError(
                f"group {group_id} at {host}:{port}: rank {rank} could not join: {first_line(error)}"
            ) from None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast from rank 0 to all. Raises TransferError."""
        self.begin_broadcast(tensor)()

    def begin_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin a broadcast; call the returned function to wait for it, and leave the tensor alone until then."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self.timeout
        try:
            work = self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._broken(error) from None

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._broken(error) from None

        return wait

    def _broken(self, error: RuntimeError) -> TransferError:
        return TransferError(f"group {self.group_id}: a broadcast failed: {first_line(error)}")

    def barrier(self) -> None:
        """Wait until all ranks are here. Raises TransferError."""
        options = dist.BarrierOptions()
        options.timeout = self.timeout
        try:
            self._group.barrier(options).wait()
        except RuntimeError as error:
            raise TransferError(f"group {self.group_id}: the barrier failed: {first_line(error)}") from None

    def close(self) -> None:
        """Leave. Peers that wait in a broadcast then fail."""
        self._group = None
        self._store = None


def _device(address: str, timeout_seconds: float) -> object:
    """What the machine is short of is waited for: the other ends would wait as long, and nobody would tell them."""
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            return dist.ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            short = of_program(error, str(error))
            if not short:
                raise
            if time.monotonic() > until:
                raise OSError(short) from None
        time.sleep(SHORT_SECONDS)


class GlooSender:
    """`Sender` over gloo; see `dart.workers.weights.transfer`.

    One bucket is packed while the one before it is sent. The two buffers are kept from one transfer to the next:
    allocating them each time would cost more than filling them.
    """

    def __init__(self, timeout_seconds: float, ended: Future[str] | None = None) -> None:
        self._timeout_seconds = timeout_seconds
        self._ended = ended or Future()
        self._group: Group | None = None
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def open(self, group: wpb.TransferGroup) -> None:
        if self._group is not None and self._group.group_id == group.group_id:
            return
        self.close()
        self._group = Group(
            group.group_id,
            group.host,
            group.port,
            rank=0,
            world_size=group.world_size,
            timeout_seconds=self._timeout_seconds,
        )

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        if self._group is None:
            raise TransferError("no group is open")
        named = {name: tensor.detach() for name, tensor in tensors}
        specs = [spec_of(name, tensor) for name, tensor in named.items()]
        try:
            self._group.broadcast(torch.tensor([fingerprint(specs)], dtype=torch.int64))
            sent = 0
            arrived: Callable[[], None] = _nothing
            for number, bucket in enumerate(plan_buckets(specs, BUCKET_BYTES)):
                if self._ended.done():
                    raise TransferError(f"group {self._group.group_id}: {self._ended.result()}")
                buffer = self._pack(number % 2, [named[spec.name] for spec in bucket])
                arrived()
                arrived = self._group.begin_broadcast(buffer)
                sent += buffer.numel()
            arrived()
            # A broadcast ends when the bytes are in the kernel's buffers, not when the replica has them.
            self._group.barrier()
            return sent
        except TransferError:
            self.close()
            raise

    def _pack(self, which: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        pieces = [_bytes_of(tensor) for tensor in tensors]
        size = sum(piece.numel() for piece in pieces)
        if self._buffers[which].numel() < size:
            self._buffers[which] = torch.empty(size, dtype=torch.uint8)
        return torch.cat(pieces, out=self._buffers[which][:size])

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _nothing() -> None:
    """The first bucket has no earlier one to wait for."""


def receive(group: Group, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """The replica's end of `GlooSender.send`: every tensor by name. Raises TransferError.

    Each bucket has a buffer of its own: vLLM's layer-wise reload keeps views until a layer is complete.
    """
    theirs = torch.empty(1, dtype=torch.int64)
    group.broadcast(theirs)
    if int(theirs) != fingerprint(specs):
        raise TransferError(
            f"group {group.group_id}: the trainer sends different tensors from those that this replica expects"
        )
    for bucket in plan_buckets(specs, BUCKET_BYTES):
        buffer = torch.empty(sum(spec.bytes for spec in bucket), dtype=torch.uint8)
        group.broadcast(buffer)
        offset = 0
        for spec in bucket:
            part = buffer[offset : offset + spec.bytes]
            offset += spec.bytes
            yield spec.name, _view(part, spec)
    group.barrier()


def _view(part: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()  # A view needs an aligned start; this happens only with mixed dtypes.
    return part.view(dtype).view(spec.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def own_address(host: str, port: int) -> str:
    """This machine's address on the route to `host`; no packet is sent. Raises OSError.

    Debian gives a machine's own name a loopback address, which no other machine reaches: then it is the address on the
    route to anywhere.
    """
    address = _on_route(host, port)
    if is_loopback(address) and not is_loopback(host):
        with contextlib.suppress(OSError):  # without a network all ranks are on this machine
            return _on_route(ELSEWHERE, port)
    return address


def _on_route(host: str, port: int) -> str:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
