"""How long a caller waits for a database or an object store that is away, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """How long a transaction waits for a database that another process has locked, a backup for example, or for a
    PostgreSQL server that has been reached before and is away, because it restarts for example; or a screenshot for
    an object store.

    `told` is called from the thread that waits, and once when the wait is over, with the seconds waited so far and
    whether the wait is over. Both may be changed at any time.
    """

    seconds: float
    told: Callable[[float, bool], None] | None = None

    def tell(self, seconds: float, *, over: bool) -> None:
        if self.told:
            self.told(seconds, over)
