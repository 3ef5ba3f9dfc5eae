"""What a person may do to a live run: calls of its Control service, for `dart control` and the dashboard's buttons."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from dart.errors import UserError
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.channel import Dial

TIMEOUT_SECONDS, SAVE_SECONDS = 60.0, 3600.0
"""A checkpoint waits for the update in progress, and that of a large policy takes its time."""


@dataclass(frozen=True, slots=True)
class Lever:
    """`done`: what to say afterwards, with places for the fields of the reply."""

    request: Callable[[], Message]
    call: Callable[[control_pb2_grpc.ControlServiceStub], Callable[..., Awaitable[Any]]]
    done: str
    seconds: float = TIMEOUT_SECONDS


LEVERS: Mapping[str, Lever] = {
    "pause": Lever(cpb.PauseRequest, lambda stub: stub.Pause, "paused: no trajectory begins until the run is resumed"),
    "resume": Lever(cpb.ResumeRequest, lambda stub: stub.Resume, "resumed"),
    "drain": Lever(
        cpb.DrainRequest, lambda stub: stub.Drain, "training ends after the update in progress; this cannot be undone"
    ),
    "checkpoint": Lever(
        cpb.CheckpointRequest,
        lambda stub: stub.Checkpoint,
        "version {0.weight_version} was saved as {0.path}",
        SAVE_SECONDS,
    ),
}


async def pull(dial: Dial, name: str) -> str:
    """Returns what was done, in a few words. Raises UserError if the coordinator does not answer or refuses."""
    lever = LEVERS[name]
    async with dial.channel() as channel:
        call = lever.call(control_pb2_grpc.ControlServiceStub(channel))
        try:
            answer = await call(lever.request(), timeout=lever.seconds, metadata=dial.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(
                    f"the coordinator refused {name}: set DART_TOKEN to the control token (for the dashboard, before "
                    "`dart view` starts)"
                ) from None
            raise UserError(f"{name} failed: {error.details()}") from None
    return lever.done.format(answer)
