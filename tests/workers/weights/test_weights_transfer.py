"""The transfer between two real processes' worth of ranks: contents, and every way in which an end can be missing."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from dart.v1 import weights_pb2 as wpb
from dart.wire.channel import free_port
from dart.workers.weights import gloo
from dart.workers.weights.gloo import Group, receive
from dart.workers.weights.transfer import (
    Sender,
    TensorSpec,
    TransferError,
    checksum,
    fingerprint,
    make_sender,
    plan_buckets,
    spec_of,
    specs_from_proto,
    specs_to_proto,
)

pytestmark = pytest.mark.torch
SHORT_SECONDS = 2.0
"""The limit of a transfer whose other end is missing."""
LONG_SECONDS = 60.0
"""That of every other one, on a busy machine."""
HANG_SECONDS = 120.0
"""Less than the limits that torch has by itself."""


@pytest.fixture
def group() -> wpb.TransferGroup:
    port = free_port()
    return wpb.TransferGroup(group_id=f"g{port}", transport="gloo", host="127.0.0.1", port=port, world_size=2)


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = make_sender("gloo", LONG_SECONDS)
    yield sender
    sender.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(7, 5),
        "b": torch.randn(3).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).T,
        "odd": torch.arange(3, dtype=torch.uint8),
        "after an odd start": torch.randn(2, 2),
        "scalar": torch.tensor(3.5),
    }


def _join(group: wpb.TransferGroup, seconds: float = LONG_SECONDS) -> Group:
    return Group(group.group_id, group.host, group.port, rank=1, world_size=group.world_size, timeout_seconds=seconds)


def _received(group: Group, specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
    return dict(receive(group, specs))


def _as_late_as_possible(self: Group, tensor: torch.Tensor) -> Callable[[], None]:
    """A broadcast that reads its buffer only when it is waited for."""

    def wait() -> None:
        begin_broadcast(self, tensor)()

    return wait


begin_broadcast = Group.begin_broadcast


@pytest.mark.filterwarnings("error:An output with one or more elements was resized")  # a buffer that did not grow
@pytest.mark.parametrize("begin", [begin_broadcast, _as_late_as_possible])
@pytest.mark.parametrize("bucket_bytes", [gloo.BUCKET_BYTES, 64])
def test_tensors_arrive_as_they_were_sent_again_and_again(
    group: wpb.TransferGroup,
    sender: Sender,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    bucket_bytes: int,
    begin: Callable[[Group, torch.Tensor], Callable[[], None]],
) -> None:
    """In one bucket, and in four, for which one of the two buffers has to grow, and the other has room to spare."""
    monkeypatch.setattr(gloo, "BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(Group, "begin_broadcast", begin)
    tensors = _tensors()
    specs = specs_from_proto(specs_to_proto(spec_of(name, tensor) for name, tensor in tensors.items()))
    joined = pool.submit(_join, group)
    sender.open(group)
    for round_ in range(2):
        sender.open(group)
        sent = {name: tensor + round_ if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        arrived = pool.submit(_received, joined.result(), specs)
        assert sender.send(sent.items()) == sum(spec.bytes for spec in specs)
        assert list(arrived.result()) == list(sent)
        for name, tensor in arrived.result().items():
            torch.testing.assert_close(tensor, sent[name], rtol=0, atol=0)
        assert checksum(arrived.result().items()) == checksum(reversed(sent.items())) != 0


NO_ROOM = """
import asyncio, resource, threading
from pathlib import Path
from dart.v1 import weights_pb2 as wpb
from dart.workers.train.senders import Senders
from dart.workers.weights import gloo
from dart.workers.weights.transfer import TransferError

before, loop, ends = resource.getrlimit(resource.RLIMIT_AS), asyncio.new_event_loop(), Senders("gloo", 60.0)
lifted = threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_AS, before))
lifted.start()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
try:
    loop.run_until_complete(ends.send(wpb.TransferGroup(group_id="g", host="127.0.0.1", port=1), {}))
