"""The outcomes of an evaluation's episodes, and the estimates made from them.

An *instance* is one concrete task (name and seed); an evaluation samples each of its instances K times. `Outcome` is
one episode without its screenshots; `coordinator.sampling.evaluation` collects them, `dart eval` compares two
evaluations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from dart.core.evaluation.estimates import clustered, mcnemar, paired, pass_at_k
from dart.core.types import Task, Termination, Trajectory

LOOP_TIMES = 3
"""Taking the same action on the same screenshot this often is a loop."""


class Failure(StrEnum):
    """Why an episode failed. Each failed episode has one class: the first here that fits."""

    UNPARSABLE = "unparsable"
    """The policy's text was not an action."""
    LOOP = "loop"
    """It took the same action on the same screenshot `LOOP_TIMES` times or more, in a row or not."""
    STEP_LIMIT = "step_limit"
    """It reached the step limit without success."""
    CONTEXT_FULL = "context_full"
    """Its next prompt would not have fitted into the model's context."""
    WRONG_TARGET = "wrong_target"
    """The environment ended the episode as failed, or the policy declared it finished without success."""


def failure(trajectory: Trajectory) -> Failure | None:
    """The failure class of a trajectory; None for a success."""
    if trajectory.success:
        return None
    if trajectory.termination is Termination.UNPARSABLE:
        return Failure.UNPARSABLE
    seen = Counter((step.images[-1].sha256, step.action) for step in trajectory.steps)
    if max(seen.values(), default=0) >= LOOP_TIMES:
        return Failure.LOOP
    limits = {Termination.STEP_LIMIT: Failure.STEP_LIMIT, Termination.CONTEXT_FULL: Failure.CONTEXT_FULL}
    return limits.get(trajectory.termination, Failure.WRONG_TARGET)


@dataclass(frozen=True, slots=True)
class Outcome:
    trajectory_id: str
    task: Task
    success: bool
    failure: Failure | None
    termination: Termination
    steps: int
    seconds: float
    attempts: int
    """One more than the number that infrastructure ended."""
    state_success: bool = False
    """A success, or it ended with text that is not an action, in a state that the world judged to be one."""
    reward: float = 0.0
    """The world's verdict, of which `success` is a threshold."""

    @classmethod
    def of(cls, trajectory: Trajectory, attempts: int) -> Outcome:
        return cls(
            trajectory.id,
            trajectory.task,
            trajectory.success,
            failure(trajectory),
            trajectory.termination,
            len(trajectory.steps),
            trajectory.finished - trajectory.started,
            attempts,
            trajectory.success or trajectory.state_success,
            trajectory.reward,
        )


@dataclass(frozen=True, slots=True)
class Undone:
    """An episode that could not be run: `why`, in the words of what failed last."""

    trajectory_id: str
    task: Task
    why: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def clustered_rate(instances: Sequence[Sequence[bool]]) -> Estimate:
    """The mean over the episodes of instances of which some have several: episodes of one instance are more alike than
    others."""
    sampled = [samples for samples in instances if samples]
    every = [success for samples in sampled for success in samples]
    mean = fmean(every) if every else 0.0
    return Estimate(mean, *clustered([fmean(samples) for samples in sampled], [len(samples) for samples in sampled]))


def pass_curve(instances: Sequence[Sequence[bool]]) -> dict[int, Estimate]:
    """k → pass@k, the mean over instances, for k up to the fewest samples that an instance has.

    n samples of an instance are n / k trials of k, so pass@1's interval is `clustered_rate`'s.
    """
    fewest, curve = min(map(len, instances), default=0), {}
    for k in range(1, fewest + 1):
        values = [pass_at_k(len(samples), sum(samples), k) for samples in instances]
        curve[k] = Estimate(fmean(values), *clustered(values, [fewest / k] * len(values)))
    return curve


@dataclass(frozen=True, slots=True)
class Comparison:
    """Evaluation A against B on the same instances."""

    difference: Estimate
    """A's success minus B's, over paired instances."""
    better: int
    """Instances that A solved in more of its samples than B."""
    worse: int
    p_value: float
    """McNemar's exact test on those two counts; with more than one sample per instance, the sign test."""


def compare(a: Mapping[str, Sequence[bool]], b: Mapping[str, Sequence[bool]]) -> Comparison:
    """Instance → successes of its samples, under A and under B. Raises ValueError unless the instances are the same."""
    if a.keys() != b.keys():
        raise ValueError(f"only instances that both have can be paired: {sorted(a.keys() ^ b.keys())[:3]} are in one")
    pairs = [fmean(a[instance]) - fmean(b[instance]) for instance in a]
    better, worse = sum(d > 0 for d in pairs), sum(d < 0 for d in pairs)
    samples = min(len(one) for one in (*a.values(), *b.values()))
    return Comparison(Estimate(fmean(pairs), *paired(pairs, samples)), better, worse, mcnemar(better, worse))
