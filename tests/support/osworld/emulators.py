"""An emulator server with the API of the paper's (desktop_env/docker_server in GUI-Docker-Env), over real HTTP.

It has the same weaknesses: orders are answered only after the boot, machines live for ever, everybody's machines are
listed, and a deletion that comes while another is under way takes the quota down twice.
"""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

FOREIGN = "somebody-else"


@dataclass
class Machine:
    token: str
    made: float = field(default_factory=time.monotonic)


class EmulatorServer:
    """Use it as a context manager. Faults are drawn with `chance`, whose seed makes them repeatable."""

    def __init__(self, quotas: dict[str, int], seed: int = 0) -> None:
        self.quotas, self.chance = quotas, random.Random(seed)
        self.current = dict.fromkeys(quotas, 0)
        self.machines: dict[str, Machine] = {}
        self.boots = (0.0, 0.0)
        """Seconds that a boot takes, uniform."""
        self.faults = 0.0
        """The chance that a request is answered with 500, or its connection closed without an answer."""
        self.forbidden = 0.0
        """The chance that an order is answered with 401 or 403."""
        self.foreign_deletions = 0
        self.overlapping_deletions = 0
        self.calls: list[str] = []
        self._deleting: set[str] = set()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._handle(self)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, *_: object) -> None:
                return  # clients that have gone are part of the test

        self._server = Server(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_foreign(self, token: str = FOREIGN) -> str:
        machine = uuid.uuid4().hex
        self.machines[machine] = Machine(token)
        return machine

    def of(self, token: str) -> set[str]:
        return {name for name, machine in tuple(self.machines.items()) if machine.token == token}

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length) or b"{}")
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.calls.append(f"{request.command} {request.path}")
        fault = self.chance.random() < self.faults
        if fault and self.chance.random() < 0.5:
            request.close_connection = True
            return  # no answer at all, and nothing done
        status, answer = (500, {"code": 500}) if fault else self._answer(request, body, token)
        if fault is False and self.chance.random() < self.faults:
            request.close_connection = True
            return  # done, but the answer is lost
        data = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _answer(self, request: BaseHTTPRequestHandler, body: dict[str, str], token: str) -> tuple[int, object]:
        match request.command, request.path.strip("/").split("/"):
            case _, ["start_emulator"]:
                return self._start(token)
            case "DELETE", ["emulators", machine]:
                return self._stop(machine, token)
            case "POST", ["stop_emulator"]:
                return self._stop(body["emulator_id"], token)
            case "GET", ["emulators"]:
                return 200, [
                    {
                        "emulator_id": name,
                        "token": one.token,
                        "duration_minutes": int(time.monotonic() - one.made) // 60,
                    }
                    for name, one in tuple(self.machines.items())
                ]
            case "GET", ["tokens"]:
                return 200, {name: {"current": self.current[name], "limit": self.quotas[name]} for name in self.quotas}
        return 404, {"code": 404}

    def _start(self, token: str) -> tuple[int, object]:
        if self.chance.random() < self.forbidden:
            status = self.chance.choice((401, 403))
            return status, {"code": status, "message": "not now"}
        if token not in self.quotas:
            return 403, {"code": 403, "message": "unknown token"}
        with self._lock:
            if self.current[token] >= self.quotas[token]:
                return 429, {"code": 429, "message": "quota exceeded"}
            self.current[token] += 1
        time.sleep(self.chance.uniform(*self.boots))
        machine = uuid.uuid4().hex
        self.machines[machine] = Machine(token)
        ports = {"server_port": 5000, "vnc_port": 8006, "chromium_port": 9222, "vlc_port": 8080}
        return 200, {"code": 0, "data": {"emulator_id": machine, "token": token, **ports}}

    def _stop(self, machine: str, token: str) -> tuple[int, object]:
        one = self.machines.get(machine)
        if one is None:
            return 404, {"code": 404}
        if one.token != token:
            self.foreign_deletions += 1
            return 403, {"code": 403}
        with self._lock:
            self.overlapping_deletions += machine in self._deleting
            self._deleting.add(machine)
        time.sleep(self.chance.uniform(0, 0.01))
        with self._lock:
            self._deleting.discard(machine)
            if self.machines.pop(machine, None) is not None:
                self.current[one.token] -= 1
        return 200, {"code": 0}
