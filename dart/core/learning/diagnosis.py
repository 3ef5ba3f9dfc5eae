"""Why nothing is learnt: the run's recent numbers go in, and what keeps the policy from learning comes out. Pure.

`core.watchdog` tells what does not move. Here everything moves, and yet the policy cannot get better: no attempt ends
with a verdict, what it writes is no action, no group has an advantage, or updates change nothing, or too much. A
healthy run is told nothing, neither at its beginning, when success is rare and comes late, nor at its end, when most
groups succeed. So every bound below leaves room for chance, and for what healthy runs have shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dart.core.evaluation.estimates import wilson
from dart.core.learning.recent import ENOUGH, RECENT_UPDATES, WINDOW, AttemptNumbers, GroupNumbers, UpdateNumbers
from dart.core.status import LEARNING, Stall
from dart.core.types import Termination

FAILURES_AT_FIRST = 3
"""Attempts that must fail, while none has ever finished. One may be chance, and a lost worker's are not counted."""
FAILURES_LATER = 20
"""Attempts before their share of failures tells anything, once some have finished."""
PATIENCE_SECONDS = 40.0
"""How long after the first `ENOUGH` trajectories a policy without a success may still be one that succeeds now and
then: of fifty attempts at 2.5 % all fail in 28 runs of 100, of `WINDOW` in one of 160. Told by the end of a minute."""
MOST_UNREAD_AT_FIRST, MOST_UNREAD = 0.5, 0.8
"""The share of attempts that may end with no action: before any group could be trained on, and at any time. A policy
that learns has been seen with half of its attempts unparsable for thousands of them."""
GROUPS_WITHOUT = 75
"""Groups in a row without one that can be trained on. In 81 recorded runs that learn the most were 38."""
LEAST_RATE, LEAST_CHANCE = 0.01, 0.001
"""And so many trajectories in them, 688, that it would happen with no more than this chance to a policy that succeeds,
or fails, at this rate, the least that is worth training on. Until then it may be chance, and is told as no fault."""
MOST_OF_THEM = 0.9
"""The share of groups above which their cause is named alone."""
GONE_ENTROPY, GONE_SHARE = 0.005, 0.05
"""Entropy in nats a token, and its share of what it was at first, below which a policy tries nothing else. Runs that
learn keep more than half; the least that one had was 0.06."""
SUCCEEDS = 0.5
"""A policy that succeeds at least this often has reason to be certain, and to be far from where it began."""
MOST_KL = 3.0
"""Nats a token, to the reference or to the policy before the update: a token's probability is then e³ times another."""
LEAST_GRADIENT = 1e-7
"""Below this a gradient is nothing: norms of healthy updates are above 0.01."""
MOST_CLIPPED = 50.0
"""Times `trainer.gradient_clip`: so much larger a gradient is not a step that was shortened, but one that is wrong."""
MOST_TRUNCATED, MOST_APART = 0.8, 0.1
"""The share of tokens whose importance weight is cut, and the mean difference of trainer's and replicas' log-probs.
With a cap of 1 the least noise cuts half of the tokens, and a healthy run has been seen with 74 %, 0.01 apart."""
LEAST_WEIGHT = 0.2
"""The mean importance weight: below it, most of the batch counts for nothing."""
BROKEN_TRANSFERS = 3
"""Transfers of weights that broke in a row, to every replica."""


class Cause(StrEnum):
    FAILING = "attempts fail"
    UNPARSABLE = "unparsable"
    ALL_FAIL = "all fail"
    ALL_SUCCEED = "all succeed"
    EQUAL_REWARDS = "equal rewards"
    UNUSABLE = "unusable"
    NO_DIFFERENCE = "no difference"
    WEIGHTS = "weights"
    GRADIENT_ZERO = "gradient zero"
    GRADIENT_CUT = "gradient cut"
    ENTROPY = "entropy"
    KL = "kl"
    IMPORTANCE = "importance"


