"""What an update trains on: groups, their samples, and how samples are divided among ranks.

A trajectory's samples go to one rank. There a step that continues the one before it shares its row, so that the
beginning is computed once, and a screenshot is sent to one rank and encoded there. Only where ranks would have nothing
to do are trajectories divided, and then where a step does not continue the one before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dart.core.types import Sample, Trajectory

PAIRS_PER_TOKEN = 65_000
"""How many pairs of tokens, half of them masked, take a 7B model as long in causal attention as a token takes in all
other layers: Qwen2.5-VL-7B has 233 million weights a layer, and 3,584 channels."""
ENCODED_TOKEN = 0.5
"""The vision tower's work for one token of a screenshot, in tokens of the text model: 0.46 for Qwen2.5-VL-7B and 0.53
for Qwen3-VL-8B at 1920 × 1080, from the shapes of their layers."""
PIXELS_PER_TOKEN = 28 * 28
"""Pixels of a screenshot that make a token. Larger patches make a quarter fewer tokens, but on all ranks alike."""

Chain = list[Sample]
"""Steps of a trajectory each of which continues the one before: the trainer computes what they share once."""


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
    """Divide samples among ranks by trajectory: the costliest first, each to the rank that has the least so far.

    If there are fewer trajectories than ranks, the costliest are cut in two until every rank has something, but never
    within a chain: both halves would compute its beginning, so no rank would be done sooner. Some ranks may then get
    nothing. The same samples give the same shares; in a share, trajectories follow one another, with steps in order.
    """
    by_trajectory: dict[str, list[Sample]] = {}
    for sample in samples:
        by_trajectory.setdefault(sample.trajectory_id, []).append(sample)
    pieces = [list(_chains(sorted(steps, key=lambda step: step.index))) for steps in by_trajectory.values()]
    while len(pieces) < ranks and (whole := _costliest(pieces)) is not None:
        pieces += _halves(pieces.pop(whole))
    shares: list[list[Sample]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    costs = [_cost_of(piece) for piece in pieces]
    for number in sorted(range(len(pieces)), key=costs.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        shares[rank] += itertools.chain.from_iterable(pieces[number])
        loads[rank] += costs[number]
    return shares


def _cost_of(chains: Sequence[Chain]) -> float:
    """What a rank computes for them, in tokens of the text model.

    Each chain costs its tokens, once; their causal attention; and its screenshots' way through the vision tower.
    """
    total = 0.0
    for chain in chains:
        tokens = max(sample.tokens for sample in chain)
        pixels = sum(image.width * image.height for image in chain[-1].images)
        total += tokens + tokens**2 / PAIRS_PER_TOKEN + ENCODED_TOKEN * pixels / PIXELS_PER_TOKEN
    return total


def _chains(steps: Sequence[Sample]) -> Iterator[Chain]:
    chain: Chain = []
    for step in steps:
        if chain and not _continues(step, chain[-1]):
            yield chain
            chain = []
        chain.append(step)
    if chain:
        yield chain


def _continues(step: Sample, before: Sample) -> bool:
    """Whether the step's prompt begins with the earlier step's prompt and response, over the same pictures."""
    if step.trajectory_id != before.trajectory_id or len(step.images) < len(before.images):
        return False
    if any(now.sha256 != then.sha256 for now, then in zip(step.images, before.images, strict=False)):
        return False
    ids, earlier = step.generation.prompt_token_ids, before.generation
    asked = len(earlier.prompt_token_ids)
    return ids[:asked] == earlier.prompt_token_ids and ids[asked : before.tokens] == earlier.token_ids


def _costliest(pieces: Sequence[Sequence[Chain]]) -> int | None:
    """Which piece costs the most, of those with more than one chain."""
    return max((n for n, piece in enumerate(pieces) if len(piece) > 1), key=lambda n: _cost_of(pieces[n]), default=None)


def _halves(chains: Sequence[Chain]) -> tuple[list[Chain], list[Chain]]:
    """Two parts, of which the costlier one is as cheap as can be. At least two chains."""
    costs = [_cost_of([chain]) for chain in chains]
    where = min(range(1, len(chains)), key=lambda end: max(sum(costs[:end]), sum(costs[end:])))
    return list(chains[:where]), list(chains[where:])
