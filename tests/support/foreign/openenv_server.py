"""A small server of the OpenEnv protocol with actions and observations of its own, in a thread, for tests."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from dart.worlds import from_pixels

SIZE = (20, 10)


class Clicks:
    """Each click adds a tenth to the reward that it answers; three end the episode."""

    def __init__(self, most: int = 4, rows: bool = False) -> None:
        self.most, self.rows = most, rows
        self.sessions = 0
        self.heard: list[dict[str, Any]] = []
        self.says: dict[str, Any] | None = None
        """If given, the answer to everything."""

    def session(self, socket: ServerConnection) -> None:
        if self.sessions >= self.most:
            socket.send(json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "4 of 4"}}))
            return
        self.sessions += 1
        clicks = 0
        with contextlib.suppress(ConnectionClosed):
            for text in socket:
                message = json.loads(text)
                self.heard.append(message)
                match message["type"]:
                    case "close":
                        break
                    case "reset":
                        clicks = 0
                    case "step":
                        clicks += message["data"]["command"].startswith("click")
                state = {"type": "state", "data": {"step_count": clicks}}
                answer = state if message["type"] == "state" else self.observation(clicks)
                socket.send(json.dumps(self.says or answer))
        self.sessions -= 1

    def observation(self, clicks: int) -> dict[str, Any]:
        width, height = SIZE
        pixels = bytes([60 * clicks]) * (3 * width * height)
        shot = base64.b64encode(from_pixels(pixels, width, height).data).decode()
        row = [[60 * clicks] * 3] * width
        seen = {
            "screen": [row] * height if self.rows else shot,
            "goal": ["Click", "thrice"],
            "note": f"{clicks} so far",
        }
        return {"type": "observation", "data": {"observation": seen, "reward": clicks / 10, "done": clicks >= 3}}


@contextlib.contextmanager
def serving(clicks: Clicks) -> Iterator[tuple[str, Server]]:
    """The server's address, and the server."""
    with serve(clicks.session, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", server
        server.shutdown()
        thread.join()
