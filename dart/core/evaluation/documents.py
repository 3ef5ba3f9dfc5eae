"""The shape of evaluation.json (docs/evaluation.md), field by field."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

Decoding = Literal["sampled", "greedy"]


class Interval(TypedDict):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


class Rate(Interval):
    """Success over `episodes` episodes."""

    episodes: int


class Success(Rate):
    """Success over all episodes and for each task, and how the episodes went."""

    steps: float
    """Mean per episode."""
    seconds: float
    """Mean per episode."""
    terminations: dict[str, int]
    failures: dict[str, int]
    infrastructure_attempts: int
    temperature: float
    per_task: dict[str, Rate]


ByDecoding = dict[Decoding, Success]
"""One policy, evaluated on the same instances with each decoding."""


class Protocol(TypedDict):
    """Which episodes were run. `seeds`: [first, last)."""

    tasks: list[str]
    seeds: list[int]
    episodes: int
    samples: int
    temperature: float
    step_limit: int


class Sample(TypedDict):
    trajectory: str
    success: bool
    failure: str | None
    steps: int
    seconds: float


class Instance(TypedDict):
    """One concrete task (name and seed), and the result of each of its samples."""

    id: str
    task: str
    seed: int
    samples: list[Sample]


class Side(TypedDict):
    """One evaluated policy. `pass_at_k`: k, as a string, to the estimate."""

    run: str
    checkpoint: str
    protocol: Protocol
    success: Success
    pass_at_k: dict[str, Interval]


class Against(Side):
    """The policy that another is compared with. `difference`: the other's success minus this one's."""

    difference: Interval
    better: int
    worse: int
    p_value: float


class Document(Side):
    instances: list[Instance]
    against: NotRequired[Against]
