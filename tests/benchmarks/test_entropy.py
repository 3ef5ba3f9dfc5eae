"""The comparison of gradients with and without high-entropy selection, on a small scale."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from benchmarks.learning import entropy  # noqa: E402
from benchmarks.learning.entropy import Gradients, Step  # noqa: E402


def step(place: int, letter: str, rollout: int, advantage: float, h: float) -> Step:
    response = [*entropy.tokens(entropy.template(place, letter)), entropy.END]
    logprobs = [-0.001] * len(response)
    where = entropy.decision(place)
    if where is not None:
        logprobs[where] = -1.1
    return Step(7, place, rollout, entropy.prompt(7, place), response, logprobs, h, where, advantage)


def group() -> list[Step]:
    return [
        step(place, letter, rollout, 1.0 if letter == "a" else -1.0, 0.02 if place in entropy.DECISIONS else 0.001)
        for rollout, letter in enumerate("abc")
        for place in range(entropy.STEPS)
    ]


def test_the_token_that_decides_is_the_letter() -> None:
    for place in entropy.DECISIONS:
        one = step(place, "b", 0, 1.0, 0.0)
        assert one.decides is not None and one.response[one.decides] == entropy.tokens("b")[0]
        assert 50 <= len(one.response) <= 75
    assert step(0, "b", 0, 1.0, 0.0).decides is None
    assert entropy.succeeds(step(2, "b", 0, 1.0, 0.0), {2: "b", 4: "c"})
    assert not entropy.succeeds(step(2, "a", 0, 1.0, 0.0), {2: "b", 4: "c"})


def test_the_push_is_mostly_on_decisions() -> None:
    deciding, every = entropy.push(group())
    # 6 tokens of probability 1/3 against 1,000 or so of 0.999, each divided by its step's length.
    assert 0.7 < deciding / every < 0.85
    kept = entropy.selected([replace(one, entropy=one.entropy + n / 1e6) for n, one in enumerate(group())], 0.2)
    assert len(kept) == 14, "4 of 18 are below the quantile"
    assert sum(one.decides is not None for one in kept) == 6


def test_noise_is_variance_over_signal() -> None:
    gradients = [torch.tensor([1.0, 0.5]), torch.tensor([1.0, -0.5])] * 50
    assert entropy.noise(gradients) == pytest.approx(0.25, rel=0.02)
    assert entropy.noise([torch.tensor([1.0]), torch.tensor([-1.0])]) == float("inf")


def test_seeds_without_signal_are_left_out_and_counted() -> None:
    rows = [tuple(Gradients(noise, 1.0, 1.0, 0.1) for noise in pair) for pair in ((2.0, 4.0), (float("inf"), 4.0))]
    found = entropy.compared(rows)
    assert found["log_noise"] is not None and found["log_noise"].difference.n == 1
    assert found["push_on_decisions"] is not None and found["push_on_decisions"].difference.n == 2
    assert entropy.without_signal(rows) == 1


def test_the_trainer_gives_both_gradients_and_keeps_its_weights() -> None:
    learner = entropy.trainer(entropy.MODEL, 0.2)
    before = [parameter.clone() for parameter in learner.parameters]
    first, share = entropy.gradient(learner, group())
    again, _ = entropy.gradient(learner, group())
    assert torch.equal(first, again), "the same batch at the same weights"
    assert all(torch.equal(old, new) for old, new in zip(before, learner.parameters, strict=True))
    assert 0.5 < share < 1.0
    whole, every = entropy.gradient(entropy.trainer(entropy.MODEL, 0.0), group())
    assert every == 1.0 and not torch.equal(whole, first)


def test_sampled_steps_are_scored_as_the_trainer_scores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the steps that are called selected here are those that the trainer selects."""
    monkeypatch.setattr(entropy, "ROUTINE", "Thought: on.")
    monkeypatch.setattr(entropy, "DECIDE", "Thought: {0}.")
    torch.manual_seed(0)
    learner = entropy.trainer(entropy.MODEL, 0.2)
    steps = entropy.sample(learner.model, [(7, place) for place in range(5)], range(5))
    steps = [replace(one, advantage=1.0 if one.rollout else -1.0) for one in steps]
    _, share = entropy.gradient(learner, steps)
    assert share == pytest.approx(len(entropy.selected(steps, 0.2)) / len(steps))
    assert all(len(one.logprobs) == len(one.response) for one in steps)
