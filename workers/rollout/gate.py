"""Keeps requests out of the engine while its weights change.

vLLM's image cache has a half on each side of a process boundary; a request that enters while the engine is paused for
an update can leave the halves disagreeing, and later requests then fail. So nothing enters during an update: requests
wait here, and an update waits for requests on their way in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open at first. One event loop."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._entering = 0
        self._nobody_entering = asyncio.Event()
        self._nobody_entering.set()
        self._closer = asyncio.Lock()

    @asynccontextmanager
    async def entering(self) -> AsyncIterator[None]:
        """Wait until the gate is open; it stays open while the context lasts."""
        while not self._open.is_set():
            await self._open.wait()
        self._entering += 1
        self._nobody_entering.clear()
        try:
            yield
        finally:
            self._entering -= 1
            if not self._entering:
                self._nobody_entering.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Close the gate and wait for requests on their way in; open it at the end. One caller closes it at a time."""
        async with self._closer:
            self._open.clear()
            try:
                await self._nobody_entering.wait()
                yield
            finally:
                self._open.set()
