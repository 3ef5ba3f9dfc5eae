"""What runs beside a run, each in a process of its own, so that it never makes the coordinator wait: the dashboard, and
the trackers.

The dashboard's socket is bound here, before it starts: the address is known at once, and requests wait until it
answers.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from dart.config import Config, Dashboard
from dart.core.loopback import is_loopback
from dart.errors import UserError, unwritable
from dart.processes.launcher import Child
from dart.processes.secrets import write_private
from dart.rundir import RunDirectory
from dart.wire import channel
from dart.wire.channel import TOKEN_ENVIRONMENT, address_of, read_token

VIEW_TOKEN_ENVIRONMENT = "DART_VIEW_TOKEN"
"""Holds the dashboard's token; without it one is made where one is needed."""


def view_token(*, needed: bool) -> str | None:
    """The dashboard's token: the given one, or a new one where one is needed.

    It is taken out of this process's environment, so that no worker inherits it.
    """
    given = os.environ.pop(VIEW_TOKEN_ENVIRONMENT, None)
    return given or (secrets.token_urlsafe() if needed else None)


def listen(wanted: Dashboard) -> socket.socket:
    """Bound to `host` and `port`, or to any free port where that one is taken. Raises UserError for a host that fails.

    It is passed to the dashboard's process by its file descriptor.
    """
    for port in (wanted.port, 0):
        try:
            listening = channel.listen(wanted.host, port)
        except OSError as error:
            if port and not isinstance(error, socket.gaierror):
                continue  # another run has its dashboard there
            raise UserError(
                f"dashboard.host is {wanted.host!r}: {error.strerror}: use an address of this machine, such as "
                "127.0.0.1, or set dashboard.enabled: false"
            ) from None
        listening.set_inheritable(True)
        return listening
    raise AssertionError("port 0 was tried")


@dataclass(frozen=True, slots=True)
class Beside:
    """The dashboard of a run in `directory`. `token`: as in `dart.dashboard.access`."""

    directory: Path
    listening: socket.socket
    token: str | None
    control_token: str | None

    @classmethod
    def of(cls, config: Config, directory: Path) -> Beside:
        """Where the coordinator asks its controllers for a token, the dashboard, which gets that token, asks for one,
        too."""
        control = config.server.tokens.get("control")
        control_token = read_token(control, "server.tokens.control") if control else None
        token = view_token(needed=control_token is not None or not is_loopback(config.dashboard.host))
        return cls(directory.absolute(), listen(config.dashboard), token, control_token)

    @property
    def address(self) -> str:
        """The run's page; with the token in it, if there is one."""
        query = f"?token={self.token}" if self.token else ""
        return f"{url(self.listening)}/runs/{self.directory.name}{query}"

    def told(self, *, to_terminal: bool) -> str:
        """The line that says where it is. Output that is kept gets no token: that is in the run's secrets, for the
        owner of the run alone. Raises UserError where it cannot be written there."""
        if self.token is None:
            return f"dashboard {self.address}"
        file = RunDirectory(self.directory).dashboard
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(file, f"{self.address}\n".encode())
        except OSError as error:
            raise UserError(
                f"{file} cannot be written {unwritable(error, 'choose a run directory that can be written to')}"
            ) from None
        shown = self.address if to_terminal else self.address.partition("?")[0]
        return f"dashboard {shown} (with its token in {file})"

    def child(self) -> Child:
        secret = {VIEW_TOKEN_ENVIRONMENT: self.token, TOKEN_ENVIRONMENT: self.control_token}
        descriptor = self.listening.fileno()
        command = [
            sys.executable, "-m", "dart", "view", str(self.directory.parent),
            "--listening", str(descriptor), "--parent-watch",
        ]  # fmt: skip
        environment = {name: value for name, value in secret.items() if value}
        return Child("dashboard", command, environment, needed=False, descriptors=(descriptor,))


def tracking_child(directory: Path) -> Child:
    """`dart track`, which keeps the trackers of the run's config informed while it lasts."""
    command = [sys.executable, "-m", "dart", "track", str(directory.absolute()), "--follow", "--parent-watch"]
    return Child("track", command, needed=False)


def url(listening: socket.socket) -> str:
    """Where a browser finds a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{address_of(host, port)}"
