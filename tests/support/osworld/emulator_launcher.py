"""The published emulator server, unmodified, with a `docker` that starts an Xvfb display instead of a container.

    python emulator_launcher.py GUI-DOCKER-ENV PORT WORK-FOLDER SEED

It runs `desktop_env/docker_server/server.py` of the named folder as `__main__`, as that project's README does. Its
DockerProvider is the published one, too: it finds ports, starts "containers" through `docker.from_env()`, and waits for
their screenshot. A container here is an Xvfb display, and a server on its port 5000 that answers /screenshot with the
display's frame buffer once the boot time has passed. If DART_OSWORLD_SERVER is set, the first container of each token
is a whole desktop instead, with OSWorld's published server in it (desktop.py).

What is changed from outside: waits of seconds are milliseconds (WAIT_TIME, RETRY_INTERVAL), the server listens on
127.0.0.1 without Flask's reloader, and a WSGI layer in front of it injects faults: orders and deletions whose token is
taken away (the published code then answers 401) or falsified (403), and answers that are lost after the work was done.
GET /test/state says what the layer saw and which containers live; POST /test/faults sets the chances.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import flask
from werkzeug.serving import make_server

FOLDER, PORT, WORK, SEED = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
chance = random.Random(SEED)
faults = {"lost": 0.0, "unauthorised": 0.0, "boot": 0.0}
"""`boot`: the most seconds that a boot takes."""
answers: Counter[str] = Counter()


class Container:
    """What the published provider uses of docker's. `labels`: the emulator's id and token."""

    def __init__(self, ports: dict[int, int], labels: dict[str, str]) -> None:
        self.id, self.ports, self.labels = uuid.uuid4().hex, ports, labels
        self.attrs = {
            "NetworkSettings": {"Ports": {f"{inside}/tcp": [{"HostPort": str(ports[inside])}] for inside in ports}}
        }
        self.undo = contextlib.ExitStack()
        token = labels["osworld.token"]
        with containers.lock:
            first = token not in containers.tokens
            containers.tokens.add(token)
        self.kind = "desktop" if first and os.environ.get("DART_OSWORLD_SERVER") else "display"
        (self._desktop if self.kind == "desktop" else self._display)(ports[5000])

    def stop(self) -> None:
        self.undo.close()

    def remove(self) -> None:
        with containers.lock:
            containers.alive.pop(self.id)

    def _desktop(self, port: int) -> None:
        from osworld.desktop import desktop

        self.undo.enter_context(desktop(WORK / self.id, port))

    def _display(self, port: int) -> None:
        folder = WORK / self.id
        folder.mkdir()
        read, write = os.pipe()
        command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "160x120x24", "-nolisten", "tcp", "-fbdir", folder]
        xvfb = subprocess.Popen(
            command, pass_fds=(write,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.undo.callback(xvfb.wait)
        self.undo.callback(xvfb.kill)
        os.close(write)
        with os.fdopen(read) as told:
            told.readline()  # its number, once it is up
        server = _Screen(port, folder / "Xvfb_screen0", time.monotonic() + chance.uniform(0, faults["boot"]))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.undo.callback(server.server_close)
        self.undo.callback(server.shutdown)


class _Screen(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, frame: Path, booted: float) -> None:
        self.frame, self.booted = frame, booted
        super().__init__(("127.0.0.1", port), _Screenshot)


class _Screenshot(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Screen)
        booted = time.monotonic() >= self.server.booted
        data = self.server.frame.read_bytes() if booted else b"booting"
        self.send_response(200 if booted else 503)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


class Containers:
    def __init__(self) -> None:
        self.alive: dict[str, Container] = {}
        self.tokens: set[str] = set()
        self.lock = threading.Lock()

    def run(self, image: str, *, ports: dict[int, int], labels: dict[str, str], **_: object) -> Container:
        made = Container(ports, labels)
        with self.lock:
            self.alive[made.id] = made
        return made

    def list(self) -> list[Container]:
        with self.lock:
            return [*self.alive.values()]


containers = Containers()


class Layer:
    """In front of the published application."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self.application = application

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        route = environ["REQUEST_METHOD"] + " " + environ["PATH_INFO"]
        if route.endswith(("/test/state", "/test/faults")):
            return self._about(environ, start)
        changes = route.startswith(("POST /start_emulator", "DELETE /emulators/"))
        if changes and chance.random() < faults["unauthorised"]:
            # The body says the token, too, so it goes as well.
            environ["HTTP_AUTHORIZATION"] = chance.choice(("Bearer ", "Bearer unknown"))
        kind = "order" if "start" in route else "delete" if "DELETE" in route else "list"
        lost = changes and chance.random() < faults["lost"]

        def started(status: str, *more: Any) -> Any:
            answers[f"{kind} {status[:3]}{' lost' if lost else ''}"] += 1
            return start(status, *more)

        body = self.application(environ, started)
        if lost:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return body

    @staticmethod
    def _about(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "POST":
            faults.update(json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))))
        alive = [
            {"token": one.labels["osworld.token"], "id": one.labels["osworld.emulator_id"], "kind": one.kind}
            for one in containers.list()
        ]
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"answers": answers, "alive": alive}).encode()]


def serve(app: flask.Flask, **_: object) -> None:
    """Instead of Flask.run, which would listen on all interfaces and start itself again."""
    from desktop_env.providers.docker import provider

    provider.WAIT_TIME, provider.RETRY_INTERVAL = 0.01, 0.02
    print("listening", flush=True)
    make_server("127.0.0.1", PORT, Layer(app.wsgi_app), threaded=True).serve_forever()


def main() -> None:
    docker = types.ModuleType("docker")
    client = types.SimpleNamespace(containers=containers)
    docker.from_env = lambda: client  # type: ignore[attr-defined]
    sys.modules["docker"] = docker
    flask.Flask.run = serve  # type: ignore[assignment,method-assign]
    sys.path[:0] = [str(FOLDER), str(Path(__file__).parents[1])]
    os.chdir(WORK)
    runpy.run_path(str(FOLDER / "desktop_env/docker_server/server.py"), run_name="__main__")


if __name__ == "__main__":
    main()
