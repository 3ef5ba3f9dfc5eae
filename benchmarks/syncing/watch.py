"""What is observed of an update: when each replica is out of the rotation, and how much each one serves.

Replicas report when each of their slots was working on a request. What a replica served in a span of time is the
sleep within that span: a slot that is empty because messages are late adds nothing, and a span may be shorter than a
request. Sleep that is wasted by an update in mode abort counts until then; it is also counted separately.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

from dart import config
from dart.agent.prompt import build_prompt
from dart.coordinator.fleet.replicas import RolloutPool
from dart.coordinator.fleet.sessions import InfrastructureError
from dart.core.types import Image

AGAIN_SECONDS = 0.05
SCREEN = Image.of(b"a screenshot", "image/png", 160, 224)
"""The same screenshot in every prompt, so that its bytes go to each replica only once."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A span in which a replica was out of the rotation, in monotonic seconds."""

    replica: str
    out: float
    back: float


class Rotation:
    """Every pause, as the pool reports it."""

    def __init__(self, policy: RolloutPool) -> None:
        self._policy = policy
        self._out: dict[str, float] = {}
        self.pauses: list[Pause] = []
        policy.replicas.on_change.append(self._look)

    def _look(self) -> None:
        now = time.monotonic()
        for replica in self._policy.replicas:
            if not replica.serving:
                self._out.setdefault(replica.name, now)
            elif (out := self._out.pop(replica.name, None)) is not None:
                self.pauses.append(Pause(replica.name, out, now))


@dataclass(frozen=True, slots=True)
class Served:
    """A slot of a replica worked on a request, for `sleep` of the request's seconds."""

    replica: str
    began: float
    ended: float
    sleep: float
    thrown_away: bool


def served_within(served: Iterable[Served], replicas: set[str], start: float, end: float) -> float:
    """Seconds of sleep of all slots of these replicas within a span."""
    made = 0.0
    for one in served:
        overlap = min(end, one.ended) - max(start, one.began)
        if overlap > 0 and one.replica in replicas:
            made += one.sleep * overlap / (one.ended - one.began)
    return made


class Load:
    """Clients that send one request after the other; there are more clients than slots.

    Lengths are uniform between 0.5 and 1.5 times `mean_tokens`, so that a replica's requests do not all end at once.
    Each client has a seed of its own.
    """

    def __init__(self, policy: RolloutPool, mean_tokens: int) -> None:
        self._policy, self._mean = policy, mean_tokens
        self._prompt = build_prompt(config.Agent(prompt="minimal"), "Click the button.", (), SCREEN)
        self.failed = 0

    async def client(self, number: int) -> None:
        """Runs until cancelled."""
        lengths = random.Random(number)
        replica: str | None = None
        await asyncio.sleep(lengths.random() * AGAIN_SECONDS)
        while True:
            tokens = lengths.randint(self._mean // 2, self._mean * 3 // 2)
            try:
                _, replica = await self._policy.generate(self._prompt, 1.0, tokens, replica)
            except InfrastructureError:
                self.failed += 1
                await asyncio.sleep(AGAIN_SECONDS)
