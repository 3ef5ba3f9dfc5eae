"""How a transfer ends before its time, from the coordinator's command on. No model is loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Future

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.v1 import weights_pb2 as wpb  # noqa: E402
from dart.wire.role import CommandError  # noqa: E402
from dart.workers.train import senders  # noqa: E402
from dart.workers.train.role import TrainRole  # noqa: E402
from dart.workers.train.senders import Senders  # noqa: E402
from dart.workers.weights.transfer import TransferError  # noqa: E402

HANG_SECONDS = 60.0


async def test_an_abort_ends_its_own_transfer_and_closing_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way = threading.Semaphore(0)

    class Stuck:
        """A sender whose replica takes nothing."""

        def __init__(self, transport: str, timeout_seconds: float, ended: Future[str]) -> None:
            self._ended = ended

        def open(self, group: wpb.TransferGroup) -> None: ...

        def send(self, tensors: Iterable[object]) -> int:
            under_way.release()
            raise TransferError(self._ended.result(HANG_SECONDS))

        def close(self) -> None: ...

    monkeypatch.setattr(senders, "make_sender", Stuck)
    role = TrainRole()
    role._senders = Senders("nccl", HANG_SECONDS)
    role._snapshots.stage(0, {})

    def send(work: pb.Assignment) -> asyncio.Task[object]:
        group = wpb.TransferGroup(group_id=f"replica-{work.assignment_id}", transport="nccl")
        return asyncio.create_task(role.handle(pb.SendWeights(assignment=work, version=0, group=group)))

    first, second, over = (pb.Assignment(assignment_id=name, attempt=1) for name in ("1", "2", "3"))
    lost, other = send(first), send(second)
    for _ in range(2):
        assert await asyncio.to_thread(under_way.acquire, timeout=HANG_SECONDS)
    for work in (first, first, over):
        assert await role.handle(pb.Abort(assignment=work)) is None
    with pytest.raises(CommandError, match="the coordinator has given the transfer up") as caught:
        await lost
    assert caught.value.code == pb.FAILURE_CODE_TRANSFER
    assert not other.done()
    await role.close()
    with pytest.raises(CommandError, match="the trainer is closing"):
        await other
