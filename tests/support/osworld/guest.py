"""A machine as OSWorld's tasks expect it, without a virtual machine: `guest.sh` in namespaces of its own, as root.

Besides what `desktop.py` lists, from Debian's packages: sudo socat xauth iproute2 openssl bc xdotool xdg-utils
gnome-terminal gnome-shell-common libglib2.0-bin dconf-gsettings-backend orchis-gtk-theme pulseaudio pulseaudio-utils
sysstat gimp vlc libreoffice-impress libreoffice-writer libreoffice-gtk3 chromium.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from osworld.desktop import PYTHON, SERVER, child, free_port

INIT = Path(__file__).with_name("guest.sh")
WIDTH, HEIGHT = 1920, 1080
PORTS = (5000, 9222, 8080)
PROGRAMS = ("unshare", "socat", "xauth", "sudo", "Xvfb", "openbox", "gnome-terminal", "gimp", "vlc", "libreoffice")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
needs_guest = pytest.mark.skipif(
    not SERVER or os.geteuid() != 0 or bool(MISSING),
    reason=f"needs root, DART_OSWORLD_SERVER, and the programs that are missing here: {MISSING}",
)


class Guest:
    """One machine. `restart` makes it new, as a virtual machine is reverted; its ports stay the same."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(PORTS, (free_port() for _ in PORTS), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        """For `environment.options.static.hosts`."""
        return "127.0.0.1:{}:{}:8006:{}".format(*(self._ports[port] for port in PORTS))

    def relay(self, stack: contextlib.ExitStack) -> None:
        """Let the ports lead to the sockets in the folder, by names relative to it, which may be longer than a
        socket's may be."""
        for inside, outside in self._ports.items():
            listen = f"TCP-LISTEN:{outside},bind=127.0.0.1,reuseaddr,fork"
            child(stack, ["socat", listen, f"UNIX-CONNECT:{inside}"], dict(os.environ), self._folder)

    def restart(self) -> None:
        self.kill()
        for port in PORTS:
            (self._folder / str(port)).unlink(missing_ok=True)
        alone = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--mount-proc"]
        command = [*alone, "bash", str(INIT), str(self._folder), SERVER, PYTHON, f"{WIDTH}x{HEIGHT}"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)

    def kill(self) -> None:
        """See what a dead machine does."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Reverts(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        super().__init__(("127.0.0.1", 0), _Revert)


class _Revert(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, _Reverts)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.server.guest.host.startswith(f"{asked['host']}:{asked['server']}:")
        self.server.guest.restart()
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@contextlib.contextmanager
def guest(folder: Path) -> Iterator[tuple[Guest, str]]:
    """A machine, and the URL that reverts it, for `environment.options.static.renew`."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        one = Guest(folder)
        one.relay(stack)
        stack.callback(one.kill)
        one.restart()
        reverts = _Reverts(one)
        threading.Thread(target=reverts.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        stack.callback(reverts.server_close)
        stack.callback(reverts.shutdown)
        yield one, f"http://127.0.0.1:{reverts.server_address[1]}/"
