"""Synchronous environments (`SyncEnv`) as asyncio ones, each on a thread of its own from creation to closing.

Libraries such as Playwright's synchronous API and many simulators may only be used from the thread that created them.
The thread is a daemon: if it hangs in a call, the worker and the interpreter can still end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dart.core.action import Action
from dart.core.types import Image, Observation, Task
from dart.worlds.contract import Env, SyncEnv, Verdict

T = TypeVar("T")
_numbers = itertools.count(1)
_ending: set[threading.Thread] = set()
"""Threads that end after the call that they are in."""


class _Thread:
    """Runs jobs one after another on one thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"{name}-{next(_numbers)}", daemon=True)
        self._thread.start()
        self.waiting = 0
        """The number of jobs that have not ended, including those whose callers have gone."""

    async def call(self, job: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def ended(value: T | None, error: BaseException | None) -> None:
            self.waiting -= 1
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, failure = None, None
            try:
                value = job()
            except BaseException as error:  # noqa: BLE001  the caller gets it, on the loop's thread
                # A future cannot hold a StopIteration, and a SystemExit must end only this job, not the worker.
                failure = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
                failure = failure or RuntimeError(f"{type(error).__name__}: {error}")
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the caller
                loop.call_soon_threadsafe(ended, value, failure)

        self.waiting += 1
        self._jobs.put(work)
        return await result

    def put(self, job: Callable[[], object]) -> None:
        """Add a job that nobody waits for."""

        def work() -> None:
            with contextlib.suppress(Exception):  # nobody is left to report it to
                job()

        self._jobs.put(work)

    def end(self) -> None:
        """End the thread after the jobs already queued."""
        if self._thread.is_alive():
            _ending.add(self._thread)
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        _ending.discard(self._thread)


async def all_ended(seconds: float) -> bool:
    """Whether, within this time, every thread that is to end has closed its environment and ended. The process must not
    end before: these threads would end with it, in the middle of a call and without having closed anything."""
    until = time.monotonic() + seconds
    for thread in tuple(_ending):
        await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))
    return not _ending


class Threaded(Env):
    """One `SyncEnv` and its thread. Make one with `start`."""

    def __init__(self, thread: _Thread, env: SyncEnv) -> None:
        super().__init__(env.options, env.screen)
        self._thread, self.env = thread, env
        self._closes = False

    @classmethod
    async def start(cls, make: Callable[[], SyncEnv], name: str) -> Threaded:
        """Start a thread and call `make` on it. If the caller gives up, what `make` still returns is closed."""
        thread = _Thread(name)
        made: list[SyncEnv] = []

        def close() -> None:
            for env in made:
                env.close()

        try:
            await thread.call(lambda: made.append(make()))
            return cls(thread, made[0])
        except BaseException:  # cancelled too: without its environment nobody would end the thread
            thread.put(close)
            thread.end()
            raise

    async def reset(self, task: Task) -> Observation:
        return await self._thread.call(lambda: self.env.reset(task))

    async def act(self, action: Action) -> Observation:
        return await self._thread.call(lambda: self.env.act(action))

    async def judge(self, last: Action, at_limit: bool) -> Verdict:
        return await self._thread.call(lambda: self.env.judge(last, at_limit))

    async def conclude(self, action: Action) -> Image:
        return await self._thread.call(lambda: self.env.conclude(action))

    async def probe(self) -> bool:
        return not self._thread.waiting and await self._thread.call(self.env.probe)

    async def renew(self) -> bool:
        """False as well while the thread hangs in a call that nobody waits for any more."""
        return not self._thread.waiting and await self._thread.call(self.env.renew)

    async def suggest(self) -> Action | None:
        return await self._thread.call(self.env.suggest)

    async def close(self) -> None:
        """Waits until the environment has closed, unless its thread hangs: then it closes once the thread is free. Does
        nothing the second time: what has begun goes on, though nobody waits."""
        if self._closes:
            return
        self._closes = True
        try:
            if self._thread.waiting:
                self._thread.put(self.env.close)
            else:
                await self._thread.call(self.env.close)
        finally:
            self._thread.end()
