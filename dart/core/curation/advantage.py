"""Group-relative advantages, A_{i,j} = (R_i - mean(R)) / std(R) (DART, arXiv 2509.23866, step-wise GRPO); what GiGPO
adds to them for each step (arXiv 2505.10978); and the length penalty that may be added to a reward first.

Pure Python, because the coordinator imports no torch: it computes them when a group closes and stores them with the
trajectories, one for each step. Without GiGPO, every step of trajectory i carries A_i.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

Level = Literal["trajectory", "step"]

EQUAL = 1e-6
"""Rewards that differ by no more count as equal: the std of rounding errors would give them advantages of ±1."""


def group_advantages(
    rewards: Sequence[float], steps: Sequence[int], *, level: Level = "step", std_normalise: bool = True
) -> list[float]:
    """Advantages of one group's N trajectories.

    rewards: R_i, N of them, any finite numbers (a world's are in [0, 1]; a length penalty may take them below); steps:
    the trajectories' lengths. `level` says what counts once in the mean and (population) std: each step of the group,
    as in the paper, or each trajectory. `std_normalise` False omits the division (Dr.GRPO). In a group whose rewards
    are equal, up to `EQUAL`, all advantages are 0.

    Raises ValueError when the lists differ in length or are empty, or a trajectory has no steps.
    """
    if len(rewards) != len(steps) or not rewards:
        raise ValueError(f"{len(rewards)} rewards and {len(steps)} lengths: give one of each per trajectory")
    if min(steps) < 1:
        raise ValueError("a trajectory without steps has no advantage")
    if max(rewards) - min(rewards) <= EQUAL:
        return [0.0] * len(rewards)
    counts = steps if level == "step" else [1] * len(rewards)
    total = sum(counts)
    mean = math.fsum(n * r for n, r in zip(counts, rewards, strict=True)) / total
    if not std_normalise:
        return [r - mean for r in rewards]
    std = math.sqrt(math.fsum(n * (r - mean) ** 2 for n, r in zip(counts, rewards, strict=True)) / total)
    return [(r - mean) / std for r in rewards]


def anchored_advantages(
    rewards: Sequence[float],
    states: Sequence[Sequence[Hashable]],
    *,
    gamma: float,
    std_normalise: bool = True,
) -> list[list[float]]:
    """GiGPO's step-relative advantages of one group's N trajectories (arXiv 2505.10978, step-level groups).

    rewards: R_i, N of them; states: for each trajectory what each of its T_i steps acted on. Returns T_i numbers for
    each trajectory. All steps of the group that acted on equal states form a step group, several of one trajectory
    included. A step's return is gamma^(T_i - t) R_i for t from 1 to T_i: the only reward is the verdict's, and it comes
    with the last step. Its advantage is (return - mean) / std over its step group, with the population std, or without
    the division if `std_normalise` is False. In a step group whose returns are equal, up to `EQUAL`, it is 0, so a
    state that only one step acted on gives 0.

    Raises ValueError when the lists differ in length.
    """
    if len(rewards) != len(states):
        raise ValueError(f"{len(rewards)} rewards and states of {len(states)} trajectories: give both for each")
    returns = [
        [reward * gamma ** (len(own) - t) for t in range(1, len(own) + 1)]
        for reward, own in zip(rewards, states, strict=True)
    ]
    places: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for i, own in enumerate(states):
        for j, state in enumerate(own):
            places[state].append((i, j))
    advantages = [[0.0] * len(own) for own in states]
    for same in places.values():
        relative = group_advantages([returns[i][j] for i, j in same], [1] * len(same), std_normalise=std_normalise)
        for (i, j), value in zip(same, relative, strict=True):
            advantages[i][j] = value
    return advantages


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
