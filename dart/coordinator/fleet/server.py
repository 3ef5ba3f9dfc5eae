"""The gRPC server: worker sessions, the Control service, health and reflection, tokens and TLS.

A session's reader and writer are one TaskGroup: whichever ends first ends the stream. The worker itself outlives its
stream for `lost_after_seconds` and may resume it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dart import config
from dart.coordinator.fleet.sessions import Fleet, Worker
from dart.errors import UserError
from dart.v1 import control_pb2, control_pb2_grpc, session_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.channel import (
    OLDEST_PROTOCOL_VERSION,
    OPTIONS,
    PROTOCOL_VERSION,
    authorised,
    read_file,
    read_token,
)
from dart.wire.outbox import BATCHES, each

log = logging.getLogger(__name__)

HANG_UP_SECONDS = 2.0
HEARTBEATS_PER_SECOND = 250
"""Of all workers together, as far as `server.lost_after_seconds` allows."""
ROLE_NAMES: dict[int, str] = {pb.ROLE_ENV: "env", pb.ROLE_ROLLOUT: "rollout", pb.ROLE_TRAIN: "train"}


class Rejected(Exception):
    """This worker is not wanted; the message and the remedy are told to it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class CoordinatorService(session_pb2_grpc.CoordinatorServiceServicer):
    """Sessions. `welcome(hello) -> role config JSON` may raise Rejected."""

    def __init__(
        self,
        fleet: Fleet,
        settings: config.Server,
        run_id: str,
        welcome: Callable[[pb.Hello], str],
    ) -> None:
        self._fleet, self._settings, self._run_id, self._welcome = fleet, settings, run_id, welcome
        self._tokens = {role: read_token(source, f"server.tokens.{role}") for role, source in settings.tokens.items()}
        self.closing = asyncio.Event()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("body") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be Hello")
        hello = first.hello
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        if not authorised(metadata, self._tokens.get(ROLE_NAMES.get(hello.role, ""))):  # type: ignore[call-overload]
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing bearer token for this role")
        try:
            config_json = self._check(hello)
        except Rejected as error:
            reject = pb.Reject(reason=str(error), remedy=error.remedy)
            await context.write(pb.SessionResponse(reject=reject).SerializeToString())
            return
        worker, resumed = self._fleet.admit(hello)
        heartbeat_seconds = heartbeat_interval(self._settings, len(self._fleet.workers))
        await context.write(
            pb.SessionResponse(
                welcome=pb.Welcome(
                    epoch=worker.epoch,
                    config_json=config_json,
                    heartbeat_seconds=heartbeat_seconds,
                    run_id=self._run_id,
                    resumed=resumed,
                    capabilities=[BATCHES],
                )
            ).SerializeToString()
        )
        worker.connections += 1
        worker.last_heard = time.monotonic()
        try:
            await self._converse(worker, request_iterator, context, heartbeat_seconds)
        finally:
            # Cancel, kill and half-close look alike: without Bye the worker may come back. Fleet.reap waits for it.
            worker.connections -= 1
            if worker.said_goodbye:
                self._fleet.lose(worker, "goodbye")

    def _check(self, hello: pb.Hello) -> str:
        if hello.protocol_version < OLDEST_PROTOCOL_VERSION:
            raise Rejected(
                f"worker {hello.worker_id} speaks protocol version {hello.protocol_version}, "
                f"this coordinator {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
                "update dart on the worker's machine",
            )
        if hello.role not in ROLE_NAMES:
            raise Rejected(f"role {hello.role} is unknown", "use env, rollout or train")
        return self._welcome(hello)

    async def _converse(
        self,
        worker: Worker,
        requests: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[Any, Any],
        heartbeat_seconds: float,
    ) -> None:
        """One stream's life; `worker.said_goodbye` is set when either end says Bye."""
        outbox = worker.outbox
        written = time.monotonic()

        async def read() -> None:
            async for received in requests:
                worker.last_heard = time.monotonic()
                for message in each(received):
                    self._fleet.receive(worker, message)
                    if message.WhichOneof("body") == "bye":
                        return

        async def write() -> None:
            nonlocal written
            while True:
                encoded, goodbye = await outbox.take()
                try:
                    await context.write(encoded)
                except grpc.aio.BaseError:
                    return  # the stream has broken: the worker dials again
                written = time.monotonic()
                if goodbye:
                    worker.said_goodbye = True
                    # The worker hangs up when it has read this. Ending the stream here instead could reach it as a
                    # failed write, before the goodbye that it has not read yet.
                    await asyncio.sleep(HANG_UP_SECONDS)
                    return

        async def beat() -> None:
            """Something is written at least every `heartbeat_seconds`. A timer per message would cost more than it."""
            while True:
                await asyncio.sleep(max(0.0, written + heartbeat_seconds - time.monotonic()) or heartbeat_seconds)
                if time.monotonic() - written >= heartbeat_seconds and not outbox:
                    outbox.put(pb.SessionResponse(heartbeat=pb.Heartbeat(sent_unix_seconds=time.time())))

        await first(read(), write(), beat(), worker.lost.wait())


def heartbeat_interval(settings: config.Server, workers: int) -> float:
    """Seconds between one worker's heartbeats: more where there are thousands, which would else do little else.

    Never so many that a live worker could be taken for a lost one.
    """
    safe = max(settings.heartbeat_seconds, settings.lost_after_seconds / 3)
    return min(safe, max(settings.heartbeat_seconds, workers / HEARTBEATS_PER_SECOND))


async def first(*racers: Coroutine[Any, Any, Any]) -> None:
    """Wait for whichever ends first; the others are cancelled."""
    async with asyncio.TaskGroup() as tasks:
        running = {tasks.create_task(racer) for racer in racers}
        _, rest = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()


def _handler(sessions: CoordinatorService) -> grpc.GenericRpcHandler:
    """As generated, but what is written is encoded already (`dart.wire.outbox`)."""
    name = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    session: Any = grpc.stream_stream_rpc_method_handler(sessions.Session, pb.SessionRequest.FromString, None)
    return grpc.method_handlers_generic_handler(name, {"Session": session})


class Server:
    """The listening server; `port` is known after `start`."""

    def __init__(self, settings: config.Server) -> None:
        self._settings = settings
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self._settings.host}:{self.port}"

    async def start(self, sessions: CoordinatorService, control: control_pb2_grpc.ControlServiceServicer) -> None:
        """Bind and serve. Raises UserError when the port is taken."""
        self._server.add_generic_rpc_handlers((_handler(sessions),))
        control_pb2_grpc.add_ControlServiceServicer_to_server(control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [
            pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
            control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
        ]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        where = f"{self._settings.host}:{self._settings.port}"
        try:
            if self._settings.tls_certificate and self._settings.tls_key:
                ca = self._settings.tls_client_ca
                credentials = grpc.ssl_server_credentials(
                    [
                        (
                            read_file(self._settings.tls_key, "server.tls_key"),
                            read_file(self._settings.tls_certificate, "server.tls_certificate"),
                        )
                    ],
                    root_certificates=read_file(ca, "server.tls_client_ca") if ca else None,
                    require_client_auth=ca is not None,
                )
                self.port = self._server.add_secure_port(where, credentials)
            else:
                self.port = self._server.add_insecure_port(where)
        except RuntimeError:
            raise UserError(
                f"server.port: {where} cannot be listened on, most likely it is in use: "
                "stop the other program or set server.port to 0 for any free port"
            ) from None
        await self._server.start()
        for name in ("", *names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=0.5)
