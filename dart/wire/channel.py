"""gRPC settings that both ends share: message size, keepalive, TLS, bearer tokens, the protocol's version."""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from dart.core.loopback import is_loopback
from dart.errors import UserError

PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1
"""The oldest worker that this coordinator still understands."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
ROOM_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""The most that texts, tokens and screenshots in a message may take; the rest is for what goes around them."""
IMAGE_BYTES = 128
"""The most that a screenshot takes in addition to its data."""

OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A stopped peer sends no FIN, so ping it, even while no call is active.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Two runs on one machine must not share a port, and a taken port must be an error.
    ("grpc.so_reuseport", 0),
    # Bandwidth probing would send a ping with nearly every message on a mostly quiet connection. The window that these
    # pings would widen is wide from the start instead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
)
KEPT_DESCRIPTORS = 128
"""How many open files of the coordinator's limit are not given to connections, but kept for its database, screenshots,
logs and child processes; half of a small limit."""

TOKEN_ENVIRONMENT = "DART_TOKEN"
PROXY_ENVIRONMENT = "grpc_proxy"
"""A proxy for a coordinator on another machine. Those that are meant for the web (http_proxy and the like) are not
used: a proxy for web pages seldom lets a stream of gRPC live, and a coordinator is rarely behind one."""


def server_options(open_files: int) -> Sequence[tuple[str, int]]:
    """For a server that may open so many files: connections on which nothing is said end, and there are never so many
    that no file can be opened. A session, or a call, is never idle."""
    return (
        *OPTIONS,
        ("grpc.server_handshake_timeout_ms", 5_000),
        ("grpc.max_connection_idle_ms", 60_000),
        ("grpc.max_allowed_incoming_connections", most_connections(open_files)),
    )


def most_connections(open_files: int) -> int:
    return max(open_files - KEPT_DESCRIPTORS, open_files // 2)


def most_env_workers(open_files: int) -> int:
    """Where they have all the connections, one more cannot be told why it gets none, and neither the trainer that
    comes last nor `dart status` gets one."""
    return most_connections(open_files) * 7 // 8


@dataclass(frozen=True, slots=True)
class Dial:
    """How a client reaches the coordinator. `token` is never logged, and never sent in the clear over a network.

    Raises UserError when it would be, and for TLS options that lack one of their number.
    """

    address: str
    token: str | None = None
    tls_ca: Path | bytes | None = None
    """PEM, or its file."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        host = self.address.rpartition(":")[0]
        if self.token and self.tls_ca is None and not is_loopback(host):
            raise UserError(
                f"{TOKEN_ENVIRONMENT} would go to {self.address} unencrypted: name the coordinator's certificate "
                f"authority with --tls-ca, or unset {TOKEN_ENVIRONMENT}"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UserError("--tls-certificate and --tls-key go together: give both or neither")
        if self.tls_certificate and self.tls_ca is None:
            raise UserError("--tls-certificate needs the coordinator's certificate authority: give --tls-ca as well")

    def __repr__(self) -> str:
        return f"Dial({self.address!r})"

    def channel(self) -> grpc.aio.Channel:
        proxied = bool(os.environ.get(PROXY_ENVIRONMENT)) and not is_loopback(self.address.rpartition(":")[0])
        options = (*OPTIONS, ("grpc.enable_http_proxy", int(proxied)))
        if self.tls_ca is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        pair = {}
        if self.tls_certificate and self.tls_key:  # __post_init__ refuses one without the other
            pair = {
                "private_key": read_file(self.tls_key, "--tls-key"),
                "certificate_chain": read_file(self.tls_certificate, "--tls-certificate"),
            }
        authority = self.tls_ca if isinstance(self.tls_ca, bytes) else _authority(self.tls_ca)
        credentials = grpc.ssl_channel_credentials(authority, **pair)
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


_authorities: dict[Path, bytes] = {}
"""As they were read last: a file system that fails for a moment must not end a worker that dials again."""


def _authority(path: Path) -> bytes:
    """The certificate authority's file. Raises UserError if it has never been readable."""
    try:
        _authorities[path] = read_file(path, "--tls-ca")
    except UserError:
        if path not in _authorities:
            raise
    return _authorities[path]


def address_of(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def listening_host(host: str) -> str:
    """Where to listen so that other machines reach this one by `host`: there, or on every address where that is a name
    for the loopback here, as a machine's own name is on Debian."""
    if is_loopback(host) or ":" in host:
        return host
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return host  # listening there says what is wrong
    if not all(is_loopback(address) for address in found):
        return host
    return "::" if all(":" in address for address in found) else "0.0.0.0"


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens there; an IPv6 address may have brackets. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.removeprefix("[").removesuffix("]"), port), family=family)


def free_port() -> int:
    """A port that is free here now; another process may take it before its user listens there."""
    with listen("127.0.0.1", 0) as taken:
        return int(taken.getsockname()[1])


def read_file(path: Path, field: str, wanted: str = "a readable PEM file") -> bytes:
    """The bytes of a key, certificate or token file. Raises UserError naming the field and what is `wanted`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read ({error.strerror}): name {wanted}") from None


def read_token(source: str, field: str) -> str:
    """A token from env:NAME or file:PATH. Raises UserError naming the field, never the token."""
    kind, _, rest = source.partition(":")
    wanted = "a readable file with the token alone"
    raw = os.environb.get(rest.encode(), b"") if kind == "env" else read_file(Path(rest), field, wanted)
    return token_in(raw, source, field)


def token_in(raw: bytes, source: str, field: str) -> str:
    """The token that was read from `source`. Raises UserError as `read_token` does."""
    value = raw.decode("utf-8", "replace").strip()
    if not value:
        raise UserError(f"{field}: {source} is empty: put the token there")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"{field}: {source} is more than one line, or not ASCII: put the token alone there")
    return value


def authorised(metadata: Mapping[str, str], token: str | None) -> bool:
    """True when no token is required, or the caller's bearer token matches."""
    if token is None:
        return True
    return hmac.compare_digest(metadata.get("authorization", "").encode(), f"Bearer {token}".encode())
