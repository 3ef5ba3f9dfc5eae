"""`dart health`: whether a coordinator answers, for a cluster's probes; Kubernetes' own gRPC probe knows no TLS."""

from __future__ import annotations

from pathlib import Path

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dart.errors import UserError
from dart.wire.channel import OPTIONS, read_file

TIMEOUT_SECONDS = 10.0


def health(address: str, tls_ca: Path | None) -> None:
    """Print what the coordinator says of itself. It needs no token. Raises UserError when there is no answer.

    NOT_SERVING is an answer, too: a run that makes no progress gains nothing from a restart of its coordinator, which
    ends it by itself after `watchdog.end_after_seconds`.
    """
    if tls_ca is None:
        channel = grpc.insecure_channel(address, options=OPTIONS)
    else:
        credentials = grpc.ssl_channel_credentials(read_file(tls_ca, "--tls-ca"))
        channel = grpc.secure_channel(address, credentials, options=OPTIONS)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise UserError(
                f"{address}: no coordinator answers there ({error.code().name}: {error.details()})"
            ) from None
    click.echo(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
