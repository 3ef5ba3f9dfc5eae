"""How many requests a replica takes at once: as many as its KV cache has room for.

What has no room waits inside vLLM, which may also take the cache of a request that has begun, and compute that again. A
request that waits there cannot go to a replica that has become free, and waits for this one's weight updates. So a
replica offers fewer slots instead, and the rest wait at the coordinator.
"""

from __future__ import annotations

from collections import deque

WINDOW = 256
"""How many requests the mean is taken over: prompts grow until they have all the screenshots that they may."""
LEAST = 16
"""With fewer requests than this, nothing is concluded."""


class Room:
    """`tokens`: those that the KV cache holds; 0: unknown. `most`: `rollout.slots`."""

    def __init__(self, tokens: int, most: int) -> None:
        self.tokens, self.most = tokens, most
        self._sizes: deque[int] = deque(maxlen=WINDOW)

    def used(self, tokens: int) -> None:
        """A request has ended with this many tokens in the cache: its prompt, screenshots too, and its answer."""
        self._sizes.append(tokens)

    @property
    def mean(self) -> float:
        """Tokens of a request, lately; 0 before the first."""
        return sum(self._sizes) / len(self._sizes) if self._sizes else 0.0

    @property
    def slots(self) -> int:
        """From 1 to `most`. What requests share of the cache (the start of a prompt) is not counted on."""
        if not self.tokens or len(self._sizes) < LEAST:
            return self.most
        return max(1, min(self.most, int(self.tokens / self.mean)))

    @property
    def reason(self) -> str:
        """Why there are fewer than `most`; empty if there are not."""
        if self.slots == self.most:
            return ""
        return f"its KV cache has room for {self.slots} requests of {self.mean:,.0f} tokens, the recent mean"
