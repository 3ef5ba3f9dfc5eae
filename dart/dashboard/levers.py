"""What the dashboard's buttons do: calls of the run's Control service, with the run's own token or DART_TOKEN's."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc

from dart.errors import UserError
from dart.inspection.condition import own_certificate, own_token
from dart.inspection.inspector import Inspector
from dart.store.records import RunState
from dart.v1 import control_pb2 as cpb
from dart.v1 import control_pb2_grpc
from dart.wire.channel import TOKEN_ENVIRONMENT, Dial

TIMEOUT_SECONDS = 60.0
"""A checkpoint of a large policy takes its time."""

LEVERS: Mapping[str, Callable[[control_pb2_grpc.ControlServiceStub], Callable[..., Awaitable[Any]]]] = {
    "pause": lambda stub: stub.Pause,
    "resume": lambda stub: stub.Resume,
    "drain": lambda stub: stub.Drain,
    "checkpoint": lambda stub: stub.Checkpoint,
}
_REQUESTS = {
    "pause": cpb.PauseRequest,
    "resume": cpb.ResumeRequest,
    "drain": cpb.DrainRequest,
    "checkpoint": cpb.CheckpointRequest,
}


async def pull(inspector: Inspector, lever: str) -> str:
    """Returns what was done, in a few words. Raises UserError if the run is not live, or its coordinator refuses."""
    record = await inspector.files.record()
    if inspector.files.directory.state(record) != RunState.RUNNING or not record.control_address:
        raise UserError(f"run {record.id} is not running: {lever} needs one that is")
    token = own_token(record) or os.environ.get(TOKEN_ENVIRONMENT)
    dial = Dial(record.control_address, token, own_certificate(record))
    async with dial.channel() as channel:
        call = LEVERS[lever](control_pb2_grpc.ControlServiceStub(channel))
        try:
            answer = await call(_REQUESTS[lever](), timeout=TIMEOUT_SECONDS, metadata=dial.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise UserError(
                    f"the coordinator refused {lever}: start `dart view` with DART_TOKEN set to the control token"
                ) from None
            raise UserError(f"{lever} failed: {error.details()}") from None
    return f"version {answer.weight_version} was saved as {answer.path}" if lever == "checkpoint" else f"{lever}: done"