except TransferError as error:
    print(error)
try:
    gloo._device("127.0.0.1", 0.0)
except OSError as error:
    print(error)
gloo._device("127.0.0.1", 60.0)
print("joined", lifted.finished.is_set())
"""


def test_an_end_that_can_have_no_thread_now_says_so_or_waits_for_it() -> None:
    """There is no room for a thread's stack in its address space until the limit is lifted."""
    told = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, check=True).stdout
    *short, joined = told.splitlines()
    assert len(short) == 2
    for line in short:
        assert line.startswith("no more threads or processes may be started: raise `ulimit -u`")
        assert line.endswith("or lift `ulimit -v`")
    assert joined == "joined True"


def test_a_replica_that_never_comes_costs_the_trainer_the_timeout(group: wpb.TransferGroup) -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match="could not join"):
        make_sender("gloo", SHORT_SECONDS).open(group)
    assert time.monotonic() - began < HANG_SECONDS


def test_a_trainer_that_never_comes_costs_the_replica_the_timeout(group: wpb.TransferGroup) -> None:
    began = time.monotonic()
    with pytest.raises(TransferError, match="could not join"):
        _join(group, SHORT_SECONDS)
    assert time.monotonic() - began < HANG_SECONDS


def test_a_name_that_nobody_knows_is_told_at_once(group: wpb.TransferGroup) -> None:
    group.host = "node17.invalid"
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"at node17\.invalid:\d+: rank 0 could not join: .*(not known|resolution)"):
        make_sender("gloo", 600.0).open(group)
    assert time.monotonic() - began < 300  # a store would go on asking


def test_a_silent_replica_and_then_a_new_group(
    group: wpb.TransferGroup, sender: Sender, pool: ThreadPoolExecutor
) -> None:
    tensors = {"large": torch.randn(8 << 20)}  # More than the kernel's buffers take without a reader.
    joined = pool.submit(_join, group)
    sender.open(group)
    silent = joined.result()
    sender._group.timeout = timedelta(seconds=SHORT_SECONDS)  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(TransferError):
        sender.send(tensors.items())
    assert time.monotonic() - began < LONG_SECONDS
    with pytest.raises(TransferError, match="no group"):
        sender.send(tensors.items())
    silent.close()

    renewed = wpb.TransferGroup()
    renewed.CopyFrom(group)
    renewed.group_id += "-2"
    joined = pool.submit(_join, renewed)
    sender.open(renewed)
    arrived = pool.submit(_received, joined.result(), [spec_of(*item) for item in tensors.items()])
    sender.send(tensors.items())
    assert torch.equal(arrived.result()["large"], tensors["large"])


def test_a_replica_that_leaves_half_way_is_noticed(
    group: wpb.TransferGroup, sender: Sender, pool: ThreadPoolExecutor
) -> None:
    joined = pool.submit(_join, group)
    sender.open(group)
    joined.result().close()
    began = time.monotonic()
    with pytest.raises(TransferError):
        sender.send({"large": torch.randn(8 << 20)}.items())
    assert time.monotonic() - began < LONG_SECONDS, "not only once the time is over"


def test_a_trainer_that_leaves_half_way_is_noticed(group: wpb.TransferGroup, pool: ThreadPoolExecutor) -> None:
    sender = make_sender("gloo", LONG_SECONDS)
    joined = pool.submit(_join, group)
    sender.open(group)
    arrived = pool.submit(_received, joined.result(), [TensorSpec("a", "float32", (4,))])
    began = time.monotonic()
    sender.close()
    del sender
    with pytest.raises(TransferError):
        arrived.result()
    assert time.monotonic() - began < LONG_SECONDS, "not only once the time is over"