@dataclass(frozen=True, slots=True)
class LearningNumbers:
    """What a run's learning depends on, as of `now`, in seconds of the clock that the numbers were noted with."""

    now: float
    attempts: AttemptNumbers = field(default_factory=AttemptNumbers)
    groups: GroupNumbers | None = None
    """None where there are none: outside of training, or while demonstrations are imitated."""
    updates: UpdateNumbers = field(default_factory=UpdateNumbers)
    success_rate: float | None = None
    gradient_clip: float = 0.0
    broken_transfers: int = 0
    """The fewest of any replica, one after the other; 0 if there are no replicas."""
    transfer_failure: str = ""
    """What the last of these said."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A reason for which nothing is learnt. `example`: what a policy wrote or a worker said, in its own words. `early`:
    it may still be chance."""

    cause: Cause
    what: str
    advice: str
    example: str = ""
    early: bool = False

    def stall(self, seconds: float) -> Stall:
        """How status, events and pages tell it. `seconds`: since it was found."""
        waits = "nothing is sampled" if self.cause is Cause.FAILING else "nothing is learnt"
        advice = self.advice
        if self.early:
            waits, advice = f"{waits} yet", f"it may be chance; if it goes on, {advice}"
        return Stall(LEARNING, waits, self.what, seconds, str(self.cause), self.example, advice, self.early)


def diagnose(numbers: LearningNumbers) -> list[Finding]:
    """What keeps the policy from learning; nothing for a run that learns."""
    attempts, trains = numbers.attempts, numbers.groups is not None
    if found := _failing(attempts):
        return [found]
    unread = _unparsable(attempts, numbers.groups is not None and not numbers.groups.any_released)
    found = unread or (_no_advantage(numbers, numbers.groups) if numbers.groups else None)
    rules = (_weights, _gradient_zero, _gradient_cut, *((_entropy, _kl, _importance) if trains else ()))
    return [one for one in (found, *(rule(numbers) for rule in rules)) if one is not None]


# ---- attempts ----


def _failing(attempts: AttemptNumbers) -> Finding | None:
    failed, total = attempts.failed, attempts.failed + attempts.finished
    advice = "look at the workers' logs (logs/ in the run directory), and run `dart doctor` with the config"
    if not attempts.any_finished and failed >= FAILURES_AT_FIRST:
        return Finding(Cause.FAILING, f"all {failed} attempts so far have failed", advice, attempts.failure)
    if total >= FAILURES_LATER and wilson(failed, total)[0] > 0.5:
        what = f"{failed} of the last {total} attempts have failed"
        return Finding(Cause.FAILING, what, advice, attempts.failure)
    return None


def _unparsable(attempts: AttemptNumbers, before_any_group: bool) -> Finding | None:
    unread, total = attempts.ends.get(Termination.UNPARSABLE, 0), attempts.finished
    most = MOST_UNREAD_AT_FIRST if before_any_group else MOST_UNREAD
    if total < ENOUGH or wilson(unread, total)[0] <= most:
        return None
    return Finding(
        Cause.UNPARSABLE,
        f"{unread} of the last {total} trajectories ended with a text that is no action ({unread / total:.1%})",
        "the prompt or the grammar does not fit the model: compare what it writes with docs/grammars.md, and set "
        "agent.grammar, agent.coordinates and agent.prompt to what the model was trained with; or "
        "teach it the form with demonstrations first (algorithm: sft)",
        attempts.unread,
    )  # fmt: skip


# ---- groups ----


def _no_advantage(numbers: LearningNumbers, groups: GroupNumbers) -> Finding | None:
    """No group can be trained on: by now that is not chance, or none could since the run began."""
    attempts, cause = numbers.attempts, _alone(groups)
    if groups.groups >= GROUPS_WITHOUT and (1 - LEAST_RATE) ** groups.trajectories < LEAST_CHANCE:
        return _undecided(groups, cause, attempts)
    since = attempts.enough_since
    patient = attempts.finished >= WINDOW or (since is not None and numbers.now - since >= PATIENCE_SECONDS)
    if groups.any_released or not patient:
        return None
    if attempts.finished >= ENOUGH and not attempts.rewarded:
        return replace(_undecided(groups, Cause.ALL_FAIL, attempts), early=True)
    # Only groups count here: the trajectories that finish first are short, and more of them succeed.
    if cause in (Cause.ALL_FAIL, Cause.NO_DIFFERENCE) or groups.trajectories < ENOUGH:
        return None
    return replace(_undecided(groups, cause, attempts), early=cause is not Cause.UNUSABLE)


