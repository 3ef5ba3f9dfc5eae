"""Decides what happens to a group: each decision has a cause and a detail.

A *cause* is short and has no numbers, so that decisions can be counted by it ("all failed"); a *detail* is the
sentence with the numbers ("all 8 failed"). DART, arXiv 2509.23866, adaptive data curation: a group in which all succeed
or all fail has no advantage and is dropped; a group is dropped when any of its tokens was sampled more than
`max_staleness` versions ago.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dart.core.curation.advantage import EQUAL, Level, anchored_advantages, group_advantages, overlong_penalty
from dart.core.types import Task, Trajectory

RELEASED = "released"
STALE = "stale"
UNMADE = "none of its roll-outs could be made"
UNUSABLE = "cannot be trained on"
REPLACED = "replaced by a pooled success"


class Stage(StrEnum):
    """Where a group is in its life."""

    OPEN = "open"
    """Some of its roll-outs still run, or are to be given out."""
    CLOSING = "closing"
    """Nothing is left to run, and the decision about it is not stored yet."""
    WAITING = "waiting"
    """It waits for the trainer."""
    TRAINING = "training"
    """It is in the batch of the update under way."""
    CONSUMED = "consumed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Decision:
    """What a group's rewards decide. `release` False: it is dropped. `advantages`: one per step of each trajectory."""

    release: bool
    cause: str
    detail: str
    advantages: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a group: it waits for the trainer from now on, or it is dropped."""

    group_id: str
    task: Task
    stage: Stage
    """WAITING or DROPPED."""
    cause: str
    detail: str
    trajectories: tuple[Trajectory, ...] = ()
    """The trajectories that the verdict is about, without the one that a pooled success replaced."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """One per step of each trajectory; empty if none were computed, or they have been stored before."""
    pooled: Trajectory | None = None
    """The copy of a success that replaces a failure: the last of `trajectories`."""
    replaced: str = ""
    """The failure that it replaces."""
    plan: str = ""
    """Why the group had this many roll-outs and this step limit."""

    @property
    def released(self) -> bool:
        return self.stage is Stage.WAITING


@dataclass(frozen=True, slots=True)
class Judging:
    """How groups are judged. `max_tokens`: the most tokens in a response.

    step_weight: omega, how much of GiGPO's step-relative advantages is added to the trajectory's, 0 for none; gamma:
    the discount of their returns. Two steps acted on the same state if their newest screenshots have the same digest.
    """

    level: Level = "step"
    std_normalise: bool = True
    step_weight: float = 0.0
    gamma: float = 1.0
    overlong_penalty: float = 0.0
    overlong_buffer: int = 0
    max_tokens: int = 0

    def decide(self, trajectories: Sequence[Trajectory]) -> Decision:
        """Decide on a closed group of N trajectories; advantages are in the order given.

        The penalty for long responses is part of the rewards for the advantages only; it does not affect whether the
        group is dropped.
        """
        n = len(trajectories)
        rewards = [trajectory.reward for trajectory in trajectories]
        advantages = self._advantages(trajectories)
        wins = sum(trajectory.success for trajectory in trajectories)
        if not math.isfinite(sum(map(sum, advantages))):
            return Decision(False, UNUSABLE, f"its advantages are not finite, with rewards {rewards}", ())
        if max(rewards) - min(rewards) <= EQUAL:
            if wins == n:
                return Decision(False, "all succeeded", f"all {n} succeeded", advantages)
            if max(rewards) <= EQUAL:
                return Decision(False, "all failed", f"all {n} failed", advantages)
            return Decision(False, "equal rewards", f"all {n} had reward {rewards[0]:g}", advantages)
        return Decision(True, RELEASED, f"{wins} of {n} succeeded", advantages)

    def _advantages(self, trajectories: Sequence[Trajectory]) -> tuple[tuple[float, ...], ...]:
        shaped = [trajectory.reward + self._shaping(trajectory) for trajectory in trajectories]
        lengths = [len(trajectory.steps) for trajectory in trajectories]
        whole = group_advantages(shaped, lengths, level=self.level, std_normalise=self.std_normalise)
        if not self.step_weight:
            return tuple((a,) * length for a, length in zip(whole, lengths, strict=True))
        states = [[step.images[-1].sha256 for step in trajectory.steps] for trajectory in trajectories]
        steps = anchored_advantages(shaped, states, gamma=self.gamma, std_normalise=self.std_normalise)
        return tuple(tuple(a + self.step_weight * s for s in own) for a, own in zip(whole, steps, strict=True))

    def _shaping(self, trajectory: Trajectory) -> float:
        if not self.overlong_penalty:
            return 0.0
        longest = max([len(step.generation.token_ids) for step in trajectory.steps])
        return self.overlong_penalty * overlong_penalty(longest, self.max_tokens, self.overlong_buffer)


def staleness(trainer_version: int, trajectory: Trajectory) -> int:
    """Trainer version minus the version of the trajectory's oldest token.

    Never negative: after a resume, the trainer may be behind versions that were lost with the process.
    """
    return max(0, trainer_version - trajectory.oldest_version)


def start_budget(max_staleness: int, trajectories_per_update: int, rollouts: int, every_updates: int = 1) -> int:
    """The number of trajectories in the pipeline (begun, or owed by an open group) at which no further group opens; the
    last one opened may exceed it by N - 1.

    A trajectory that starts behind `u` unconsumed ones is trained u / trajectories_per_update updates later, so
    max_staleness batches in the pipeline keep the bound; one batch and one group are always allowed, or no batch could
    ever be filled. Where replicas get new weights only after every `every_updates` updates, a trajectory may begin with
    weights that are up to every_updates - 1 versions old already, so as many batches fewer may be in the pipeline.
    """
    return max(max_staleness - (every_updates - 1), 1) * trajectories_per_update + rollouts
