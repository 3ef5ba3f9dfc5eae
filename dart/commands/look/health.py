"""`dart health`: whether a coordinator answers, for a cluster's probes; Kubernetes' own gRPC probe knows no TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dart.errors import UserError
from dart.wire.channel import Dial

TIMEOUT_SECONDS = 10.0


def health(address: str, tls_ca: Path | None) -> None:
    """Print what the coordinator says of itself. It needs no token. Raises UserError when there is no answer.

    NOT_SERVING is an answer, too: a run that makes no progress gains nothing from a restart of its coordinator, which
    ends it by itself after `watchdog.end_after_seconds`.
    """
    try:
        status = asyncio.run(_ask(Dial(address, tls_ca=tls_ca)))
    except grpc.aio.AioRpcError as error:
        raise UserError(f"{address}: no coordinator answers there ({error.code().name}: {error.details()})") from None
    click.echo(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


async def _ask(dial: Dial) -> health_pb2.HealthCheckResponse.ServingStatus:
    async with dial.channel() as channel:
        request = health_pb2.HealthCheckRequest()
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_SECONDS)
    return answer.status