def test_a_transfer_that_is_to_end_early_does_before_its_next_bucket(
    group: wpb.TransferGroup, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "BUCKET_BYTES", 64)
    ended = Future[str]()
    begun: list[int] = []

    def begin(self: Group, tensor: torch.Tensor) -> Callable[[], None]:
        begun.append(tensor.numel())
        if len(begun) == 4 and not ended.done():  # each end has begun the fingerprint and the first bucket
            ended.set_result("the coordinator has given it up")
        return begin_broadcast(self, tensor)

    monkeypatch.setattr(Group, "begin_broadcast", begin)
    sender = make_sender("gloo", LONG_SECONDS, ended)
    joined = pool.submit(_join, group)
    sender.open(group)
    specs = [spec_of(*item) for item in _tensors().items()]
    arrived = pool.submit(_received, joined.result(), specs)
    with pytest.raises(TransferError, match=f"group {group.group_id}: the coordinator has given it up"):
        sender.send(_tensors().items())
    with pytest.raises(TransferError, match="a broadcast failed"):
        arrived.result()


def test_other_tensors_than_agreed_are_an_error_on_both_ends(
    group: wpb.TransferGroup, sender: Sender, pool: ThreadPoolExecutor
) -> None:
    joined = pool.submit(_join, group)
    sender.open(group)

    def refuse() -> None:
        mine = joined.result()
        try:
            _received(mine, [TensorSpec("a", "float32", (8,))])
        finally:
            mine.close()

    arrived = pool.submit(refuse)
    with pytest.raises(TransferError):
        sender.send([("a", torch.zeros(4))])
    with pytest.raises(TransferError, match="different tensors"):
        arrived.result()


@pytest.mark.parametrize("changed", ["a value", "two names", "a byte at the end"])
def test_a_checksum_tells_weights_apart(changed: str) -> None:
    tensors = {"a": torch.arange(16, dtype=torch.bfloat16), "b": torch.ones(11, dtype=torch.uint8)}
    before = checksum(tensors.items())
    match changed:
        case "a value":
            tensors["a"][3] += 1
        case "two names":
            tensors["a"], tensors["b"] = tensors["b"], tensors["a"]
        case _:
            tensors["b"][10] = 2
    assert checksum(tensors.items()) != before


def test_the_checksum_is_the_one_that_the_protocol_describes() -> None:
    words = struct.pack("<3q", 1, -2, 3)
    tensor = torch.frombuffer(bytearray(words + b"\x05\x00"), dtype=torch.bfloat16)
    assert checksum([("weight", tensor)]) == (zlib.crc32(b"weight") | 1) * (1 - 2 + 3 + 5) % 2**63


def test_buckets_keep_order_and_limit() -> None:
    specs = [TensorSpec(f"t{i}", "float32", (n,)) for i, n in enumerate([10, 20, 100, 1, 1, 30])]
    buckets = list(plan_buckets(specs, limit_bytes=124))
    assert [spec for bucket in buckets for spec in bucket] == specs
    assert [sum(spec.bytes for spec in bucket) for bucket in buckets] == [120, 400, 8, 120]
    assert fingerprint(specs) != fingerprint(specs[::-1])


def test_the_interface_is_importable_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, dart.workers.weights.transfer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="use gloo or nccl"):
        make_sender("pigeon")


def test_a_machine_whose_own_name_is_loopback_has_an_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Debian's /etc/hosts. The end with the lower address listens, and 127.0.1.1 is every machine's own."""
    routes = {"node-1": "127.0.1.1", gloo.ELSEWHERE: "10.0.0.5", "127.0.0.1": "127.0.0.1", "node-2": "10.0.0.5"}
    monkeypatch.setattr(gloo, "_on_route", lambda host, port: routes[host])
    own = {host: gloo.own_address(host, 1) for host in ("node-1", "node-2", "127.0.0.1")}
    assert own == {"node-1": "10.0.0.5", "node-2": "10.0.0.5", "127.0.0.1": "127.0.0.1"}

    def no_network(host: str, port: int) -> str:
        if host == gloo.ELSEWHERE:
            raise OSError("network is unreachable")
        return routes[host]

    monkeypatch.setattr(gloo, "_on_route", no_network)
    assert gloo.own_address("node-1", 1) == "127.0.1.1"
