"""Whether a trajectory can be trained on at all.

The check is made where a trajectory comes in from a file: when it is taken from the experience pool, and when a restart
reads it from the database. A trajectory that fails it would break the trainer's update, again after every restart. What
a worker sends has passed `dart.wire.rules`, which refuses all of this answer by answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from dart.core.types import Generation, Trajectory

LARGEST_REWARD = 1e6
"""A group's standard deviation squares rewards, and the squares of larger ones lose all precision."""
LARGEST_VERSION = 2**63 - 1
"""The largest number that the database holds."""


def why_unusable(
    trajectory: Trajectory,
    vocabulary: int | None = None,
    advantages: Sequence[float] | None = None,
    damaged: Collection[bytes] = (),
) -> str | None:
    """Why the trajectory cannot be trained on; None if it can.

    `advantages`: one per step, if they have been computed. `vocabulary`: how many token ids the model has; None leaves
    the ids of sampled tokens unchecked. The trainer checks ids in prompts, and names the sample that it refuses. A
    trajectory whose steps have no log-probabilities at all is usable only as a pooled copy, which the trainer scores.
    `damaged`: digests of screenshots that are gone.
    """
    if not math.isfinite(trajectory.reward) or abs(trajectory.reward) > LARGEST_REWARD:
        return f"its reward is {trajectory.reward:g}: it must be a finite number of at most {LARGEST_REWARD:g}"
    if not trajectory.steps:
        return "it has no steps"
    if advantages is not None and len(advantages) != len(trajectory.steps):
        return f"it has {len(advantages)} advantages for {len(trajectory.steps)} steps"
    scored = not trajectory.pooled_from or any(len(step.generation.logprobs) for step in trajectory.steps)
    for step in trajectory.steps:
        if why := _problem(step.generation, scored, vocabulary):
            return f"step {step.index} {why}"
        if damaged and any(image.sha256 in damaged for image in step.images):
            return f"step {step.index} has a screenshot that is damaged or gone"
    return None


def _problem(generation: Generation, scored: bool, vocabulary: int | None) -> str | None:
    tokens = len(generation.token_ids)
    if not tokens:
        return "has no sampled tokens"
    if not len(generation.prompt_token_ids):
        return "has no prompt tokens"
    if vocabulary is not None and (largest := max(generation.token_ids)) >= vocabulary:
        return f"has token {largest}: the vocabulary ends at {vocabulary - 1}"
    if scored and len(generation.logprobs) != tokens:
        return f"has {len(generation.logprobs)} log-probabilities for {tokens} tokens"
    # The sum is finite if all terms are.
    if scored and not math.isfinite(sum(generation.logprobs)):
        return "has a log-probability that is not finite"
    covered = 0
    for span in generation.versions:
        if span.start != covered or span.end <= span.start or not 0 <= span.version <= LARGEST_VERSION:
            return f"has version {span.version} for tokens [{span.start}, {span.end}) after token {covered}"
        covered = span.end
    if covered != tokens:
        return f"has weight versions for {covered} of {tokens} tokens"
    return None
