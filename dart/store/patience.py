"""How long a caller waits for a database or an object store that is away, or for what the machine is short of, and who
is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """How long a transaction waits for a database that another process has locked, a backup for example, or for a
    PostgreSQL server that has been reached before and is away, because it restarts for example; a screenshot for an
    object store; and each of them for what the machine is short of (`dart.shortage`).

    `told` is called from the thread that waits, and once when the wait is over, with the seconds waited so far and
    whether the wait is over. Both may be changed at any time.
    """

    seconds: float
    told: Callable[[float, bool], None] | None = None
    waited: float = 0.0
    """By whoever waits now; 0: nobody does."""
    short: str = ""
    """What the machine is short of, if that is what is waited for."""

    def tell(self, seconds: float, *, over: bool, short: str = "") -> None:
        self.waited, self.short = (0.0, "") if over else (max(seconds, 1e-3), short)
        if self.told:
            self.told(seconds, over)

    def end(self) -> None:
        """Nobody waits any longer, because the time was up."""
        self.waited, self.short = 0.0, ""
