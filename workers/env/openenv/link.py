"""One session with an OpenEnv server: its WebSocket, on which each session has an environment of its own.

The server's HTTP routes `/reset` and `/step` are of no use here: they make an environment for each request and throw it
away afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import JsonValue, ValidationError

from dart.core.cutting import cut
from dart.errors import UserError
from dart.workers.env.openenv.reading import MOST_MESSAGE_BYTES, Answer, Rows, read_answer
from dart.worlds import EnvironmentFailure, Full

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

SAID_CHARACTERS = 500
"""Of a server's own words, in a message about it."""
CAPACITY = "CAPACITY_REACHED"
TASK_REFUSED = "TASK_REFUSED"
"""What `dart serve-world` answers where another attempt would fail as well."""


class Link:
    """An open session. Each request has one answer, in order; after a failure in between, it cannot be used again."""

    def __init__(self, socket: ClientConnection, url: str) -> None:
        self._socket, self._url = socket, url
        self._asking = False
        """A request has no answer yet, or never got one."""

    @classmethod
    async def open(cls, url: str, token: str | None) -> Link:
        """Raises EnvironmentFailure if nothing answers at the address, Full if the server has no room."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            # A server busy with an environment may not answer pings for long, and the verbs have limits of their own.
            socket = await connect(
                url, additional_headers=headers, max_size=MOST_MESSAGE_BYTES, ping_timeout=None, proxy=None
            )
        except (OSError, WebSocketException, TimeoutError) as error:
            raise EnvironmentFailure(
                f"the OpenEnv server {url} cannot be reached: {type(error).__name__}: {error}"
            ) from None
        link = cls(socket, url)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(link.close)
            await link.ask("state")
            undo.pop_all()
        return link

    @property
    def usable(self) -> bool:
        from websockets.protocol import State

        return not self._asking and self._socket.state is State.OPEN

    async def ask(self, kind: str, data: JsonValue = None) -> tuple[Answer, Mapping[str, Rows]]:
        """Send a request and return its answer as `read_answer` does. Raises EnvironmentFailure for an error or a lost
        connection, Full, and UserError if the task itself is refused.

        After an error the session goes on: the server has answered.
        """
        from websockets.exceptions import ConnectionClosed

        if self._asking:
            raise EnvironmentFailure("an earlier request was never answered")
        message = {"type": kind} | ({} if data is None else {"data": data})
        self._asking = True
        try:
            with contextlib.suppress(ConnectionClosed):  # what the server said before it closed can still be read
                await self._socket.send(json.dumps(message))
            answer, rows = await asyncio.to_thread(read_answer, await self._socket.recv())
        except ConnectionClosed as error:
            raise EnvironmentFailure(f"the OpenEnv server {self._url} closed the session: {error}") from None
        except ValueError as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise EnvironmentFailure(
                f"the OpenEnv server {self._url} sent no OpenEnv message ({why}): is environment.options.url right?"
            ) from None
        self._asking = False
        if answer.type == "error":
            code, said = (
                cut(str(answer.data.get(name, f"no {name}")), SAID_CHARACTERS) for name in ("code", "message")
            )
            if code == CAPACITY:
                raise Full(f"the OpenEnv server {self._url} is full: {said}")
            if code == TASK_REFUSED:
                raise UserError(f"the OpenEnv server {self._url} refuses the task: {said}")
            details = f" {json.dumps(answer.data['errors'])[:SAID_CHARACTERS]}" if "errors" in answer.data else ""
            raise EnvironmentFailure(f"the OpenEnv server answered {kind} with {code}: {said}{details}")
        return answer, rows

    async def close(self) -> None:
        """Never fails, and does not wait for a server that has gone."""
        from websockets.exceptions import WebSocketException

        with contextlib.suppress(OSError, WebSocketException):
            if self.usable:
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()
