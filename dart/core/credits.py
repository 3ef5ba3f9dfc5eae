"""One env worker's environments, counted in credits: a credit is one environment that an episode may be begun on.

A worker says how many it has (`offered`), as totals, so that nothing on its way in the other direction can make the two
ends count differently. From those, and from what was given out here, everything else follows:

    granted  all credits that the worker ever gave
    taken    of those, given out here; one that no episode was begun on is given back
    begun    of those, an episode was begun on (its Reset was sent)
    ended    of those, the episode is over (its Release was sent), and the environment is being renewed

    free = granted - taken          renewing = count - (granted - ended)

A worker that knows nothing of this offers what its Ready says, once, and each of its credits comes back when its
episode ends: `elastic` is False, and nothing is ever renewing.

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
    """Environments that the worker said it would have, at most."""
    count: int = 0
    """Environments that have booted: free, given out, or being renewed."""
    booting: int = 0
    granted: int = 0
    taken: int = 0
    begun: int = 0
    ended: int = 0

    @property
    def free(self) -> int:
        """Credits that nobody holds. Below 0 for a moment where the worker took one back that was just given out."""
        return self.granted - self.taken

    @property
    def idle(self) -> int:
        """Environments without an episode that could begin one: those that are free, or given out and not begun."""
        return max(0, self.granted - self.begun)

    @property
    def renewing(self) -> int:
        return max(0, self.count - (self.granted - self.ended))

    def offered(self, count: int, granted: int, booting: int) -> int:
        """What the worker says that it has now. Returns how many more are free than before; fewer: a negative number.

        Raises ValueError where it has more than it may, or grants more than it has: nothing is changed.
        """
        if count + booting > self.most:
            raise ValueError(
                f"it has {count} environments, and {booting} that boot: more than the {self.most} of its Ready"
            )
        if granted - self.ended > count:
            raise ValueError(
                f"it grants {granted} episodes, {self.ended} of which are over, with {count} environments: more than "
                "it has"
            )
        more = granted - self.granted
        self.count, self.granted, self.booting = count, granted, booting
        return more

    def take(self) -> None:
        """One is given out."""
        self.taken += 1

    def give_back(self) -> None:
        """One that was given out, and that no episode was begun on, is free again."""
        self.taken -= 1

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> int:
        """The episode is over. Returns how many are free again at once."""
        self.ended += 1
        if self.elastic:
            return 0
        self.granted += 1
        return 1
