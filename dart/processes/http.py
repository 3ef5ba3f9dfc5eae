"""A web server in a process that handles signals itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn's own would raise them once more at the end."""
        yield
