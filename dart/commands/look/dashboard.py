"""`dart view`: the dashboard of runs, live or past, in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import uvloop

from dart.core.loopback import is_loopback
from dart.dashboard.app import make_dashboard
from dart.dashboard.library import Library, check_paths
from dart.errors import UserError
from dart.processes.beside import url, view_token
from dart.processes.http import HttpServer
from dart.processes.settings import ending_signals, watch_parent
from dart.wire.channel import listen

PORT = 8700


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """The command line of `dart view`. `port` 0: any that is free; None: `PORT`, or any if another program has that."""

    runs: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int | None = None
    listening: int | None = None
    """The file descriptor of a socket that listens already, from `dart train`."""
    parent_watch: bool = False


def view(options: ViewOptions) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises UserError for anything that the user can fix."""
    paths = options.runs or (Path("runs"),)
    check_paths(paths)
    token = view_token(needed=not is_loopback(options.host))
    with _listen(options) as listening:
        uvloop.run(_serve(paths, listening, token, parent_watch=options.parent_watch))


def _listen(options: ViewOptions) -> socket.socket:
    if options.listening is not None:
        return socket.socket(fileno=options.listening)
    if options.port is None:
        with contextlib.suppress(OSError):
            return listen(options.host, PORT)
    port = options.port or 0
    try:
        return listen(options.host, port)
    except OSError as error:
        if not port or isinstance(error, socket.gaierror):
            raise UserError(f"--host {options.host}: {error.strerror}: use an address of this machine") from None
        raise UserError(
            f"--port {port} on {options.host}: {error.strerror}: stop the other program, or use --port 0 for any free "
            "port"
        ) from None


async def _serve(paths: Sequence[Path], listening: socket.socket, token: str | None, *, parent_watch: bool) -> None:
    dashboard = make_dashboard(Library(paths), token)
    server = HttpServer(dashboard.app, access_log=False, timeout_graceful_shutdown=1)

    def stop() -> None:
        dashboard.streams.end()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, stop)
    if parent_watch:
        watch_parent(loop, stop)  # and the address is the parent's to tell
    else:
        click.echo(f"open {url(listening)}/{f'?token={token}' if token else ''}  (Ctrl-C ends it)")
    try:
        await server.serve(sockets=[listening])
    finally:
        await dashboard.close()
