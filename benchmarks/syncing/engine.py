"""A replica's engine that sleeps: requests, slots and weight updates as `dart.workers.rollout.engine` has them.

The gate is the project's own. A request of n tokens sleeps for n times the time of a token. An update closes the gate;
then, by its mode, keep freezes the requests in flight and resumes them afterwards, drain waits for them, abort ends
them. `update` follows `Engine.update` step by step; there is no cache to reset, and vLLM's own 20 ms of waiting in
`pause_generation` are left out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dart.workers.rollout.errors import RequestAbortedError
from dart.workers.rollout.gate import Gate


class NoSlotError(Exception):
    """More requests than slots: the coordinator must never send that many."""


@dataclass(slots=True)
class _Request:
    tokens: int
    left: float
    """Seconds of sleep left when it was last frozen or resumed."""
    spans: list[list[int]]
    """[version, first token, end]."""
    done: asyncio.Future[None]
    timer: asyncio.TimerHandle | None = None
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """When the phases of one update began, in seconds of the machine's monotonic clock."""

    asked: float
    stopped: float
    """The gate is closed."""
    idle: float
    """No request runs."""
    joined: float
    received: float
    loaded: float
    serving: float


Received = tuple[float, float, float]
"""When the group was joined, when the bytes had arrived, and when the tensors held them. Bytes received before the
pause have arrived when it begins."""

Stretch = tuple[float, float, float, bool]
"""When a slot began and ended work on a request; how much of the request's sleep that was; whether it was wasted."""


@dataclass(slots=True)
class SleepingEngine:
    slots: int
    token_seconds: float
    version: int = 0
    stretches: list[Stretch] = field(default_factory=list)
    _gate: Gate = field(default_factory=Gate)
    _running: dict[str, _Request] = field(default_factory=dict)
    _empty: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request_id: str, tokens: int) -> list[list[int]]:
        """Sleep; returns the version spans of its tokens. Raises RequestAbortedError, NoSlotError."""
        async with self._gate.entering():
            if len(self._running) >= self.slots:
                raise NoSlotError(f"{self.slots} slots are taken")
            done = asyncio.get_running_loop().create_future()
            request = _Request(tokens, tokens * self.token_seconds, [[self.version, 0, tokens]], done)
            self._running[request_id] = request
            self._empty.clear()
            self._go_on(request)
        try:
            await done
        finally:
            self._freeze(request, thrown_away=done.cancelled() or done.exception() is not None)
            del self._running[request_id]
            if not self._running:
                self._empty.set()
        return request.spans

    def abort(self, request_id: str) -> None:
        if (request := self._running.get(request_id)) and not request.done.done():
            request.done.set_exception(RequestAbortedError(f"request {request_id} was aborted"))

    async def update(self, version: int, mode: str, receive: Callable[[], Awaitable[Received]]) -> Times:
        """Pause, `receive`, resume. What `receive` raises passes through, and the old version continues to serve."""
        asked = time.monotonic()
        async with self._gate.closed():
            stopped = time.monotonic()
            try:
                await self._pause(mode)
                idle = time.monotonic()
                joined, received, loaded = await receive()
                self.version = version
            finally:
                self._resume()
        return Times(asked, stopped, idle, joined, received, loaded, time.monotonic())

    async def _pause(self, mode: str) -> None:
        if mode == "keep":
            for request in self._running.values():
                self._freeze(request)
            return
        if mode == "abort":
            for request_id in self._running:
                self.abort(request_id)
        while self._running:
            await self._empty.wait()

    def _resume(self) -> None:
        """Frozen requests continue, with the version that the engine has now."""
        for request in self._running.values():
            if request.timer is None and not request.done.done():
                made = request.tokens - min(request.tokens, math.ceil(request.left / self.token_seconds))
                last = request.spans[-1]
                if made == last[1]:  # it made no token with its former version
                    last[0] = self.version
                elif last[0] != self.version and made < request.tokens:
                    last[2] = made
                    request.spans.append([self.version, made, request.tokens])
                self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        request.began = time.monotonic()
        request.timer = asyncio.get_running_loop().call_later(request.left, _finish, request)

    def _freeze(self, request: _Request, thrown_away: bool = False) -> None:
        if request.timer is not None:
            request.timer.cancel()
            request.timer = None
            now = time.monotonic()
            slept = min(request.left, now - request.began)
            request.left -= slept
            self.stretches.append((request.began, now, slept, thrown_away))


def _finish(request: _Request) -> None:
    if not request.done.done():
        request.done.set_result(None)
