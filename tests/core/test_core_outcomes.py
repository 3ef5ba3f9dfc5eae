"""Estimates and outcomes against values worked out by hand, and what must hold for any counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dart.core.action import Action, Click, Point
from dart.core.evaluation.estimates import clustered, mcnemar, paired, pass_at_k, wilson
from dart.core.evaluation.outcomes import Failure, Outcome, clustered_rate, compare, failure, pass_curve
from dart.core.evaluation.quota import Quota
from dart.core.types import Generation, Image, Step, Task, Termination, Trajectory, VersionSpan

CLICK, OTHER = Click(Point(0.5, 0.5)), Click(Point(0.25, 0.5))
counts = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


def trajectory(moves: list[tuple[str, Action | None]], end: Termination, success: bool = False) -> Trajectory:
    """moves: (screenshot, action) of each step."""
    generation = Generation((1,), (2,), (-0.5,), (VersionSpan(0, 0, 1),), "t")
    shots = [Image.of(shot.encode(), "image/png", 2, 2) for shot, _ in moves]
    steps = tuple(Step(i, tuple(shots[: i + 1]), generation, action) for i, (_, action) in enumerate(moves))
    return Trajectory("t1", "g1", Task("s", "n", 1), "do", steps, end, float(success), success, 9, 10.0, 12.5)


# ---- estimates ----


def test_wilson_by_hand() -> None:
    # 8 of 10: centre (0.8 + 1.92073/10) / 1.384146 = 0.716740; half 1.959964 · sqrt(0.016 + 0.0096036) / 1.384146
    assert wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


@given(counts)
def test_wilson_contains_the_rate(case: tuple[int, int, int]) -> None:
    episodes, successes, _ = case
    low, high = wilson(successes, episodes)
    assert 0.0 <= low <= successes / episodes <= high <= 1.0


def test_pass_at_k_by_hand() -> None:
    # 4 samples, 2 successes: of the 6 pairs of samples one is of two failures
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 2, 3) == 1.0, "three of four cannot all be failures"
    assert pass_at_k(5, 1, 3) == pytest.approx(3 / 5)
    for wrong in ((4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)):
        with pytest.raises(ValueError, match="is not defined"):
            pass_at_k(*wrong)


@given(counts)
def test_pass_at_k_is_a_probability_that_grows_with_k(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert 0.0 <= pass_at_k(n, c, k) <= 1.0
    assert k == n or pass_at_k(n, c, k) <= pass_at_k(n, c, k + 1)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_success(samples: list[bool], k: int) -> None:
    k = min(k, len(samples))
    drawn = list(combinations(samples, k))
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


def test_an_interval_over_instances_counts_as_many_trials_as_they_are_worth() -> None:
    # Instances that all come out half right are no more alike than 20 trials are; all or nothing, they are 10.
    assert clustered([0.5] * 10, [2] * 10) == wilson(10, 20)
    assert clustered([0.0, 1.0] * 5, [2] * 10) == pytest.approx(wilson(5, 10))
    # rates 1, 1, 1/2, 1/2: variance of the mean 4 · 0.25² / 16, so 0.75 · 0.25 / 0.015625 = 12 trials; there are 8
    assert clustered([1.0, 1.0, 0.5, 0.5], [2] * 4) == wilson(6, 8)
    # rates 1, 1, 1/4, 1/4: variance (4 · 0.375²) / 16, and 0.625 · 0.375 / 0.03515625 = 20/3 trials of the 16
    assert clustered([1.0, 1.0, 0.25, 0.25], [4] * 4) == pytest.approx(wilson(0.625 * 20 / 3, 20 / 3))
    assert clustered([1.0] * 20, [2] * 20) == wilson(20, 20), "nothing tells how alike the two of an instance are"
    assert clustered([0.75], [8]) == wilson(6, 8), "of one instance they are independent"
    assert clustered([], []) == (0.0, 1.0)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_with_one_trial_for_each_instance_the_interval_is_wilsons(outcomes: list[bool]) -> None:
    assert clustered([float(one) for one in outcomes], [1] * len(outcomes)) == pytest.approx(
        wilson(sum(outcomes), len(outcomes))
    )


def test_a_difference_by_hand() -> None:
    # 7 pairs one way and 1 the other of 20. Agresti and Min: (7 - 1) / 22 ± z · sqrt(7 + 1 + 1 - 6² / 22) / 22
    seven_and_one = [1.0] * 7 + [-1.0] + [0.0] * 12
    assert paired(seven_and_one) == pytest.approx((0.272727 - 0.241753, 0.272727 + 0.241753), abs=1e-6)
    low, high = paired([0.0] * 20)
    assert low == -high and high == pytest.approx(1.959964 / 22), "that all pairs agree does not prove that all would"
    assert paired([1.0] * 20)[1] == 1.0 and 0.7 < paired([1.0] * 20)[0] < 0.8
    assert paired([0.0] * 20, samples=4)[1] == pytest.approx(1.959964 / 88)
    with pytest.raises(ValueError, match="there are no pairs"):
        paired([])


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=40))
def test_a_difference_lies_in_its_interval(differences: list[float]) -> None:
    low, high = paired(differences, samples=2)
    assert -1 <= low <= fmean(differences) <= high <= 1 and low < high


def test_mcnemar_by_hand() -> None:
    # 9 one way, 1 the other: 2 · (C(10, 0) + C(10, 1)) / 2^10
    assert mcnemar(9, 1) == pytest.approx(22 / 1024)
    assert mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_symmetric_and_a_probability(better: int, worse: int) -> None:
    p = mcnemar(better, worse)
    assert p == mcnemar(worse, better)
    assert comb(better + worse, better) / 2 ** (better + worse) <= p <= 1.0
    assert better < worse or mcnemar(better + 1, worse) <= p, "further apart is never likelier"


# ---- outcomes ----


@pytest.mark.parametrize(
    ("moves", "end", "expected"),
    [
        ([("a", CLICK), ("b", None)], Termination.UNPARSABLE, Failure.UNPARSABLE),
        ([("a", CLICK)] * 3 + [("a", None)], Termination.UNPARSABLE, Failure.UNPARSABLE),
        ([("a", CLICK)] * 3, Termination.STEP_LIMIT, Failure.LOOP),
        ([("a", CLICK), ("b", OTHER), ("a", CLICK), ("b", CLICK), ("a", CLICK)], Termination.ENVIRONMENT, Failure.LOOP),
        ([("a", CLICK), ("a", CLICK), ("b", CLICK)], Termination.STEP_LIMIT, Failure.STEP_LIMIT),
        ([("a", CLICK), ("a", OTHER), ("a", CLICK)], Termination.STEP_LIMIT, Failure.STEP_LIMIT),
        ([("a", CLICK)], Termination.ENVIRONMENT, Failure.WRONG_TARGET),
        ([("a", CLICK)], Termination.FINISHED, Failure.WRONG_TARGET),
    ],
)
def test_each_failure_has_one_class(
    moves: list[tuple[str, Action | None]], end: Termination, expected: Failure
) -> None:
    assert failure(trajectory(moves, end)) is expected
    assert failure(trajectory(moves, end, success=True)) is None


def test_outcome_keeps_what_counts() -> None:
    outcome = Outcome.of(trajectory([("a", CLICK)] * 2, Termination.ENVIRONMENT, success=True), attempts=3)
    assert (outcome.steps, outcome.seconds, outcome.attempts, outcome.failure) == (2, 2.5, 3, None)
    assert replace(outcome, success=False).task == Task("s", "n", 1)


def test_a_rate_of_no_episodes_knows_nothing() -> None:
    nothing = clustered_rate([])
    assert (nothing.mean, nothing.low, nothing.high) == (0.0, 0.0, 1.0)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
def test_pass_curve_starts_at_success_and_rises(instances: list[list[bool]]) -> None:
    curve = pass_curve(instances)
    assert list(curve) == [1, 2, 3]
    assert curve[1].mean == pytest.approx(sum(map(sum, instances)) / (3 * len(instances)))
    assert curve[1].mean <= curve[2].mean <= curve[3].mean
    for estimate in curve.values():
        assert 0.0 <= estimate.low <= estimate.mean + 1e-9
        assert estimate.mean - 1e-9 <= estimate.high <= 1.0


def test_compare_pairs_instances() -> None:
    a = {"x": [True, True], "y": [True, False], "z": [False, False], "w": [True, True]}
    b = {"w": [True, True], "z": [True, False], "y": [False, False], "x": [False, False]}
    both = compare(a, b)
    # differences 1, 1/2, -1/2, 0
    assert both.difference.mean == pytest.approx(0.25)
    assert (both.better, both.worse, both.p_value) == (2, 1, 1.0)
    back = compare(b, a)
    assert (back.difference.mean, back.better, back.worse) == (pytest.approx(-0.25), 1, 2)
    with pytest.raises(ValueError, match=r"only instances that both have can be paired: \['w'\]"):
        compare(a, {name: b[name] for name in "xyz"})


def test_nothing_evaluated_has_no_curve() -> None:
    assert pass_curve([]) == {}


# ---- quotas ----


def test_a_task_with_one_instance_is_tried_on_it_alone() -> None:
    quota = Quota("s", ["one", "many"], (5, 7), wanted=3, most_attempts=4, samples=1, single=["one"])
    begun = []
    while order := quota.next():
        begun.append((order[0].name, order[0].seed, order[1]))
        with quota.finishing(order[0].name, False) as keep:
            assert not keep
    assert [one for one in begun if one[0] == "one"] == [("one", 0, number) for number in (1, 2, 3, 4)]
    assert [one for one in begun if one[0] == "many"] == [("many", 5, 1), ("many", 6, 1)], "it has two seeds"
    assert quota.done


def test_a_task_that_is_given_up_is_begun_no_more() -> None:
    quota = Quota("s", ["a", "b"], (0, 99), wanted=2, most_attempts=9, samples=1)
    while order := quota.next():
        if order[0].name == "a":
            quota.given_up("a", "the address is dead", task=True)
        else:
            with quota.finishing("b", True):
                pass
    a, b = quota.tallies["a"], quota.tallies["b"]
    assert quota.done and (a.begun, a.given_up, a.why) == (1, 1, "the address is dead") and b.kept == 2


def test_a_success_counts_once_it_is_stored_and_holds_its_place_until_then() -> None:
    quota = Quota("s", ["a"], (0, 99), wanted=1, most_attempts=2, samples=1)
    assert quota.next()
    with pytest.raises(OSError, match="full"), quota.finishing("a", True) as keep:
        assert keep
        with quota.finishing("a", True) as another:
            assert not another, "one is wanted, and one is being stored"
        raise OSError("full")
    tally = quota.tallies["a"]
    assert (tally.finished, tally.successes, tally.kept, tally.storing) == (1, 1, 0, 0)
    with quota.finishing("a", True) as keep:
        assert keep
    assert (tally.finished, tally.successes, tally.kept) == (2, 2, 1) and quota.done


def test_one_failure_changes_an_interval_little() -> None:
    perfect, almost = clustered_rate([[True] * 2] * 20), clustered_rate([[True] * 2] * 19 + [[True, False]])
    assert (perfect.low, perfect.high) == pytest.approx((0.839, 1.0), abs=1e-3)
    assert (almost.low, almost.high) == pytest.approx((0.871, 0.996), abs=1e-3)
    alone = clustered_rate([[True, False, True, True]])
    assert (alone.mean, (alone.low, alone.high)) == (0.75, wilson(3, 4))
