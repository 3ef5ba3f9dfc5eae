"""What an update trains on: groups, their samples, and how samples are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dart.core.types import Sample, Trajectory


@dataclass(frozen=True, slots=True)
class ReleasedGroup:
    """A group waiting for the trainer, with an advantage for each step of each of its trajectories."""

    id: str
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[tuple[float, ...], ...]

    @classmethod
    def evenly(cls, name: str, trajectories: tuple[Trajectory, ...], advantages: Sequence[float]) -> ReleasedGroup:
        """Every step of a trajectory has the trajectory's advantage."""
        each = tuple((a,) * len(one.steps) for one, a in zip(trajectories, advantages, strict=True))
        return cls(name, trajectories, each)


def samples_of(groups: Sequence[ReleasedGroup]) -> list[Sample]:
    """Every step of every trajectory: no step is left out."""
    return [
        Sample(
            trajectory.id,
            trajectory.group_id,
            step.index,
            step.images,
            step.generation,
            advantage,
            rescore=bool(trajectory.pooled_from) and not step.generation.logprobs,
        )
        for group in groups
        for trajectory, advantages in zip(group.trajectories, group.advantages, strict=True)
        for step, advantage in zip(trajectory.steps, advantages, strict=True)
    ]


def balance(samples: Sequence[Sample], ranks: int) -> list[list[Sample]]:
    """Divide samples evenly among ranks by tokens: longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for sample in sorted(samples, key=lambda s: s.tokens, reverse=True):
        rank = loads.index(min(loads))
        shares[rank].append(sample)
        loads[rank] += sample.tokens
    return shares
