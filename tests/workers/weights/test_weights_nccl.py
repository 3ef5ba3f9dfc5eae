"""Weights over NCCL with the transfer files of both vLLM versions, the installed and the pinned one, without a GPU."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_alone.fetch import FETCHED
from vllm_alone.transfer_files import GPU_FILES, Communicator, installed, transfer_files

from benchmarks.syncing.roles import NcclReceiver
from dart.v1 import weights_pb2 as wpb
from dart.workers.train import senders
from dart.workers.weights import requests
from dart.workers.weights.requests import init_info, update_info
from dart.workers.weights.transfer import TransferError, spec_of

pytestmark = pytest.mark.torch
TIMEOUT = 20.0
SHORT = 0.05
PINNED = GPU_FILES / "vllm"
_ports = itertools.count(1)

needs_pinned = pytest.mark.skipif(
    not (GPU_FILES / FETCHED).is_file(), reason="the pinned vLLM's files are not there: run `make gpu-files`"
)


@pytest.fixture(params=["installed", pytest.param("pinned", marks=needs_pinned)])
def nccl(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The sender's module with the installed vLLM's transfer files, or with those that the extra `gpu` pins."""
    folder = PINNED if request.param == "pinned" else installed()
    if folder is None:
        pytest.skip("no vLLM is installed")
    with transfer_files(folder) as module:
        yield module


def transfer_group() -> wpb.TransferGroup:
    port = next(_ports)
    return wpb.TransferGroup(group_id=f"r-{port}", transport="nccl", host="trainer", port=port, world_size=2)


class Replica:
    """vLLM's own receiving end, told what our engine tells it; `loaded` is what reached the model."""

    def __init__(self) -> None:
        engine = sys.modules["vllm.distributed.weight_transfer.nccl_engine"].NCCLWeightTransferEngine
        self.loaded: list[tuple[str, torch.Tensor]] = []
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self._engine: Any = engine(SimpleNamespace(backend="nccl"), config, torch.device("cpu"), self)

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Of the model."""
        self.loaded += [(name, tensor.clone()) for name, tensor in named]

    def join(self, group: wpb.TransferGroup) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info("nccl", group, TIMEOUT)))

    def receive(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        self._engine.start_weight_update()
        self._engine.update_weights(update_info("nccl", version, [spec_of(*one) for one in tensors.items()]))
        self._engine.finish_weight_update()


def both_ends(nccl: ModuleType) -> tuple[Any, Replica, wpb.TransferGroup]:
    """A sender and a replica that are in one group."""
    sender, replica, group = nccl.NcclSender(TIMEOUT), Replica(), transfer_group()
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(replica.join, group)
        sender.open(group)
        joined.result()
    return sender, replica, group


def weights(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {
        "layer.0.weight": torch.randn(7, 5),
        "layer.0.half": torch.randn(3, 1, 2).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).T,
        "bytes": torch.arange(version, version + 4, dtype=torch.uint8),
        "scalar": torch.tensor(3.5 + version),
    }


def assert_same(arrived: list[tuple[str, torch.Tensor]], sent: dict[str, torch.Tensor]) -> None:
    assert [name for name, _ in arrived] == list(sent)
    for name, tensor in arrived:
        assert (tensor.dtype, tensor.shape) == (sent[name].dtype, sent[name].shape)
        assert torch.equal(tensor, sent[name])


def test_what_arrives_is_the_snapshot_transfer_after_transfer(nccl: ModuleType) -> None:
    sender, replica, group = both_ends(nccl)
    with ThreadPoolExecutor() as pool:
        for version in (1, 2):
            sender.open(group)
            sent = weights(version)
            received = pool.submit(replica.receive, version, sent)
            assert sender.send(sent.items()) == sum(spec_of(*one).bytes for one in sent.items())
            received.result()
            assert_same(replica.loaded, sent)
            replica.loaded.clear()
    sender.close()
    with pytest.raises(TransferError, match="no group is open"):
        sender.send([])


def test_the_replica_of_the_benchmark_unpacks_what_the_trainer_packs(
    nccl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In packs of 200 bytes, so that the tensors fill several."""
    for end in (nccl, requests):
        monkeypatch.setattr(end, "PACK", 200)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    sent, group = weights(1), transfer_group()
    arrived = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
    sender, replica = nccl.NcclSender(TIMEOUT), NcclReceiver(arrived, torch.device("cpu"), TIMEOUT)
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(replica.take, group, [spec_of(*one) for one in sent.items()])
        sender.open(group)
        sender.send(sent.items())
        taken.result(TIMEOUT)
    assert_same(list(arrived.items()), sent)


