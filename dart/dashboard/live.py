"""Server-sent events: the status of a run and how far it has come, while somebody looks.

All who look at one run share one poll of it, once a second. For a run that is over everything is sent once. A stream
that has nothing to tell still says so every few seconds, in an event of its own: a page takes one that is silent for
half a minute for broken (`SILENT_MILLISECONDS` in `web/src/lib/stream.svelte.ts`), and comments never reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from dart.core.json_text import to_json
from dart.dashboard.library import Library
from dart.errors import UserError
from dart.inspection.inspector import Inspector, Pulse
from dart.inspection.opening import told
from dart.inspection.records import RunStatus
from dart.store.records import RunState

POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
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

    def forget(self, kind: str) -> None:
        """The next message of this kind is sent, even if it is the same; those who come later are not sent the last."""
        self.last.pop(kind, None)

    def end(self) -> None:
        """End the streams of all who look."""
        for listener in self.listeners:
            if listener.full():
                listener.get_nowait()
            listener.put_nowait(None)


class Streams:
    """The streams of all runs of a dashboard."""

    def __init__(self, library: Library, poll_seconds: float = POLL_SECONDS) -> None:
        self._library, self._poll_seconds = library, poll_seconds
        self._watches: dict[str, _Watch] = {}
        self._ending = asyncio.Event()

    def end(self) -> None:
        """End all streams soon, because the server ends."""
        self._ending.set()
        for watch in self._watches.values():
            watch.end()

    async def stream(self, run_id: str) -> AsyncIterator[bytes]:
        """Messages until the run is over or the client goes away. Raises as `Library.run` does."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(100)
        async with self._library.run(run_id) as inspector:
            watch = self._watches.setdefault(run_id, _Watch())
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
                        yield _message("heartbeat", "{}")
                        continue
                    if message is None:
                        return
                    yield message
            finally:
                watch.listeners.discard(queue)
                if not watch.listeners and watch.task is not None:
                    watch.task.cancel()
                    self._watches.pop(run_id, None)

    async def _poll(self, inspector: Inspector, watch: _Watch) -> None:
        """Until the run is over. Whatever ends it, the streams end too: a page whose run goes on asks for another."""
        try:
            await self._tell(inspector, watch)
        finally:
            watch.end()

    async def _tell(self, inspector: Inspector, watch: _Watch) -> None:
        before: Pulse | None = None
        while True:
            try:
                pulse = await inspector.pulse()
                if pulse != before or pulse.state == RunState.RUNNING:
                    status = await inspector.status()
                    with told(f"the status of run {inspector.files.id}"):
                        watch.tell("status", _STATUS.dump_json(status, warnings="error").decode())
                if pulse != before:
                    watch.tell("events", to_json(asdict(pulse)))
                before = pulse
                watch.forget("problem")
            except UserError as error:  # a busy disk, a run directory that is moved: it is tried again
                watch.tell("problem", to_json({"error": str(error)}))
                before = None
            if before is not None and before.state != RunState.RUNNING:
                watch.tell("ended", to_json({"state": before.state}))
                return
            await asyncio.sleep(self._poll_seconds)
