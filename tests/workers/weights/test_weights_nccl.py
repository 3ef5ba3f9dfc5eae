"""Weights over NCCL with the transfer files of both vLLM versions, the installed and the pinned one, without a GPU."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_alone.fetch import FETCHED
from vllm_alone.transfer_files import GPU_FILES, Communicator, installed, transfer_files

from dart.v1 import weights_pb2 as wpb
from dart.workers.train import senders
from dart.workers.weights import requests
from dart.workers.weights.requests import init_info, update_info
from dart.workers.weights.transfer import TransferError, spec_of

pytestmark = pytest.mark.torch
TIMEOUT = 20.0
SHORT = 0.05
HANG_SECONDS = 60.0
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


def test_other_tensors_than_the_last_time_are_described_anew(nccl: ModuleType) -> None:
    """vLLM 0.33 keeps what a source once said of itself; a transfer's source is its own."""
    source = nccl.source_of(list(weights(1).items()))
    other = nccl.source_of([("alone", torch.zeros(2))])

    def described(one: Any) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        metas = one.metadata if isinstance(one.metadata, list) else one.metadata()
        return [(meta.name, meta.dtype, meta.shape) for meta in metas]

    assert described(source) == [(name, t.dtype, tuple(t.shape)) for name, t in weights(1).items()]
    assert described(other) == [("alone", torch.float32, (2,))]


def test_a_second_join_waits_for_a_trainer_that_does_not_come(nccl: ModuleType) -> None:
    """Which is why the engine joins a group once (tests/workers/rollout/test_rollout_hangs.py)."""
    sender, replica, group = both_ends(nccl)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(replica.join, group)
        sender.open(group)
        sender._engine.model_update_group._communicator._wire.met.abort()
        with pytest.raises(RuntimeError, match="nobody came"):
            again.result()


class Gpu:
    """The one stream of all transfers. It stands still while it broadcasts to a replica that is lost."""

    def __init__(self) -> None:
        self.moves, self.stuck = threading.Event(), threading.Event()
        self.moves.set()

    def synchronize(self) -> None:
        if not self.moves.is_set():
            self.stuck.set()
        assert self.moves.wait(HANG_SECONDS)

    def wait_event(self, event: object) -> None: ...


class Lost:
    """In place of the communicator of a replica that is lost. Its memory is freed by `destroy`, and `misused` says
    whether it was used then, or freed while it was used."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._used = threading.Lock()
        self.freed = self.misused = False
        self.enqueued = threading.Event()
        """While it is not set, a broadcast does not get into the stream: it waits for the replica to connect."""
        self.enqueued.set()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        with self._used:
            self.misused = self.misused or self.freed
            self._gpu.moves.clear()
            self._gpu.stuck.set()
            assert self.enqueued.wait(HANG_SECONDS)

    def destroy(self) -> None:
        self.misused = self.misused or self._used.locked()
        self.freed = True
        self._gpu.moves.set()


@pytest.fixture
def gpu(nccl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In packs of 200 bytes, so that a transfer has several."""
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: gpu)
    for end in (nccl, requests):
        monkeypatch.setattr(end, "PACK", 200)
    return gpu


def to_a_lost_replica(nccl: ModuleType, gpu: Gpu) -> tuple[Any, Lost, Future[str]]:
    """A sender, its communicator, and what ends its transfers."""
    (sender, _, _), lost, ended = both_ends(nccl), Lost(gpu), Future[str]()
    sender._engine.model_update_group._communicator = lost
    sender._ended = ended
    return sender, lost, ended


def threads_end(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("how", "why"), [("told", "the replica is lost"), ("timeout", "no answer within 0 s"), ("close", "has been left")]
)
def test_a_transfer_that_ends_early_lets_go_of_the_gpu_and_of_its_communicator(
    nccl: ModuleType, gpu: Gpu, how: str, why: str
) -> None:
    sender, lost, ended = to_a_lost_replica(nccl, gpu)
    other, replica, _ = both_ends(nccl)
    sender._timeout_seconds = SHORT if how == "timeout" else HANG_SECONDS
    sent = weights(1)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, sent.items())
        assert gpu.stuck.wait(HANG_SECONDS)
        behind = pool.submit(other.send, sent.items()), pool.submit(replica.receive, 1, sent)
        if how == "told":
            ended.set_result("the replica is lost")
        elif how == "close":
            sender.close()
        with pytest.raises(TransferError, match=f"did not finish: .*{why}"):
            sending.result(HANG_SECONDS)
        for end in behind:
            end.result(HANG_SECONDS)
    assert_same(replica.loaded, sent)
    with pytest.raises(TransferError, match="no group is open"):
        sender.send(sent.items())
    threads_end("nccl-transfer")
    assert lost.freed and not lost.misused


