"""Admission: decides which streams may begin a session, before any of their messages count.

The checks are in this order, so that an outsider costs as little as possible: the bearer token in the call's metadata,
before the first message is read; a place among the at most `MOST_WAITING` streams that have not sent Hello yet, where a
new stream displaces the oldest; a Hello within `HELLO_SECONDS`, of at most `HELLO_BYTES`; and the token again, now for
the role that Hello names. Refusals are logged as one line every `LOG_SECONDS`, with their number.

`ControlDoor` does the same for the Control service: the token, then the size of the request, then its parsing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory

from dart import config
from dart.v1 import control_pb2, control_pb2_grpc
from dart.v1 import session_pb2 as pb
from dart.wire.channel import authorised, read_token
from dart.wire.outbox import MalformedError, messages
from dart.wire.role import ROLE_NAMES
from dart.wire.stream import Stream

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
HELLO_BYTES = 64 * 1024
MOST_WAITING = 1024
LOG_SECONDS = 10.0
MOST_REQUEST_BYTES = 1 << 20
"""The size of one request to Control; ten thousand tasks take some 600 KB."""


class Refused(Exception):
    """The stream is to end with `code` and this message."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(slots=True)
class RareLine:
    """Limits a log line that may come thousands of times to one every `seconds` (pure)."""

    seconds: float
    _next: float = float("-inf")
    _left_out: int = 0

    def due(self, now: float) -> int | None:
        """If this line is to be written, how many were left out since the last one; else None."""
        if now < self._next:
            self._left_out += 1
            return None
        left_out, self._left_out, self._next = self._left_out, 0, now + self.seconds
        return left_out


class Door:
    def __init__(self, settings: config.Server) -> None:
        self._tokens = {
            str(role): read_token(source, f"server.tokens.{role}") for role, source in settings.tokens.items()
        }
        self._places: dict[int, asyncio.Timeout] = {}
        """The streams that have not sent Hello yet, oldest first."""
        self._numbers = itertools.count()
        self._line = RareLine(LOG_SECONDS)

    async def hello(self, stream: Stream, metadata: Mapping[str, str]) -> pb.Hello:
        """The Hello of a stream that may begin a session. Raises Refused, StreamLostError."""
        if not any(authorised(metadata, self._tokens.get(role)) for role in ROLE_NAMES.values()):
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing bearer token")
        hello = _hello(await self._first(stream))
        role = ROLE_NAMES.get(hello.role)
        if role is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"role {hello.role} is unknown: use env, rollout or train")
        if not authorised(metadata, self._tokens.get(role)):
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, f"wrong or missing bearer token for role {role}")
        return hello

    def refused(self, peer: str, why: object) -> None:
        """Log the refusal, at a limited rate."""
        if (left_out := self._line.due(time.monotonic())) is not None:
            more = f" (and {left_out} more since the last such line)" if left_out else ""
            log.warning("refused a stream from %s: %s%s", peer[:100], str(why)[:200], more)

    async def _first(self, stream: Stream) -> bytes:
        """The first message. Raises Refused when it does not come in time, or a newer stream takes its place."""
        number = next(self._numbers)
        try:
            async with asyncio.timeout(HELLO_SECONDS) as place:
                self._places[number] = place
                if len(self._places) > MOST_WAITING:
                    oldest = self._places.pop(next(iter(self._places)))
                    if not oldest.expired():  # its time may be up, though its coroutine has not heard of that
                        oldest.reschedule(0.0)
                return await stream.read()
        except TimeoutError:
            if number in self._places:
                why = f"no Hello within {HELLO_SECONDS:.0f} s"
            else:
                why = f"{MOST_WAITING} newer streams are waiting to send Hello"
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, why) from None
        finally:
            self._places.pop(number, None)


def _hello(encoded: bytes) -> pb.Hello:
    if len(encoded) > HELLO_BYTES:
        why = f"the first message has {len(encoded):,} bytes, and a Hello may have {HELLO_BYTES:,}"
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, why)
    try:
        first, *more = messages(encoded, pb.SessionRequest)
    except MalformedError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
    if more or not first.HasField("hello"):
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session must be Hello")
    return first.hello


class ControlDoor(grpc.GenericRpcHandler):
    """Hands calls of Control to `service`. `token`: the one that callers need; None if they need none."""

    def __init__(self, service: control_pb2_grpc.ControlServiceServicer, token: str | None) -> None:
        self._token = token
        described = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
        self._handlers: dict[str, object] = {}
        self._refusals: dict[str, object] = {}
        for method in described.methods:
            kind, refusal = grpc.unary_unary_rpc_method_handler, _refuse
            if method.server_streaming:
                kind, refusal = grpc.unary_stream_rpc_method_handler, _refuse_stream
            asked, answered = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
            name = f"/{described.full_name}/{method.name}"
            self._handlers[name] = kind(getattr(service, method.name), _parser(asked), answered.SerializeToString)
            self._refusals[name] = kind(refusal, None, None)

    def service(self, handler_call_details: Any) -> Any:
        """The method's handler; None for methods of other services."""
        metadata = {key: str(value) for key, value in handler_call_details.invocation_metadata or ()}
        found = self._handlers if authorised(metadata, self._token) else self._refusals
        return found.get(handler_call_details.method)


def _parser(kind: Any) -> Any:
    def parse(data: bytes) -> Any:
        """gRPC answers UNKNOWN if this raises."""
        if len(data) > MOST_REQUEST_BYTES:
            raise ValueError(f"a request of {len(data):,} bytes, and the limit is {MOST_REQUEST_BYTES:,}")
        return kind.FromString(data)

    return parse


async def _refuse(request: bytes, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing bearer token for control")


async def _refuse_stream(request: bytes, context: Any) -> Any:
    await _refuse(request, context)
    yield b""
