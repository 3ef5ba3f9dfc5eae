"""A web server in a process that handles signals itself, and bounds what a stranger's connection costs.

A request's head is checked by nobody before it is whole, so its size, its time and the number of connections that have
none are bounded here, below the application and its tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MOST_HEAD = 64 << 10
"""Bytes of a request's line and headers."""
HEAD_SECONDS = 5.0
"""From a connection's first moment, or the end of its last request, until a request's head is whole."""
MOST_WAITING = 256
"""Connections without a whole head: beyond that, the oldest is ended."""
MOST_CONNECTIONS = 800
"""Beyond that a new one is ended at once, so that descriptors are left for the runs' files."""


class HttpServer(uvicorn.Server):
    """`options`: uvicorn's."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        options |= {"http": BoundedProtocol, "h11_max_incomplete_event_size": MOST_HEAD}
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off", **options))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn's own would raise them once more at the end."""
        yield


class BoundedProtocol(H11Protocol):
    """uvicorn's, with the bounds of this module. It has none on a head's time; httptools, which it would choose where
    that is installed, has none on its size either."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
            return
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Begin to wait for a head, or stop."""
        answering = self.cycle is not None and not self.cycle.response_complete
        # After an upgrade another protocol has the transport.
        if answering or self not in self.connections or self.transport.is_closing():
            self._stop()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._end)
            waiting = _waiting(self.server_state)
            waiting[self] = None
            if len(waiting) > MOST_WAITING:
                next(iter(waiting))._end()

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
            _waiting(self.server_state).pop(self, None)

    def _end(self) -> None:
        self._stop()
        self.transport.close()


def _waiting(state: ServerState) -> dict[BoundedProtocol, None]:
    """The server's connections without a whole head, oldest first."""
    found: dict[BoundedProtocol, None] = state.__dict__.setdefault("waiting", {})
    return found