def test_an_abort_that_hangs_is_not_waited_for(nccl: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, lost, _ = to_a_lost_replica(nccl, gpu)
    stop = threading.Event()
    monkeypatch.setattr(lost, "destroy", stop.wait)
    monkeypatch.setattr(nccl, "ABORT_SECONDS", SHORT)
    sender._timeout_seconds = SHORT
    with pytest.raises(TransferError, match="the transfer did not finish: no answer within"):
        sender.send(weights(1).items())
    stop.set()
    gpu.moves.set()


def test_a_communicator_is_not_freed_under_a_broadcast_that_waits_for_its_replica(
    nccl: ModuleType, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, lost, ended = to_a_lost_replica(nccl, gpu)
    monkeypatch.setattr(nccl, "ABORT_SECONDS", SHORT)
    lost.enqueued.clear()
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(sender.send, weights(1).items())
        assert gpu.stuck.wait(HANG_SECONDS)
        ended.set_result("the replica is lost")
        with pytest.raises(TransferError, match="did not finish: the replica is lost"):
            sending.result(HANG_SECONDS)
    assert not lost.freed
    lost.enqueued.set()
    threads_end("nccl-abort")
    threads_end("nccl-transfer")
    assert lost.freed and not lost.misused


def test_a_group_that_is_joined_too_late_is_left_at_once(nccl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ever abort its communicator, and its replica would wait in the first broadcast."""
    join, late, left = nccl.WeightTransferTrainerFactory.trainer_init, threading.Event(), list[object]()

    def slow(*arguments: Any, **named: Any) -> Any:
        assert late.wait(HANG_SECONDS)
        engine = join(*arguments, **named)
        monkeypatch.setattr(engine, "shutdown", lambda: left.append(engine))
        return engine

    monkeypatch.setattr(nccl.WeightTransferTrainerFactory, "trainer_init", slow)
    ended = Future[str]()
    sender, replica, group = nccl.NcclSender(HANG_SECONDS, ended), Replica(), transfer_group()
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(sender.open, group)
        ended.set_result("the replica is lost")
        with pytest.raises(TransferError, match="was not joined: the replica is lost"):
            opening.result(HANG_SECONDS)
        late.set()
        replica.join(group)
    threads_end("nccl-transfer")
    assert len(left) == 1
    with pytest.raises(TransferError, match="no group is open"):
        sender.send([])


async def test_a_group_over_nccl_is_not_soon_left_because_another_replica_keeps_failing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica's engine would have to end: it cannot know that the communicator has been left."""
    closed = list[str]()

    class Quiet:
        def __init__(self, *_: object) -> None:
            self.name = ""

        def open(self, group: wpb.TransferGroup) -> None:
            self.name = group.group_id
            if group.group_id.startswith("bad"):
                raise TransferError("out of memory")

        def send(self, tensors: object) -> int:
            return 1

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(senders, "make_sender", Quiet)
    ends = senders.Senders("nccl", TIMEOUT)
    await ends.send(wpb.TransferGroup(group_id="good-1", transport="nccl"), weights(1))
    for number in range(senders.MOST_PASSED_OVER_NCCL + 1):
        assert not closed
        with pytest.raises(TransferError):
            await ends.send(wpb.TransferGroup(group_id=f"bad-{number}", transport="nccl"), weights(1))
    assert closed == ["good-1"], "one that is gone is left in the end"
    await ends.close()


def test_a_communicator_that_vllm_has_disabled_is_refused_with_the_remedy(
    nccl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its broadcasts do nothing, at both ends: the replica would serve what was in its memory."""
    monkeypatch.setattr(Communicator, "disabled", True)
    with pytest.raises(TransferError, match=r"was not joined: .*unset VLLM_DISABLE_PYNCCL.*sync.transport: gloo"):
        both_ends(nccl)


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
    def broken(transport: str, timeout_seconds: float, ended: Future[str]) -> None:
        raise error

    monkeypatch.setattr(senders, "make_sender", broken)
    ends = senders.Senders("nccl", TIMEOUT)
    for _ in range(2):
        with pytest.raises(TransferError, match=type(error).__name__) as raised:
            await ends.send(transfer_group(), weights(1))
    assert isinstance(error, OSError) or "sync.transport: gloo" in str(raised.value)
    assert not ends._locks and not ends._open
    await ends.close()
