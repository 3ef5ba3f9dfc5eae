"""What becomes of a closed group, and of a sample that waited: the data manager's decisions, each with its reason.

DART, arXiv 2509.23866, adaptive data curation: a group in which all succeed or all fail has no advantage and is
dropped; a sample whose oldest token was made more than `max_staleness` versions ago is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dart.core.curation.advantage import Level, group_advantages
from dart.core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Decision:
    """`release` False: dropped for `reason`. `cause` is the reason without numbers, for counting."""

    release: bool
    cause: str
    reason: str
    advantages: tuple[float, ...]


def judge(
    trajectories: Sequence[Trajectory],
    *,
    level: Level,
    std_normalise: bool,
    shaping: Callable[[Trajectory], float] = lambda trajectory: 0.0,
) -> Decision:
    """Decide on a closed group of N trajectories; advantages are in the order given.

    `shaping` is added to a reward for the advantages, and has no say in whether the group is dropped.
    """
    n = len(trajectories)
    rewards = [trajectory.reward for trajectory in trajectories]
    shaped = [trajectory.reward + shaping(trajectory) for trajectory in trajectories]
    lengths = [len(trajectory.steps) for trajectory in trajectories]
    advantages = tuple(group_advantages(shaped, lengths, level=level, std_normalise=std_normalise))
    wins = sum(trajectory.success for trajectory in trajectories)
    if max(rewards) == min(rewards):
        if wins == n:
            return Decision(False, "all succeeded", f"all {n} succeeded", advantages)
        if max(rewards) == 0.0:
            return Decision(False, "all failed", f"all {n} failed", advantages)
        return Decision(False, "equal rewards", f"all {n} had reward {rewards[0]:g}", advantages)
    return Decision(True, "released", f"{wins} of {n} succeeded", advantages)


def staleness(trainer_version: int, trajectory: Trajectory) -> int:
    """Trainer version minus the version of the trajectory's oldest token.

    Never negative: after a resume the trainer may be behind versions that were lost with the process.
    """
    return max(0, trainer_version - trajectory.oldest_version)


def start_budget(max_staleness: int, trajectories_per_update: int, rollouts: int) -> int:
    """How many trajectories may be begun and not yet consumed or dropped.

    A trajectory that starts behind `u` unconsumed ones is trained u / trajectories_per_update updates later, so
    max_staleness batches in the pipeline keep the bound; one batch and one group are always allowed, or no batch
    could ever fill.
    """
    return max(max_staleness, 1) * trajectories_per_update + rollouts
