"""An asyncio event loop whose clock jumps to the next timer as soon as nothing is left to do.

Everything that asks `time.monotonic`, `time.time` or the loop for the time gets the virtual time; the wall clock
(`time.time`) can be set, as an administrator or NTP does, without any effect on the others. There are no threads: work
given to an executor runs at once. Tasks are hashed by their number: `asyncio.TaskGroup` cancels its tasks in the order
of a set, which would otherwise depend on their addresses, and differ from one replay to the next.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")
START = 1_000_000.0
"""The starting time in seconds, also as Unix time, so that times in a simulated run do not look like today's."""


class Deadlock(Exception):
    """All tasks wait, and no timer is set."""


class _Jumping(selectors.SelectSelector):
    """A selector that never waits but advances the clock. It has no sockets to watch."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self.now = now

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock
        self.now += max(0.0, timeout)
        return []


class _Numbered(asyncio.Task[T]):
    """A task with a hash that is the same in every replay."""

    def __init__(self, number: int, work: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any) -> None:
        self._number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, start: float = START) -> None:
        self._jumping = _Jumping(start)
        self._numbers = itertools.count(1)
        self._ahead = 0.0
        """Seconds by which the wall clock is ahead of the loop's clock; negative: behind it."""
        super().__init__(self._jumping)
        self.set_task_factory(self._numbered)

    def _numbered(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T] | Generator[Any, None, T], /, **options: Any
    ) -> asyncio.Future[T]:
        return _Numbered(next(self._numbers), work, loop=loop, **options)

    def time(self) -> float:
        return self._jumping.now

    def stand_still(self, seconds: float) -> None:
        """Let time pass without doing anything that falls due meanwhile."""
        self._jumping.now += seconds

    def wall_time(self) -> float:
        """What `time.time` returns."""
        return self._jumping.now + self._ahead

    def set_wall_clock(self, seconds: float) -> None:
        """Move the wall clock forward, or backward if `seconds` is negative, at once."""
        self._ahead += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller gets it, as from an executor
            done.set_exception(error)
        return done


def run(main: Coroutine[Any, Any, T], start: float = START) -> T:
    """`asyncio.run` in virtual time. Raises Deadlock when nothing can ever happen again."""
    loop = VirtualLoop(start)
    with (
        patch("time.monotonic", loop.time),
        patch("time.time", loop.wall_time),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        return runner.run(main)
