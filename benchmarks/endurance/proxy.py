"""A TCP proxy between workers and their coordinator whose connections can be cut or held at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class _Connection:
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def cut(self) -> None:
        """Reset it: whatever was still in flight is lost."""
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """Listens on a free port of the loopback interface and forwards every connection to `target`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: list[_Connection] = []
        self._server: asyncio.Server | None = None
        self._holds = 0
        """How many hold the network now."""

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.cut()

    def cut_one(self, chance: random.Random) -> bool:
        """Cut a connection that `chance` picks. False if there is none."""
        if not self._connections:
            return False
        chance.choice(self._connections).cut()
        return True

    def cut_all(self) -> int:
        """Cut all connections; returns how many there were."""
        count = len(self._connections)
        for connection in list(self._connections):
            connection.cut()
        return count

    async def hold(self, seconds: float) -> None:
        """Stall the network: nothing gets through for `seconds`, on connections made meanwhile either, and nothing is
        lost."""
        self._holds += 1
        for connection in self._connections:
            connection.flowing.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._holds -= 1
            if not self._holds:
                for connection in self._connections:
                    connection.flowing.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((writer, back))
        if not self._holds:
            connection.flowing.set()
        self._connections.append(connection)
        try:
            async with asyncio.TaskGroup() as pipes:
                pipes.create_task(_pipe(reader, back, connection))
                pipes.create_task(_pipe(there, writer, connection))
        finally:
            self._connections.remove(connection)
            connection.cut()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            await connection.flowing.wait()
            writer.write(data)
            await writer.drain()
    connection.cut()  # A half-closed gRPC connection is of no use to either end.
