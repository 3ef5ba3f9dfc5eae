"""A small machine with OSWorld's routes, over real HTTP: a desktop drawn with Pillow, and files in a dictionary.

Programs are carried out: what comes after OSWorld's prelude runs in Python, with a pyautogui that moves this desktop's
pointer and types into its one text field.
"""

from __future__ import annotations

import contextlib
import email.parser
import email.policy
import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from PIL import Image, ImageDraw

PRELUDE = "import pyautogui; import time; pyautogui.FAILSAFE = False; "


class PyAutoGui:
    """What programs call. Every call is recorded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pointer = (5.0, 5.0)
        self.text = ""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*positional: object, **named: object) -> None:
            words = [*map(repr, positional), *(f"{key}={value!r}" for key, value in named.items())]
            self.calls.append(f"{name}({', '.join(words)})")
            match positional:
                case [int() | float() as x, int() | float() as y, *_]:
                    self.pointer = (x, y)
            if name == "typewrite":
                self.text += str(positional[0])

        return call


class FakeMachine:
    """Use it as a context manager. `revert` makes it new."""

    def __init__(self, screen: tuple[int, int] = (160, 224)) -> None:
        self.screen = screen
        self.failing: dict[str, int] = {}
        """Routes that answer with this status."""
        self.requests: list[str] = []
        self.revert()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._handle(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def get_request(self) -> tuple[socket.socket, object]:
                connection, address = super().get_request()
                outer._connections.append(connection)
                return connection, address

            def handle_error(self, *_: object) -> None:
                return

        self._server = Server(("127.0.0.1", 0), Handler)
        self._connections: list[socket.socket] = []

    def revert(self) -> None:
        self.gui = PyAutoGui()
        self.files: dict[str, bytes] = {}
        self.windows: list[str] = []

    @property
    def port(self) -> int:
        port: int = self._server.server_address[1]
        return port

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """As when a machine dies: connections that clients keep open are cut as well."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append(f"{request.command} {request.path}")
        if status := self.failing.get(request.path):
            return _reply(request, status, b"broken on purpose")
        json_asked = "json" in (request.headers.get("Content-Type") or "")
        asked = json.loads(body or b"{}") if json_asked else _form(request, body)
        try:
            status, answer = self._answer(request.path, asked)
        except Exception as error:  # noqa: BLE001
            status, answer = 500, repr(error).encode()
        return _reply(request, status, answer)

    def _answer(self, path: str, asked: dict[str, object]) -> tuple[int, bytes]:
        match path:
            case "/screenshot":
                return 200, self._drawn()
            case "/terminal":
                return 200, b'{"output": null, "status": "success"}'
            case "/platform":
                return 200, b"Linux"
            case "/execute" | "/setup/execute":
                return 200, json.dumps(self._execute(asked["command"])).encode()
            case "/file":
                content = self.files.get(str(asked["file_path"]))
                return (404, b"{}") if content is None else (200, content)
            case "/setup/upload":
                content = asked["file_data"]
                assert isinstance(content, bytes)
                self.files[str(asked["file_path"])] = content
                return 200, b"uploaded"
            case "/setup/launch" | "/setup/open_file":
                self.windows.append(str(asked.get("path") or asked["command"]))
                return 200, b"launched"
            case "/setup/close_window":
                self.windows = [name for name in self.windows if str(asked["window_name"]) not in name]
                return 200, b"closed"
            case "/setup/activate_window" | "/setup/change_wallpaper" | "/setup/execute_with_verification":
                return 200, b"{}"
        return 404, b"no such route"

    def _execute(self, command: object) -> dict[str, object]:
        """Python programs after the prelude, `cat FILE`, `echo WORDS` and `sleep SECONDS`."""
        match command:
            case ["python", "-c", str(program)]:
                said: list[str] = []
                names = {"pyautogui": self.gui, "time": time, "print": lambda word: said.append(f"{word}\n")}
                exec(program.removeprefix(PRELUDE), names)
                return {"status": "success", "output": "".join(said), "error": "", "returncode": 0}
            case ["cat", str(path)]:
                found = self.files.get(path)
                output = (found or b"").decode()
                return {"status": "success", "output": output, "error": "", "returncode": int(found is None)}
            case ["echo", *words]:
                return {"status": "success", "output": " ".join(words) + "\n", "error": "", "returncode": 0}
            case ["sleep", seconds]:
                time.sleep(float(seconds))
                return {"status": "success", "output": "", "error": "", "returncode": 0}
        raise ValueError(f"no program {command!r}")

    def _drawn(self) -> bytes:
        image = Image.new("RGB", self.screen, (60, 90, 120))
        draw = ImageDraw.Draw(image)
        for place, name in enumerate(self.windows):
            draw.rectangle((10, 20 + 15 * place, self.screen[0] - 10, 32 + 15 * place), fill="white")
            draw.text((12, 21 + 15 * place), name[:24], fill="black")
        draw.text((4, 4), self.gui.text[:24], fill="yellow")
        x, y = self.gui.pointer
        draw.polygon(((x, y), (x + 6, y + 8), (x, y + 9)), fill="red")
        data = io.BytesIO()
        image.save(data, "PNG")
        return data.getvalue()


def _form(request: BaseHTTPRequestHandler, body: bytes) -> dict[str, object]:
    """Fields of a form, url-encoded or in parts."""
    kind = request.headers.get("Content-Type") or ""
    if "multipart" not in kind:
        from urllib.parse import parse_qsl

        return dict(parse_qsl(body.decode()))
    whole = f"Content-Type: {kind}\r\n\r\n".encode() + body
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(whole)
    fields: dict[str, object] = {}
    for part in message.iter_parts():  # type: ignore[attr-defined]
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        fields[name] = content if part.get_filename() else content.decode()
    return fields


def _reply(request: BaseHTTPRequestHandler, status: int, answer: bytes) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(answer)))
    request.end_headers()
    request.wfile.write(answer)
