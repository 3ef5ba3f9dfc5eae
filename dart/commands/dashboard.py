"""`dart view`: the dashboard of runs, live or past, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import uvicorn
import uvloop

from dart.core.loopback import is_loopback
from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library, check_paths
from dart.errors import UserError
from dart.processes.settings import ending_signals

TOKEN_ENVIRONMENT = "DART_VIEW_TOKEN"


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """The command line of `dart view`. `port` 0: any that is free."""

    runs: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8700


def view(options: ViewOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises UserError for anything that the user can fix."""
    paths = options.runs or (Path("runs"),)
    check_paths(paths)
    token = os.environ.pop(TOKEN_ENVIRONMENT, None) or (None if is_loopback(options.host) else secrets.token_urlsafe())
    try:
        listening = socket.create_server((options.host, options.port))
    except OSError as error:
        raise UserError(
            f"--port {options.port} on {options.host}: {error.strerror}: stop the other program, or use --port 0 for "
            "any free port"
        ) from None
    with listening:
        uvloop.run(_serve(paths, listening, token))


async def _serve(paths: Sequence[Path], listening: socket.socket, token: str | None) -> None:
    dashboard = make_dashboard(Library(paths), token)
    server = _Server(
        uvicorn.Config(
            dashboard.app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
    )

    def stop() -> None:
        dashboard.streams.end()
        server.should_exit = True

    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"open http://{shown}:{port}/{f'?token={token}' if token else ''}  (Ctrl-C ends it)")
    try:
        await server.serve(sockets=[listening])
    finally:
        await dashboard.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn's own would raise them once more at the end."""
        yield