_CAUSES = {
    "all failed": Cause.ALL_FAIL, "all succeeded": Cause.ALL_SUCCEED, "equal rewards": Cause.EQUAL_REWARDS,
    "cannot be trained on": Cause.UNUSABLE,
}  # fmt: skip
"""By the causes of `core.curation.judging`."""


def _alone(groups: GroupNumbers) -> Cause:
    """Why nearly all of the groups were dropped, if for one cause."""
    worst = max(groups.causes, key=lambda cause: groups.causes[cause], default="")
    most = groups.causes.get(worst, 0) >= MOST_OF_THEM * groups.groups
    return _CAUSES.get(worst, Cause.NO_DIFFERENCE) if most else Cause.NO_DIFFERENCE


def _undecided(groups: GroupNumbers, cause: Cause, attempts: AttemptNumbers) -> Finding:
    many = f"the last {groups.groups} groups"
    match cause:
        case Cause.ALL_FAIL:
            of = many if groups.any_released else f"the last {attempts.finished} trajectories"
            ends = ", ".join(f"{end} {n / attempts.finished:.0%}" for end, n in sorted(attempts.ends.items()))
            return Finding(
                cause, f"none of {of} has a reward, so no group has an advantage; their ends: {ends}",
                "look at some trajectories (`dart show`): if the policy is on its way, begin with easier tasks "
                "(environment.tasks) or successes of a teacher (curation.pool.sources, `dart collect`); if it ought to "
                "have succeeded, look at the world's verdict",
            )  # fmt: skip
        case Cause.ALL_SUCCEED:
            return Finding(
                cause, f"every roll-out of {many} has succeeded, so no group has an advantage and updates have stopped",
                "these tasks have nothing left to teach: end the run (`dart control drain`), or choose harder ones "
                "(environment.tasks)",
            )  # fmt: skip
        case Cause.EQUAL_REWARDS:
            return Finding(
                cause, f"all roll-outs of a group had the same reward, in {many} ({groups.detail})",
                "the world's verdict does not tell good episodes from bad ones: let its reward depend on what was done",
            )  # fmt: skip
        case Cause.UNUSABLE:
            return Finding(
                cause, f"{many} cannot be trained on", "look at coordinator.log and the worker whose numbers are wrong",
                groups.detail,
            )  # fmt: skip
    told = ", ".join(f"{name} in {count}" for name, count in sorted(groups.causes.items()))
    return Finding(
        Cause.NO_DIFFERENCE, f"the roll-outs of a group do not differ, in {many} ({told})",
        "raise curation.rollouts or rollout.temperature, or choose tasks that the policy solves at times "
        "(environment.tasks)",
    )  # fmt: skip


# ---- updates ----


def _weights(numbers: LearningNumbers) -> Finding | None:
    if numbers.broken_transfers < BROKEN_TRANSFERS:
        return None
    return Finding(
        Cause.WEIGHTS,
        f"new weights reach no replica: the last {numbers.broken_transfers} transfers to each have failed",
        "see whether replicas reach the trainer's machine (docs/machines.md), and look at the logs of both; until then "
        "the policy that samples stays as it was",
        numbers.transfer_failure,
    )  # fmt: skip


def _lately(numbers: LearningNumbers, metric: str, wrong: Callable[[float], bool]) -> float | None:
    """The newest value of a metric that is wrong in every one of the last updates."""
    values = [update[metric] for update in numbers.updates.metrics if metric in update]
    return values[-1] if len(values) >= RECENT_UPDATES and all(map(wrong, values)) else None


