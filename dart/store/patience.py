"""How long a caller waits for a database or an object store that is away, or for what the machine is short of, and who
is told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from dart.shortage import shortage

T = TypeVar("T")
PAUSE_SECONDS = 1.0
"""Between two tries of what the machine is short of something for."""


@dataclass(slots=True)
class Patience:
    """How long a transaction waits for a database that another process has locked, a backup for example, or for a
    PostgreSQL server that has been reached before and is away, because it restarts for example; a screenshot for an
    object store; and each of them for what the machine is short of (`dart.shortage`).

    `told` is called from the thread that waits, and once when the wait is over, with the seconds waited so far and
    whether the wait is over. Both may be changed at any time.
    """

    seconds: float
    usual: str = "the database, which another process has locked, or whose server is away"
    """What is waited for unless the machine is short of something."""
    told: Callable[[float, bool], None] | None = None
    waited: float = 0.0
    """By whoever waits now; 0: nobody does."""
    short: str = ""
    """What the machine is short of, if that is what is waited for."""

    def tell(self, seconds: float, *, over: bool, short: str = "") -> None:
        self.waited, self.short = (0.0, "") if over else (max(seconds, 1e-3), short)
        if self.told:
            self.told(seconds, over)

    @property
    def waits_for(self) -> str:
        """ "" while nobody waits."""
        return (self.short or self.usual) if self.waited else ""

    def end(self) -> None:
        """Nobody waits any longer, because the time was up."""
        self.waited, self.short = 0.0, ""


async def patiently(work: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """What `work` returns; it is done again where the machine is short of something. Raises what it raises."""
    began, told = time.monotonic(), False
    while True:
        try:
            result = await work()
        except (OSError, RuntimeError, MemoryError) as error:
            waited = time.monotonic() - began
            if not (short := shortage(error)) or waited >= patience.seconds:
                patience.end()
                raise
            told = True
            patience.tell(waited, over=False, short=short)
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            if told:
                patience.tell(time.monotonic() - began, over=True)
            return result
