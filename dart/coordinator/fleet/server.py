"""The gRPC server: worker sessions, the Control service, health and reflection, tokens and TLS.

A stream passes admission (`coordinator.fleet.door`), gets its worker from the fleet, and is then served by the loops
that both ends share (`dart.wire.stream`). A worker outlives its stream by `lost_after_seconds` and may resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dart import config
from dart.coordinator.fleet.door import ControlDoor, Door, Refused
from dart.coordinator.fleet.sessions import Fleet, Rejected, Worker
from dart.errors import UserError
from dart.shortage import check_threads, open_files
from dart.v1 import control_pb2, control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire import rules
from dart.wire.capabilities import BATCHES
from dart.wire.channel import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    address_of,
    listening_host,
    most_env_workers,
    read_file,
    read_token,
    server_options,
)
from dart.wire.rules import Malformed
from dart.wire.stream import Conversation, Pulse, Stream, StreamLostError

log = logging.getLogger(__name__)

HEARTBEATS_PER_SECOND = 250
"""The most heartbeats per second of all workers together, as far as `server.lost_after_seconds` allows."""
RIVAL_SECONDS = 0.05
FULL_SECONDS = 10.0
"""After which an env worker for which there is no room may ask again."""


class CoordinatorService:
    """Serves sessions. `welcome(hello) -> role config JSON` may raise Rejected."""

    def __init__(
        self,
        fleet: Fleet,
        settings: config.Server,
        run_id: str,
        welcome: Callable[[pb.Hello], str],
    ) -> None:
        self._fleet, self._settings, self._run_id, self._welcome = fleet, settings, run_id, welcome
        self._door = Door(settings)
        self._open_files, self._env_streams = open_files(), 0

    async def Session(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        """One stream of a worker. Messages are read and written in encoded form (`_handler`)."""
        stream = Stream(context)
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        try:
            hello = await self._door.hello(stream, metadata)
            self._check_room(hello, context.peer())
            config_json = self._check(hello)
            await self._not_taken(hello)
            worker, resumed = self._fleet.admit(hello)
        except Rejected as error:
            reject = pb.Reject(reason=str(error), remedy=error.remedy, retry_after_seconds=error.retry_after_seconds)
            with contextlib.suppress(StreamLostError):  # it has not waited for the answer
                await stream.write(pb.SessionResponse(reject=reject).SerializeToString())
        except Refused as error:
            self._door.refused(context.peer(), error)
            await context.abort(error.code, str(error))
        except StreamLostError as error:
            self._door.refused(context.peer(), f"gone before its Hello ({error})")
        else:
            await self._converse(worker, stream, config_json, resumed)

    def _check_room(self, hello: pb.Hello, peer: str) -> None:
        """Raises Rejected if there are as many env workers as there can be: for a while, because some may leave. One
        that comes back is not one more."""
        if hello.role != pb.ROLE_ENV or hello.instance_id in self._fleet.workers:
            return
        if self._env_streams >= most_env_workers(self._open_files):
            full = Rejected(
                f"it may have only {self._open_files} files open, and {self._env_streams} env workers are connected: "
                "raise `ulimit -Hn` where it starts, or start fewer env workers",
                "wait until another has left",
                FULL_SECONDS,
            )
            self._door.refused(peer, f"{hello.worker_id}: {full}")
            raise full

    async def _not_taken(self, hello: pb.Hello) -> None:
        """Wait until the place of this Hello is free: until its holder is heard again, or counts as gone.

        A restarted worker can connect before the stream of its previous process is noticed as dead. Raises Rejected
        when the holder is alive.
        """
        asked = time.monotonic()
        while (rival := self._fleet.rival(hello)) is not None:
            if rival.last_heard > asked:
                what = f"rank {hello.rank}" if hello.role == pb.ROLE_TRAIN else f"the name {hello.worker_id}"
                raise Rejected(
                    f"{what} is in use by {rival.id}, which is alive",
                    "stop that worker first, or give this one another name or rank",
                )
            await asyncio.sleep(RIVAL_SECONDS)

    async def _converse(self, worker: Worker, stream: Stream, config_json: str, resumed: bool) -> None:
        """Serve the stream from Welcome until it ends; sets `worker.said_goodbye` when either end sends Bye."""
        hung_up = worker.connected()
        self._env_streams += (env := worker.role == pb.ROLE_ENV)
        heartbeat_seconds = heartbeat_interval(self._settings, len(self._fleet.workers))
        welcome = pb.Welcome(
            epoch=worker.epoch,
            config_json=config_json,
            heartbeat_seconds=heartbeat_seconds,
            run_id=self._run_id,
            resumed=resumed,
            capabilities=[BATCHES],
            lost_after_seconds=self._settings.lost_after_seconds,
        )
        receive = partial(self._fleet.receive, worker)
        talk = Conversation(
            stream,
            worker.outbox,
            pb.SessionResponse,
            pb.SessionRequest,
            receive,
            Pulse(heartbeat_seconds),
            partial(self._messages, worker),
        )
        try:
            await stream.write(pb.SessionResponse(welcome=welcome).SerializeToString())
            await talk.run(_ends(hung_up))
        except StreamLostError as error:
            log.debug("a stream of %s ended: %s", worker.id, error)
        finally:
            # Cancel, kill and half-close look alike. Without Bye the worker may come back, so Fleet.reap waits for it.
            worker.connections -= 1
            self._env_streams -= env
            worker.said_goodbye |= talk.parted
            if worker.said_goodbye:
                self._fleet.lose(worker, "goodbye")

    def _messages(self, worker: Worker, encoded: bytes) -> Sequence[pb.SessionRequest]:
        """The messages in what was read. Raises StreamLostError for undecodable bytes, which may have held an answer.

        The worker then reconnects, and is asked again for the answers that it owes.
        """
        message = rules.parsed(encoded)
        if isinstance(message, Malformed):
            self._fleet.receive(worker, message)
            raise StreamLostError(str(message.violation), grpc.StatusCode.INVALID_ARGUMENT)
        return message.batch[:] or (message,)

    def _check(self, hello: pb.Hello) -> str:
        if seconds := self._fleet.refused(hello):
            told = self._fleet.boundary.told((hello.role, hello.worker_id))
            raise Rejected(f"worker {hello.worker_id} is {told}", "look at its log", seconds)
        if broken := rules.hello(hello):
            raise Rejected(str(broken), "give the worker another name with --id, or update dart on its machine")
        if hello.protocol_version < OLDEST_PROTOCOL_VERSION:
            raise Rejected(
                f"worker {hello.worker_id} speaks protocol version {hello.protocol_version}, "
                f"and this coordinator {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
                "update dart on the worker's machine",
            )
        return self._welcome(hello)


def heartbeat_interval(settings: config.Server, workers: int) -> float:
    """Seconds between one worker's heartbeats: more with thousands of workers, to save time.

    Never so long that a live worker would be taken for lost.
    """
    safe = max(settings.heartbeat_seconds, settings.lost_after_seconds / 3)
    return min(safe, max(settings.heartbeat_seconds, workers / HEARTBEATS_PER_SECOND))


async def _ends(hung_up: asyncio.Event) -> None:
    """Raises StreamLostError when the worker is lost, or has a newer stream."""
    await hung_up.wait()
    raise StreamLostError("the worker is lost, or has reconnected")


def _handler(sessions: CoordinatorService) -> grpc.GenericRpcHandler:
    """The generated handler, but with encoded messages: grpc would log 2 KB for each message that it cannot parse."""
    name = pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    session: Any = grpc.stream_stream_rpc_method_handler(sessions.Session, None, None)
    return grpc.method_handlers_generic_handler(name, {"Session": session})


class Server:
    """The listening server; `port` is known after `start`."""

    def __init__(self, settings: config.Server) -> None:
        self._settings = settings
        check_threads()
        self._server = grpc.aio.server(options=server_options(open_files()))
        self._health = health.aio.HealthServicer()
        self._services: tuple[str, ...] = ()
        self.port = 0

    @property
    def address(self) -> str:
        return address_of(self._settings.host, self.port)

    async def start(self, sessions: CoordinatorService, control: control_pb2_grpc.ControlServiceServicer) -> None:
        """Bind and serve. Raises UserError when the port is taken."""
        source = self._settings.tokens.get("control")
        token = read_token(source, "server.tokens.control") if source else None
        self._server.add_generic_rpc_handlers((_handler(sessions), ControlDoor(control, token)))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [
            pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name,
            control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name,
        ]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        where = address_of(listening_host(self._settings.host), self._settings.port)
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
                f"server.port: cannot listen on {where}, which is most likely in use: stop the other program or set "
                f"server.port to 0 for any free port; or server.host ({self._settings.host}) is not of this machine"
            ) from None
        await self._server.start()
        self._services = ("", *names)
        await self.serving(True)

    async def serving(self, well: bool) -> None:
        """Set the answer to health checks: SERVING, or NOT_SERVING while the run makes no progress."""
        told = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._services:
            await self._health.set(name, told)

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=0.5)
