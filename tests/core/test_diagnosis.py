"""What keeps a policy from learning is named, and runs that learn are told nothing: recorded ones, from beginning to
end, and the numbers of real updates."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dart.core.learning.diagnosis import Cause, Finding, LearningNumbers, diagnose
from dart.core.learning.recent import AttemptNumbers, Attempts, Curation, GroupNumbers, UpdateNumbers
from dart.core.status import Stall
from dart.core.types import Termination, Trajectory
from dart.inspection.wording import stall_lines

RECORDED = sorted(Path("benchmarks/results/learning").glob("*/*.json"))
ROLLOUTS, LOOKED_EVERY = 8, 20
END, UNREAD, LIMIT = Termination.ENVIRONMENT, Termination.UNPARSABLE, Termination.STEP_LIMIT

TRAINED = [  # of configs/ladder_demo.yaml: updates 1, 9 and 14 of a real run
    {"entropy": 0.0926, "importance_weight": 1.0, "importance_truncated": 0.0611, "kl_old": 0.0, "kl_reference": 0.0,
     "logprob_difference": 0.0, "gradient_norm": 0.2997, "steps_taken": 1, "learning_rate": 7.5e-6},
    {"entropy": 0.0771, "importance_weight": 0.9964, "importance_truncated": 0.5355, "kl_old": 0.0,
     "kl_reference": 0.0113, "logprob_difference": 0.0065, "gradient_norm": 0.3173, "steps_taken": 1,
     "learning_rate": 6e-5},
    {"entropy": 0.0764, "importance_weight": 0.995, "importance_truncated": 0.9, "kl_old": 0.0, "kl_reference": 0.0453,
     "logprob_difference": 0.0102, "gradient_norm": 0.3171, "steps_taken": 1, "learning_rate": 6e-5},
]  # fmt: skip


def trajectory(success: bool, end: Termination = END, text: str = "", error: str = "") -> Trajectory:
    step = SimpleNamespace(generation=SimpleNamespace(text=text), parse_error=error)
    return cast("Trajectory", SimpleNamespace(reward=float(success), termination=end, steps=(step,)))


def history(episodes: list[list[float]]) -> Iterator[LearningNumbers]:
    """The numbers after every few recorded episodes: (seconds, task, steps, success, update). Roll-outs of a task that
    finish one after the other are taken for a group; records do not say more."""
    attempts, curation, open_groups = Attempts(), Curation(), defaultdict[float, list[bool]](list)
    for place, (seconds, task, _, success, _) in enumerate(episodes):
        attempts.finished(trajectory(bool(success)), seconds)
        group = open_groups[task]
        group.append(bool(success))
        if len(group) == ROLLOUTS:
            open_groups.pop(task)
            if 0 < sum(group) < ROLLOUTS:
                curation.released()
            else:
                curation.dropped("all succeeded" if all(group) else "all failed", "", ROLLOUTS)
        if place % LOOKED_EVERY == 0:
            yield LearningNumbers(seconds, attempts.numbers(), curation.groups())


def recorded() -> list[Any]:
    told = [(path, json.loads(path.read_text(encoding="utf-8")).get("episodes")) for path in RECORDED]
    return [pytest.param(episodes, id=f"{path.parent.name}/{path.stem}") for path, episodes in told if episodes]


@pytest.mark.parametrize("episodes", recorded())
def test_a_recorded_run_that_learned_is_told_nothing(episodes: list[list[float]]) -> None:
    assert not [numbers for numbers in history(episodes) if diagnose(numbers)]


def test_there_are_recorded_runs_to_look_at() -> None:
    assert len(recorded()) >= 20


def numbers(**parts: Any) -> LearningNumbers:
    """Of a run that learns, with these differences."""
    attempts = AttemptNumbers({END: 60, UNREAD: 40, LIMIT: 100}, rewarded=40, any_finished=True, enough_since=0.0)
    updates = UpdateNumbers((TRAINED[1],) * 5, 0.09)
    told: dict[str, Any] = {"attempts": attempts, "groups": GroupNumbers(True), "updates": updates, "success_rate": 0.2}
    return LearningNumbers(now=600.0, gradient_clip=1.0, **(told | parts))


def causes(numbers: LearningNumbers) -> list[Cause]:
    return [found.cause for found in diagnose(numbers)]


@pytest.mark.parametrize("update", TRAINED)
def test_real_updates_are_told_nothing(update: dict[str, float]) -> None:
    assert not causes(numbers(updates=UpdateNumbers((update,) * 5, 0.09)))


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"entropy": 0.001}, Cause.ENTROPY),
        ({"kl_reference": 4.0}, Cause.KL),
        ({"kl_old": 4.0}, Cause.KL),
        ({"gradient_norm": 0.0}, Cause.GRADIENT_ZERO),
        ({"steps_taken": 0}, Cause.GRADIENT_ZERO),
        ({"learning_rate": 0.0}, Cause.GRADIENT_ZERO),
        ({"gradient_norm": 80.0}, Cause.GRADIENT_CUT),
        ({"importance_truncated": 0.95, "logprob_difference": 1.5}, Cause.IMPORTANCE),
        ({"importance_weight": 0.05, "logprob_difference": 4.0}, Cause.IMPORTANCE),
    ],
)
def test_what_updates_lack_is_named_once_it_lasts(wrong: dict[str, float], cause: Cause) -> None:
    ill = TRAINED[1] | wrong
    assert causes(numbers(updates=UpdateNumbers((ill,) * 5, 0.09))) == [cause]
    assert not causes(numbers(updates=UpdateNumbers((TRAINED[1], *(ill,) * 4), 0.09))), "four may be chance"


def test_a_policy_that_succeeds_may_be_certain_and_far_from_its_beginning() -> None:
    certain = TRAINED[1] | {"entropy": 0.0001, "kl_reference": 6.0}
    assert not causes(numbers(updates=UpdateNumbers((certain,) * 5, 0.09), success_rate=0.8))


def test_imitation_may_end_without_entropy() -> None:
    certain = {"entropy": 0.0001, "gradient_norm": 0.2, "steps_taken": 1}
    assert not causes(numbers(updates=UpdateNumbers((certain,) * 5, 0.09), groups=None, success_rate=None))


def test_half_of_the_texts_may_be_unparsable_while_groups_can_be_trained_on() -> None:
    half = AttemptNumbers({UNREAD: 130, END: 70}, rewarded=40, any_finished=True, enough_since=0.0)
    assert not causes(numbers(attempts=half))
    assert causes(numbers(attempts=half, groups=GroupNumbers(False))) == [Cause.UNPARSABLE]
    most = AttemptNumbers({UNREAD: 190, END: 10}, rewarded=9, any_finished=True, enough_since=0.0)
    assert causes(numbers(attempts=most)) == [Cause.UNPARSABLE]


def test_an_unparsable_text_is_shown_with_the_parsers_words_on_one_line() -> None:
    attempts = Attempts()
    for number in range(50):
        attempts.finished(trajectory(False, UNREAD, "I would\n\x1b[31mclick" + " it" * 200, "no action"), float(number))
    (found,) = diagnose(numbers(attempts=attempts.numbers(), groups=GroupNumbers(False)))
    line, example, advice = stall_lines(found.stall(3.0))
    assert line == "nothing is learnt: 50 of the last 50 trajectories ended with a text that is no action (100.0%)"
    assert example.startswith("  the last one: “I would [31mclick it it") and example.endswith("…”: no action")
    assert advice.startswith("  what to do: the prompt or the grammar does not fit the model")


def test_a_policy_without_a_success_is_given_time() -> None:
    none = AttemptNumbers({LIMIT: 58}, any_finished=True, enough_since=0.0)
    early = numbers(attempts=none, groups=GroupNumbers(False, {"all failed": 5}, 40))
    assert not causes(replace(early, now=39.0))
    (found,) = diagnose(replace(early, now=41.0))
    assert found.cause is Cause.ALL_FAIL and found.early
    line, advice = stall_lines(found.stall(3.0))
    assert line.startswith("nothing is learnt yet: none of the last 58 trajectories has a reward")
    assert advice.startswith("  what to do: it may be chance; if it goes on, look at some trajectories")
    assert not causes(replace(early, now=41.0, attempts=replace(none, rewarded=1)))


def told(rate: float, size: int, seed: int, trajectories: int = 2000) -> list[tuple[int, Finding]]:
    """What is found, and after how many trajectories, in a run of this success rate and groups of this size. One
    trajectory finishes each second."""
    chance, attempts, curation, found = random.Random(seed), Attempts(), Curation(), []
    for count in range(size, trajectories, size):
        group = [chance.random() < rate for _ in range(size)]
        for place, success in enumerate(group, count - size):
            attempts.finished(trajectory(success), float(place))
        if 0 < sum(group) < size:
            curation.released()
        else:
            curation.dropped("all succeeded" if all(group) else "all failed", "", size)
        now = LearningNumbers(float(count), attempts.numbers(), curation.groups())
        found += [(count, one) for one in diagnose(now)]
    return found


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_run_in_which_nothing_succeeds_is_told_at_once_and_soon_that_it_is_no_chance(size: int) -> None:
    found = told(0.0, size, seed=0)
    assert found[0][0] <= 50 + 60 and {one.cause for _, one in found} == {Cause.ALL_FAIL}
    lasting = [count for count, one in found if not one.early]
    assert lasting[0] <= max(704, 75 * size), "one success in a hundred would have been seen, but for 1 run in 1000"
    assert len(found) == (2000 - found[0][0]) // size + (2000 % size > 0), "from then on, always"


@pytest.mark.parametrize(("rate", "most"), [(0.01, 0.15), (0.03, 0.01), (0.97, 0.01)])
def test_a_hard_run_is_hardly_ever_told_that_it_learns_nothing(rate: float, most: float) -> None:
    alarmed = [seed for seed in range(150) if any(not one.early for _, one in told(rate, 8, seed))]
    assert len(alarmed) <= most * 150


def test_one_success_among_the_first_is_told_nothing() -> None:
    attempts = AttemptNumbers({LIMIT: 57, END: 1}, rewarded=1, any_finished=True, enough_since=0.0)
    mixed = numbers(attempts=attempts, groups=GroupNumbers(True, {"all failed": 6}, 48))
    assert not causes(mixed)


@pytest.mark.parametrize(
    ("dropped", "cause"),
    [
        ({"all failed": 90}, Cause.ALL_FAIL),
        ({"all succeeded": 90}, Cause.ALL_SUCCEED),
        ({"equal rewards": 90}, Cause.EQUAL_REWARDS),
        ({"cannot be trained on": 90}, Cause.UNUSABLE),
        ({"all failed": 45, "all succeeded": 45}, Cause.NO_DIFFERENCE),
    ],
)
def test_a_run_whose_groups_are_all_dropped_from_some_time_on_is_told_why(
    dropped: dict[str, int], cause: Cause
) -> None:
    assert causes(numbers(groups=GroupNumbers(True, dropped, 720))) == [cause]
    fewer = {name: count * 4 // 5 for name, count in dropped.items()}
    assert not causes(numbers(groups=GroupNumbers(True, fewer, 720))), "one task in fifty may be worth training on"
    assert not causes(numbers(groups=GroupNumbers(True, dropped, 360))), "groups of four tell half as much"


def test_attempts_that_all_fail_are_told_at_the_third() -> None:
    attempts = Attempts()
    for _ in range(2):
        attempts.failed("env-0: no module named pygame")
    assert not causes(numbers(attempts=attempts.numbers()))
    attempts.failed("env-0: no module named pygame")
    (found,) = diagnose(numbers(attempts=attempts.numbers()))
    assert list(stall_lines(found.stall(0.0)))[:2] == [
        "nothing is sampled: all 3 attempts so far have failed",
        "  the last one: env-0: no module named pygame",
    ]


def test_each_reason_is_an_event_of_its_own() -> None:
    names = {found.stall(0.0).name for found in diagnose(numbers(groups=GroupNumbers(True, {"all failed": 90}, 720),
             updates=UpdateNumbers((TRAINED[1] | {"entropy": 0.0},) * 5, 0.09)))}  # fmt: skip
    assert names == {("learning", "all fail"), ("learning", "entropy")}
    assert Stall.from_json({"kind": "learning", "culprit": "entropy"}).name in names
