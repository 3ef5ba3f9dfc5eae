"""Verdicts of worlds whose environments pay rewards of their own, step by step: gym and openenv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from dart.worlds.contract import Verdict, WorldOptions

Counted = Literal["sum", "last"]


class ScoredOptions(WorldOptions):
    """How an episode's rewards become the reward of its verdict, which is in [0, 1]."""

    reward: Counted | None = Field(
        None,
        description="Which rewards count: their sum, or the last. None: the sum in a plain gymnasium environment, and "
        "the last in BrowserGym and OpenEnv.",
    )
    reward_range: tuple[float, float] = Field(
        (0.0, 1.0), description="The rewards that become 0 and 1; others in proportion, within [0, 1]."
    )
    success_at: float | None = Field(
        None, description="If given, a reward of at least this becomes 1 and any other 0, instead of `reward_range`."
    )

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        low, high = self.reward_range
        if not low < high:
            raise ValueError(f"reward_range [{low:g}, {high:g}] is not a range: write [what becomes 0, what becomes 1]")
        return self


@dataclass(slots=True)
class Score:
    """The rewards of one episode so far."""

    total: float = 0.0
    last: float = 0.0
    steps: int = 0

    def add(self, reward: object, *, step: bool = True) -> None:
        """`step`: false for the reward of a reset. Raises ValueError for a reward that is not a number."""
        self.last = float(reward)  # type: ignore[arg-type]
        self.total += self.last
        self.steps += step

    def verdict(self, options: ScoredOptions, usual: Counted, evidence: Mapping[str, object]) -> Verdict:
        """The verdict, with the unscaled reward in its evidence. `usual`: what counts if the options do not say.

        Raises ValueError for a reward that is NaN or infinite, or a sum that is.
        """
        raw = self.total if (options.reward or usual) == "sum" else self.last
        for counted in (raw, self.total):
            if not math.isfinite(counted):
                raise ValueError(f"the episode's reward is {counted}: a reward is a finite number")
        if options.success_at is not None:
            reward = float(raw >= options.success_at)
        else:
            low, high = options.reward_range
            reward = min(max((raw - low) / (high - low), 0.0), 1.0)
        return Verdict(reward, {"reward": raw, "steps": self.steps, **evidence})
