"""What the coordinator's side sees of an update: who is out of the rotation from when to when, and who serves how much.

A request has a number of tokens, and its sleep is as long. How much of them fell into a span of time is taken as the
share of the request's own time, from its being sent to its answer, that lay in the span. So a span may be shorter than
a request, and what slows requests or leaves slots empty shows, while their lengths and the moments at which they end
do not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dart import config
from dart.agent.prompt import build_prompt
from dart.coordinator.pools import RolloutPool
from dart.coordinator.sessions import InfrastructureError
from dart.core.types import Image
from dart.core.usage import EnvState

AGAIN_SECONDS = 0.05
SCREEN = Image.of(b"a screenshot", "image/png", 160, 224)
"""Of all prompts: its bytes go to each replica once."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A replica was out of the rotation, in monotonic seconds."""

    replica: str
    out: float
    back: float


class Rotation:
    """Every pause, as the pool tells of it."""

    def __init__(self, policy: RolloutPool) -> None:
        self._policy = policy
        self._out: dict[str, float] = {}
        self.pauses: list[Pause] = []
        policy.on_rotation.append(self._look)

    def _look(self) -> None:
        now = time.monotonic()
        for name, replica in self._policy.router.replicas.items():
            if not replica.serving:
                self._out.setdefault(name, now)
            elif (out := self._out.pop(name, None)) is not None:
                self.pauses.append(Pause(name, out, now))


@dataclass(frozen=True, slots=True)
class Served:
    replica: str
    began: float
    ended: float
    tokens: int

    def tokens_within(self, start: float, end: float) -> float:
        overlap = min(end, self.ended) - max(start, self.began)
        return self.tokens * overlap / (self.ended - self.began) if overlap > 0 else 0.0


def tokens_within(served: Iterable[Served], replicas: set[str], start: float, end: float) -> float:
    """What these replicas made in a span."""
    return sum(one.tokens_within(start, end) for one in served if one.replica in replicas)


class Load:
    """Clients that ask one request after the other, more of them than there are slots.

    Lengths are uniform within half of `mean_tokens` to either side, so that a replica's requests do not all end at
    once; seeded, each client by itself.
    """

    def __init__(self, policy: RolloutPool, mean_tokens: int) -> None:
        self._policy, self._mean = policy, mean_tokens
        self._prompt = build_prompt(config.Agent(prompt="minimal"), "Click the button.", (), SCREEN)
        self.served: list[Served] = []
        self.failed = 0

    async def client(self, number: int) -> None:
        """Runs until cancelled."""
        lengths = random.Random(number)
        replica: str | None = None
        sent = 0.0

        def enter(state: EnvState) -> None:
            nonlocal sent
            if state is EnvState.GENERATING:
                sent = time.monotonic()

        await asyncio.sleep(lengths.random() * AGAIN_SECONDS)
        while True:
            tokens = lengths.randint(self._mean // 2, self._mean * 3 // 2)
            try:
                _, replica = await self._policy.generate(self._prompt, 1.0, tokens, replica, enter=enter)
            except InfrastructureError:
                self.failed += 1
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self.served.append(Served(replica, sent, time.monotonic(), tokens))
