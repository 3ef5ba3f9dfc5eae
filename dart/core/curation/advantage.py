"""Group-relative advantages, A_{i,j} = (R_i - mean(R)) / std(R) (DART, arXiv 2509.23866, step-wise GRPO), and the
length penalty that may be added to a reward first.

Pure Python, because the coordinator imports no torch: it computes them when a group closes and stores them with the
trajectories. Every step of trajectory i carries A_i.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

Level = Literal["trajectory", "step"]

EQUAL = 1e-6
"""Rewards that differ by no more count as equal: the std of rounding errors would give them advantages of ±1."""


def group_advantages(
    rewards: Sequence[float], steps: Sequence[int], *, level: Level = "step", std_normalise: bool = True
) -> list[float]:
    """Advantages of one group's N trajectories.

    rewards: R_i in [0, 1], N of them; steps: the trajectories' lengths. `level` says what counts once in the mean and
    (population) std: each step of the group, as in the paper, or each trajectory. `std_normalise` False omits the
    division (Dr.GRPO). In a group whose rewards are equal, up to `EQUAL`, all advantages are 0.

    Raises ValueError when the lists differ in length or are empty, or a trajectory has no steps.
    """
    if len(rewards) != len(steps) or not rewards:
        raise ValueError(f"{len(rewards)} rewards and {len(steps)} lengths: give one of each per trajectory")
    if min(steps) < 1:
        raise ValueError("a trajectory without steps has no advantage")
    if max(rewards) - min(rewards) <= EQUAL:
        return [0.0] * len(rewards)
    weighted = (
        list(rewards) if level == "trajectory" else [r for r, n in zip(rewards, steps, strict=True) for _ in range(n)]
    )
    mean = statistics.fmean(weighted)
    std = statistics.pstdev(weighted, mean) if std_normalise else 1.0
    return [(r - mean) / std for r in rewards]


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, to be added to a reward (arXiv 2503.14476, eq. 13), in [-1, 0].

    tokens |y|: length of the trajectory's longest response; limit L_max: the most that a response may have; buffer
    L_cache: the last tokens before the limit. 0 while |y| <= L_max - L_cache; then ((L_max - L_cache) - |y|) / L_cache,
    falling linearly to -1 at L_max; -1 beyond. A buffer of 0 punishes nothing up to the limit.

    Raises ValueError when the buffer is negative or larger than the limit.
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"the buffer is {buffer} tokens: it must be from 0 to the limit, {limit}")
    if tokens > limit:
        return -1.0
    return min(0.0, (limit - buffer - tokens) / buffer) if buffer else 0.0
