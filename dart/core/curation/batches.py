"""What an update trains on: groups, their samples, and how samples are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dart.core.types import Sample, Trajectory


@dataclass(frozen=True, slots=True)
class ReleasedGroup:
    """A group waiting for the trainer, with an advantage for each of its trajectories."""

    id: str
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]


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
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True)
        for step in trajectory.steps
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
