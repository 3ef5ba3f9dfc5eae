"""One env worker's environments, counted in credits: a credit is one environment on which an episode may begin.

A worker reports its credits as totals (`offered`), so that messages in flight the other way cannot make the two ends
disagree. Everything else follows from those totals and from what was given out here:

    granted  all credits that the worker ever granted
    taken    of those, given out here; a credit on which no episode began is given back
    begun    of those, an episode has begun (its Reset was sent)
    ended    of those, the episode is over (its Release was sent), and the environment is being renewed

    free = granted - taken          renewing = count - (granted - ended)

A worker without the capability "slots" offers once what its Ready says, and each credit comes back when its episode
ends: `elastic` is False, and nothing is ever renewing.

>>> credits = Credits(elastic=True)
>>> credits.offered(count=2, granted=2, booting=1)
2
>>> credits.take(); credits.begin(); credits.end()
0
>>> credits.free, credits.renewing, credits.booting
(1, 1, 1)
>>> credits.offered(count=2, granted=3, booting=1)
1
>>> credits.free, credits.renewing
(2, 0)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Credits:
    elastic: bool
    most: int = 1 << 31
    """The most environments that the worker said it would have."""
    count: int = 0
    """Environments that have booted: free, given out, or being renewed."""
    booting: int = 0
    quarantined: int = 0
    """Environments that get no episode because theirs kept failing."""
    granted: int = 0
    taken: int = 0
    begun: int = 0
    ended: int = 0

    @property
    def free(self) -> int:
        """Credits that nobody holds. Briefly below 0 when the worker takes back a credit that was just given out."""
        return self.granted - self.taken

    @property
    def idle(self) -> int:
        """Environments that could begin an episode: those that are free, or given out and not begun."""
        return max(0, self.granted - self.begun)

    @property
    def renewing(self) -> int:
        return max(0, self.count - (self.granted - self.ended))

    @property
    def missing(self) -> int:
        """Environments that found no room, or whose boot failed: their worker asks again later."""
        return self.most - self.count - self.booting - self.quarantined if self.elastic else 0

    def offered(self, count: int, granted: int, booting: int, quarantined: int = 0) -> int:
        """Take the worker's new totals. Returns the change in the number of free credits, which may be negative.

        Raises ValueError, and changes nothing, if it reports more environments than its Ready or grants more than it
        has.
        """
        if count + booting + quarantined > self.most:
            raise ValueError(f"at most the {self.most} slots of its Ready in all (count, booting and quarantined)")
        if granted - self.ended > count:
            raise ValueError(
                f"such that granted is at most {count + self.ended}: its {count} environments and the {self.ended} "
                "episodes that are over"
            )
        more = granted - self.granted
        self.count, self.granted, self.booting, self.quarantined = count, granted, booting, quarantined
        return more

    def take(self) -> None:
        """Give out one credit."""
        self.taken += 1

    def give_back(self) -> None:
        """A credit that was given out, and on which no episode began, is free again."""
        self.taken -= 1

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> int:
        """The episode is over. Returns how many credits are free again at once."""
        self.ended += 1
        if self.elastic:
            return 0
        self.granted += 1
        return 1