def _gradient_zero(numbers: LearningNumbers) -> Finding | None:
    if _lately(numbers, "steps_taken", lambda steps: steps == 0) is not None:
        return Finding(
            Cause.GRADIENT_ZERO, f"the last {RECENT_UPDATES} updates changed nothing: no gradient of them was finite",
            "look at the trainer's log for what is not finite, and lower trainer.learning_rate; resume from an earlier "
            "checkpoint if the weights have grown too large",
        )  # fmt: skip
    if _lately(numbers, "learning_rate", lambda rate: rate == 0) is not None:
        return Finding(
            Cause.GRADIENT_ZERO, f"the last {RECENT_UPDATES} updates changed nothing: the learning rate is 0",
            "set trainer.learning_rate, or trainer.final_learning_rate_fraction, so that it does not end at 0",
        )  # fmt: skip
    norm = _lately(numbers, "gradient_norm", lambda norm: norm < LEAST_GRADIENT)
    if norm is None:
        return None
    return Finding(
        Cause.GRADIENT_ZERO, f"the gradients of the last {RECENT_UPDATES} updates are 0 (norm {norm:.1g})",
        "what is trained on has no part in the loss: look at trainer.lora, trainer.freeze_vision, trainer.loss and the "
        "importance weights of the updates",
    )  # fmt: skip


def _gradient_cut(numbers: LearningNumbers) -> Finding | None:
    most = MOST_CLIPPED * numbers.gradient_clip
    norm = _lately(numbers, "gradient_norm", lambda norm: norm > most) if most else None
    if norm is None:
        return None
    return Finding(
        Cause.GRADIENT_CUT,
        f"the gradients of the last {RECENT_UPDATES} updates are more than {MOST_CLIPPED:.0f} times "
        f"trainer.gradient_clip (norm {norm:.3g}, allowed {numbers.gradient_clip:g}): next to nothing of them is left",
        "look for what makes them so large (the loss, rewards, importance weights), or set trainer.gradient_clip to "
        "what is usual for this model",
    )  # fmt: skip


def _lost(numbers: LearningNumbers) -> bool:
    """The policy does not succeed so often that it has reason to be as it is."""
    return numbers.success_rate is not None and numbers.success_rate < SUCCEEDS


def _entropy(numbers: LearningNumbers) -> Finding | None:
    first = numbers.updates.first_entropy or 0.0
    least = max(GONE_ENTROPY, GONE_SHARE * first)
    entropy = _lately(numbers, "entropy", lambda entropy: entropy < least) if _lost(numbers) else None
    if entropy is None:
        return None
    return Finding(
        Cause.ENTROPY,
        f"the policy tries nothing new: its entropy is {entropy:.2g} nats a token, and was {first:.2g} at first",
        "resume from an earlier checkpoint with a lower trainer.learning_rate, a higher trainer.loss.kl_coefficient, "
        "or trainer.loss.entropy_coefficient above 0",
    )  # fmt: skip


def _kl(numbers: LearningNumbers) -> Finding | None:
    for metric, whom in (("kl_reference", "the policy that the run began with"), ("kl_old", "that before the update")):
        kl = _lately(numbers, metric, lambda kl: kl > MOST_KL) if _lost(numbers) else None
        if kl is not None:
            return Finding(
                Cause.KL, f"the policy runs away: its KL divergence from {whom} is {kl:.2g} nats a token",
                "resume from an earlier checkpoint with a lower trainer.learning_rate or a higher "
                "trainer.loss.kl_coefficient",
            )  # fmt: skip
    return None


def _importance(numbers: LearningNumbers) -> Finding | None:
    apart = _lately(numbers, "logprob_difference", lambda apart: apart > MOST_APART)
    cut = _lately(numbers, "importance_truncated", lambda share: share > MOST_TRUNCATED) if apart is not None else None
    weight = _lately(numbers, "importance_weight", lambda weight: weight < LEAST_WEIGHT)
    if cut is None and weight is None:
        return None
    means = f"{cut:.0%} of importance weights are cut" if cut is not None else f"importance weights are {weight:.2g}"
    far = f"; log-probs of trainer and replicas are {apart:.2g} apart" if apart is not None else ""
    return Finding(
        Cause.IMPORTANCE, f"{means} on average, in each of the last {RECENT_UPDATES} updates{far}",
        "replicas sample from another distribution than the trainer computes: compare same_version_difference in the "
        "updates, which ought to be near 0, model.dtype, rollout.quantization and rollout.temperature; if that is near "
        "0, lower curation.max_staleness",
    )  # fmt: skip