def test_other_tensors_than_the_last_time_are_described_anew(nccl: ModuleType) -> None:
    """vLLM 0.33 keeps what a source once said of itself; a transfer's source is its own."""
    source = nccl.source_of(list(weights(1).items()))
    other = nccl.source_of([("alone", torch.zeros(2))])

    def described(one: Any) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        metas = one.metadata if isinstance(one.metadata, list) else one.metadata()
        return [(meta.name, meta.dtype, meta.shape) for meta in metas]

    assert described(source) == [(name, t.dtype, tuple(t.shape)) for name, t in weights(1).items()]
    assert described(other) == [("alone", torch.float32, (2,))]


def test_a_replica_that_hangs_costs_the_trainer_the_timeout(nccl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = ThreadPoolExecutor()
    stop = asyncio.Event()
    sender, replica, group = nccl.NcclSender(TIMEOUT), Replica(), transfer_group()
    joined = forever.submit(replica.join, group)
    sender.open(group)
    joined.result()

    def stuck(self: Communicator, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        while not stop.is_set():
            time.sleep(0.01)

    monkeypatch.setattr(Communicator, "broadcast", stuck)
    sender._timeout_seconds = SHORT
    communicator = sender._engine.model_update_group
    with pytest.raises(TransferError, match=f"{group.group_id}: the transfer did not finish: no answer within"):
        sender.send(weights(1).items())
    with pytest.raises(TransferError, match="no group is open"):
        sender.send(weights(1).items())
    stop.set()
    assert communicator.closed, "else the broadcast runs on on the GPU, and holds up all that follows"


def test_an_abort_that_hangs_is_not_waited_for(nccl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    sender, _, _ = both_ends(nccl)
    monkeypatch.setattr(Communicator, "broadcast", lambda *_, **__: stop.wait())
    monkeypatch.setattr(Communicator, "destroy", lambda self: stop.wait())
    monkeypatch.setattr(nccl, "ABORT_SECONDS", SHORT)
    sender._timeout_seconds = SHORT
    with pytest.raises(TransferError, match="the transfer did not finish: no answer within"):
        sender.send(weights(1).items())
    stop.set()


def test_a_second_join_waits_for_a_trainer_that_does_not_come(nccl: ModuleType) -> None:
    """Which is why the engine joins a group once (tests/workers/rollout/test_rollout_hangs.py)."""
    sender, replica, group = both_ends(nccl)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(replica.join, group)
        sender.open(group)
        sender._engine.model_update_group._wire.met.abort()
        with pytest.raises(RuntimeError, match="nobody came"):
            again.result()


@pytest.mark.parametrize("error", [TypeError("trainer_init() got no argument 'client'"), AttributeError("send_all")])
async def test_an_interface_that_has_changed_is_a_failed_transfer_with_a_remedy(
    nccl: ModuleType, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def changed(*arguments: object, **named: object) -> None:
        raise error

    monkeypatch.setattr(nccl.WeightTransferTrainerFactory, "trainer_init", changed)
    ends = senders.Senders("nccl", TIMEOUT)
    with pytest.raises(
        TransferError, match=r"not joined: sync.transport nccl does not work with .*vllm.*sync.transport: gloo"
    ):
        await ends.send(transfer_group(), weights(1))
    await ends.close()


@pytest.mark.parametrize(
    "error", [ImportError("libcudart"), AttributeError("iter_all"), TypeError("metadata"), OSError(5)]
)
async def test_a_sender_that_cannot_be_loaded_ends_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(transport: str, timeout_seconds: float) -> None:
        raise error

    monkeypatch.setattr(senders, "make_sender", broken)
    ends = senders.Senders("nccl", TIMEOUT)
    for _ in range(2):
        with pytest.raises(TransferError, match=type(error).__name__) as raised:
            await ends.send(transfer_group(), weights(1))
    assert isinstance(error, OSError) or "sync.transport: gloo" in str(raised.value)
    assert not ends._locks and not ends._open
    await ends.close()
