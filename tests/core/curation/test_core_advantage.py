"""What a group's rewards become."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import sqrt
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_samples import trajectory

from dart.core.curation.advantage import EQUAL, anchored_advantages, group_advantages, overlong_penalty
from dart.core.curation.judging import Judging
from dart.core.curation.orders import Order
from dart.core.types import Image, Task, Trajectory

Rewards = list[float]
States = list[list[str]]


def test_steps_from_one_state_are_compared_with_each_other() -> None:
    # With gamma 0.5 the returns are (1/4, 1/2, 1), (0, 0, 0) and (1/2, 1).
    states = [["a", "b", "c"], ["a", "b", "b"], ["a", "d"]]
    # From a: 1/4, 0, 1/2 have mean 1/4 and std sqrt(1/24). From b: 1/2, 0, 0 have mean 1/6 and std sqrt(1/18).
    assert anchored_advantages([1, 0, 1], states, gamma=0.5) == [
        pytest.approx([0, sqrt(2), 0]),
        pytest.approx([-sqrt(1.5), -sqrt(0.5), -sqrt(0.5)]),
        pytest.approx([sqrt(1.5), 0]),
    ]
    assert anchored_advantages([1, 0, 1], states, gamma=0.5, std_normalise=False) == [
        pytest.approx([0, 1 / 3, 0]),
        pytest.approx([-1 / 4, -1 / 6, -1 / 6]),
        pytest.approx([1 / 4, 0]),
    ]
    with pytest.raises(ValueError, match="2 rewards and states of 1 trajectories"):
        anchored_advantages([1, 0], [["a"]], gamma=0.5)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Rewards, States]:
    states = draw(st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=6), min_size=2, max_size=6))
    rewards = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return draw(st.lists(rewards, min_size=len(states), max_size=len(states))), states


@settings(deadline=None)  # a busy machine is no error
@given(groups(), st.sampled_from([0.5, 0.95, 1.0]), st.booleans())
def test_every_step_has_its_return_relative_to_its_state(
    group: tuple[Rewards, States], gamma: float, std: bool
) -> None:
    rewards, states = group
    made = anchored_advantages(rewards, states, gamma=gamma, std_normalise=std)
    returns = [[r * gamma ** (len(s) - 1 - t) for t in range(len(s))] for r, s in zip(rewards, states, strict=True)]
    by_state: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for own in zip(states, returns, made, strict=True):
        for state, value, advantage in zip(*own, strict=True):
            by_state[state].append((value, advantage))
    for pairs in by_state.values():
        values = [value for value, _ in pairs]
        assert sum(advantage for _, advantage in pairs) == pytest.approx(0, abs=1e-9)
        if max(values) - min(values) <= EQUAL:
            assert not any(advantage for _, advantage in pairs)
            continue
        divisor = pstdev(values) if std else 1.0
        assert [advantage for _, advantage in pairs] == pytest.approx([(v - fmean(values)) / divisor for v in values])


@settings(deadline=None)  # a busy machine is no error
@given(groups(), st.sampled_from([0.125, 0.5, 4.0]), st.sampled_from([-1.0, 0.5, 2.0]))
def test_rewards_may_be_scaled_and_without_a_discount_shifted(
    group: tuple[Rewards, States], scale: float, shift: float
) -> None:
    rewards, states = group
    for gamma in (0.5, 1.0):
        made = anchored_advantages(rewards, states, gamma=gamma)
        scaled = anchored_advantages([scale * r for r in rewards], states, gamma=gamma)
        assert scaled == [pytest.approx(own) for own in made]
    shifted = anchored_advantages([r + shift for r in rewards], states, gamma=1.0)
    assert shifted == [pytest.approx(own) for own in made]


@settings(deadline=None)  # a busy machine is no error
@given(groups())
def test_where_all_steps_are_from_one_state_and_nothing_is_discounted_it_is_the_group_s(
    group: tuple[Rewards, States],
) -> None:
    rewards, states = group
    whole = group_advantages(rewards, [len(own) for own in states])
    same = anchored_advantages(rewards, [["here"] * len(own) for own in states], gamma=1.0)
    assert same == [pytest.approx([a] * len(own)) for a, own in zip(whole, states, strict=True)]


def rolled_out(name: str, reward: float, *screens: str) -> Trajectory:
    """A trajectory that acted on these screens, each with the first screen before it in its prompt."""
    images = [Image.of(screen.encode(), "image/png", 2, 2) for screen in screens]
    one = trajectory(Order(name, "g", Task("s", "n", 1), 9), reward)
    made = tuple(replace(one.steps[0], index=n, images=(images[0], image)) for n, image in enumerate(images))
    return replace(one, steps=made)


def test_a_step_s_advantage_is_its_trajectory_s_plus_omega_times_its_own() -> None:
    group = [rolled_out("1", 1, "a", "b", "c"), rolled_out("2", 0, "a", "b", "b"), rolled_out("3", 1, "a", "d")]
    # Over steps, rewards have mean 5/8; over trajectories, 2/3.
    released = Judging(std_normalise=False, step_weight=2.0, gamma=0.5).decide(group)
    assert released.release
    assert released.advantages == (
        pytest.approx((3 / 8, 3 / 8 + 2 / 3, 3 / 8)),
        pytest.approx((-5 / 8 - 1 / 2, -5 / 8 - 1 / 3, -5 / 8 - 1 / 3)),
        pytest.approx((3 / 8 + 1 / 2, 3 / 8)),
    )
    by_trajectory = Judging(level="trajectory", std_normalise=False, step_weight=2.0, gamma=0.5).decide(group)
    assert by_trajectory.advantages[2] == pytest.approx((1 / 3 + 1 / 2, 1 / 3))
    assert Judging(std_normalise=False).decide(group).advantages[2] == (3 / 8, 3 / 8)


def test_successes_of_different_lengths_are_dropped_all_the_same() -> None:
    group = [rolled_out("1", 1, "a", "b", "c"), rolled_out("2", 1, "a")]
    decision = Judging(step_weight=1.0, gamma=0.5).decide(group)
    assert (decision.release, decision.cause) == (False, "all succeeded")


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    # L_max 512, L_cache 128, so it starts at 384: (384 - 416) / 128 = -0.25, (384 - 480) / 128 = -0.75.
    [(1, 0.0), (384, 0.0), (416, -0.25), (480, -0.75), (512, -1.0), (513, -1.0), (10_000, -1.0)],
)
def test_overlong_responses_are_punished_softly(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, 512, 128) == penalty


def test_without_a_buffer_only_what_is_beyond_the_limit_is_punished() -> None:
    assert [overlong_penalty(tokens, 512, 0) for tokens in (511, 512, 513)] == [0.0, 0.0, -1.0]


def test_the_buffer_may_be_the_whole_limit() -> None:
    assert [overlong_penalty(tokens, 4, 4) for tokens in (0, 1, 4)] == [0.0, -0.25, -1.0]


@pytest.mark.parametrize("buffer", [-1, 513])
def test_a_buffer_that_is_no_part_of_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="from 0 to the limit, 512"):
        overlong_penalty(1, 512, buffer)
