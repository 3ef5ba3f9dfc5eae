"""Server-sent events: the status of a run and how far it has come, while somebody looks.

All who look at one run share one poll of it, once a second. For a run that is over everything is sent once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from dart.core.json_text import to_json
from dart.errors import UserError
from dart.inspection.inspector import Inspector, Pulse
from dart.inspection.records import RunStatus
from dart.store.records import RunState

POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
RETRY_MILLISECONDS = 2000
_STATUS = TypeAdapter(RunStatus)


def _message(kind: str, data: str) -> bytes:
    return f"event: {kind}\ndata: {data}\n\n".encode()


@dataclass(slots=True, eq=False)
class _Watch:
    """The poll of one run, and the queues of those who look at it."""

    task: asyncio.Task[None] | None = None
    listeners: set[asyncio.Queue[bytes | None]] = field(default_factory=set)
    last: dict[str, bytes] = field(default_factory=dict)
    """The newest message of each kind, for those who come later."""

    def tell(self, kind: str, data: str) -> None:
        message = _message(kind, data)
        if self.last.get(kind) == message:
            return
        self.last[kind] = message
        for listener in self.listeners:
            with contextlib.suppress(asyncio.QueueFull):  # one that reads too slowly misses some
                listener.put_nowait(message)


class Streams:
    """The streams of all runs of a dashboard."""

    def __init__(self, poll_seconds: float = POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._watches: dict[str, _Watch] = {}
        self._ending = asyncio.Event()

    def end(self) -> None:
        """End all streams soon, because the server ends."""
        self._ending.set()
        for watch in self._watches.values():
            for listener in watch.listeners:
                with contextlib.suppress(asyncio.QueueFull):
                    listener.put_nowait(None)

    async def stream(self, inspector: Inspector) -> AsyncIterator[bytes]:
        """Messages until the run is over or the client goes away."""
        watch = self._watches.setdefault(inspector.files.directory.name, _Watch())
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(100)
        watch.listeners.add(queue)
        if watch.task is None or watch.task.done():
            watch.last.clear()
            watch.task = asyncio.get_running_loop().create_task(self._poll(inspector, watch))
        try:
            yield f"retry: {RETRY_MILLISECONDS}\n\n".encode()
            for newest in tuple(watch.last.values()):
                yield newest
            while not self._ending.is_set():
                try:
                    message = await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if message is None:
                    return
                yield message
        finally:
            watch.listeners.discard(queue)
            if not watch.listeners and watch.task is not None:
                watch.task.cancel()
                self._watches.pop(inspector.files.directory.name, None)

    async def _poll(self, inspector: Inspector, watch: _Watch) -> None:
        before: Pulse | None = None
        while True:
            try:
                pulse = await inspector.pulse()
                if pulse != before or pulse.state == RunState.RUNNING:
                    watch.tell("status", _STATUS.dump_json(await inspector.status()).decode())
                if pulse != before:
                    watch.tell("events", to_json(asdict(pulse)))
                before = pulse
            except UserError as error:  # a busy disk, a run directory that is moved: it is tried again
                watch.tell("problem", to_json({"error": str(error)}))
                before = None
            if before is not None and before.state != RunState.RUNNING:
                watch.tell("ended", to_json({"state": before.state}))
                for listener in watch.listeners:
                    with contextlib.suppress(asyncio.QueueFull):
                        listener.put_nowait(None)
                return
            await asyncio.sleep(self._poll_seconds)
