"""The comparison of gradients with and without high-entropy selection, on a small scale."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dart.errors import UserError

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


def test_seeds_without_signal_are_left_out() -> None:
    names = (entropy.SELECTED, entropy.RANDOM, entropy.ALL)
    rows = [
        dict(zip(names, (Gradients(noise, 1.0, 1.0, 0.1) for noise in noises), strict=True))
        for noises in ((2.0, 4.0, 2.0), (float("inf"), 4.0, 4.0), (2.0, 8.0, 2.0))
    ]
    assert list(entropy.with_signal(rows)) == [0, 2]
    found = entropy.compared(rows)
    at_random, none_out = found[entropy.RANDOM], found[entropy.ALL]
    assert at_random is not None and at_random.difference.mean == pytest.approx(-math.log(2.0 * 4.0) / 2)
    assert none_out is not None and none_out.difference.mean == 0.0 and none_out.difference.n == 2


def test_selection_is_compared_with_as_many_steps_at_random(tmp_path: Path) -> None:
    """It leaves out none of the steps that decide; chance leaves out as many of them as of the others."""
    saved = [
        [replace(one, task=task, entropy=one.entropy + n / 1e6) for n, one in enumerate(group())] for task in (7, 8)
    ]
    policy = tmp_path / "policy"
    entropy.trainer(entropy.MODEL, 0.0).save_checkpoint(policy)
    found = entropy.measured(str(policy), saved, random.Random(0))
    chosen, chance, every = (found[name] for name in (entropy.SELECTED, entropy.RANDOM, entropy.ALL))
    assert chosen.kept_steps == chance.kept_steps == pytest.approx(28 / 36) and every.kept_steps == 1.0
    assert chosen.kept_deciding_steps == every.kept_deciding_steps == 1.0 and chance.kept_deciding_steps < 1.0


def test_a_policy_that_cannot_be_measured_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="after 1 updates of imitation 0% of the steps"):
        entropy.imitate(entropy.MODEL, tmp_path / "policy", random.Random(0), most=1)
    monkeypatch.setattr(entropy, "MOST_GROUPS", 3)
    monkeypatch.setattr(entropy, "sample", lambda model, asked, rollouts: group())
    monkeypatch.setattr(entropy, "ROLLOUTS", 3)
    with pytest.raises(UserError, match="of 3 groups fewer than 4 have roll-outs that differ"):
        entropy.batch(torch.nn.Identity(), random.Random(0), dict.fromkeys(entropy.DECISIONS, "z"))


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
