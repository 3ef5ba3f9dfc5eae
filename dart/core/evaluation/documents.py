"""The shape of evaluation.json (docs/evaluation.md), field by field."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from dart.core.json_text import JSON

Decoding = Literal["sampled", "greedy"]


class Interval(TypedDict):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


class Rate(Interval):
    """Success over `episodes` episodes."""

    episodes: int


class NotEvaluated(TypedDict):
    """An instance of which `episodes` could not be run, because of its environment and not of the policy."""

    id: str
    task: str
    episodes: int
    why: str


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
    by_state: NotRequired[Interval]
    """Success if episodes that ended with text that is not an action were judged by the state they left behind."""
    reward: NotRequired[float]
    """Mean over the episodes: what benchmarks that give partial credit report."""
    per_task: dict[str, Rate]
    """The tasks with at least one episode."""
    not_evaluated: NotRequired[list[NotEvaluated]]
    """Their episodes are in none of the other fields. Evaluations of earlier versions of dart lack it."""
    unjudged_attempts: NotRequired[dict[str, int]]
    """Of each task, the attempts that failed at their verdict, in this process of the run. Evaluations of earlier
    versions of dart lack it."""


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
    step_limits: NotRequired[dict[str, int]]
    """The tasks with a lower limit, by name."""
    not_held_out: NotRequired[list[str]]
    """Tasks whose only instance is also trained on."""
    settings: NotRequired[dict[str, JSON]]
    """The other main settings that success depends on, by the field's name."""


class Sample(TypedDict):
    trajectory: str
    success: bool
    reward: NotRequired[float]
    failure: str | None
    steps: int
    seconds: float


class Instance(TypedDict):
    """One concrete task (name and seed), and the result of each of its samples; none if it was not evaluated."""

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
    unpaired: NotRequired[int]
    """Instances that one of the two could not evaluate, which are left out of the comparison."""


class Document(Side):
    instances: list[Instance]
    against: NotRequired[Against]
