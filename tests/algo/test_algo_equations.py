"""Every equation of dart.algo against values worked out by hand, and every gradient against differences."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from loss_samples import close, double, gradient, logs, recipe, sequence_ratio, steps  # noqa: E402

from dart.algo import importance  # noqa: E402
from dart.algo.aggregation import constant_mean, step_mean, token_mean  # noqa: E402
from dart.algo.kl import ESTIMATORS, k1, k2, k3  # noqa: E402
from dart.algo.logprobs import log_distribution, token_entropy, token_logprobs  # noqa: E402
from dart.algo.loss import policy_loss  # noqa: E402
from dart.algo.objectives import (  # noqa: E402
    clipped_importance,
    clipped_surrogate,
)
from dart.algo.ratio import sequence_token_ratio, token_ratio  # noqa: E402
from dart.algo.selection import entropy_thresholds, high_entropy_steps  # noqa: E402
from dart.algo.steps import Steps, Totals  # noqa: E402


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    # softmax of (ln 1, ln 2, ln 5) is 1/8, 2/8, 5/8; at temperature 1/2 the odds are squared: 1, 4, 25 of 30.
    logits = torch.tensor([[1.0, 2.0, 5.0]] * 2).log()
    chosen = torch.tensor([1, 2])
    close(token_logprobs(log_distribution(logits, 1.0), chosen), [math.log(2 / 8), math.log(5 / 8)])
    close(token_logprobs(log_distribution(logits, 0.5), chosen), [math.log(4 / 30), math.log(25 / 30)])


def test_banned_columns_have_probability_zero_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().requires_grad_()
    distribution = log_distribution(logits, 1.0, torch.tensor([2]))
    close(token_logprobs(distribution, torch.tensor([1])), [math.log(2 / 3)])
    token_logprobs(distribution, torch.tensor([1])).sum().backward()
    # d log p1 / dz = onehot(1) − p
    close(logits.grad[0], [-1 / 3, 1 / 3, 0.0])


def test_entropy_is_over_the_whole_vocabulary() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1e-30]]).log()
    close(token_entropy(log_distribution(logits, 1.0)), [math.log(4), 1.5 * math.log(2)])
    banned = torch.tensor([0, 1])
    close(token_entropy(log_distribution(logits, 1.0, banned)), [math.log(2), 0.0])


def test_entropy_has_a_gradient_only_when_asked_for() -> None:
    logits = torch.tensor([[1.0, 3.0, 4.0]]).log().requires_grad_()
    banned = torch.tensor([2])
    assert not token_entropy(log_distribution(logits, 1.0, banned)).requires_grad
    entropy = token_entropy(log_distribution(logits, 1.0, banned), gradient=True)
    # p = (1/4, 3/4): dH/dz_i = −p_i (ln p_i + H), and H = ¼ ln 4 + ¾ ln 4/3 = 0.562335; the banned one gets 0.
    close(entropy, [0.562335])
    expected = [-0.25 * (math.log(0.25) + 0.562335), -0.75 * (math.log(0.75) + 0.562335), 0.0]
    close(gradient(entropy.sum(), logits)[0], expected)


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[0.0, 10.0]], dtype=torch.bfloat16)
    result = log_distribution(logits, 1.0)
    assert result.dtype == torch.float32
    close(result[0], [-10 - math.log1p(math.exp(-10)), -math.log1p(math.exp(-10))])


def test_truncated_weight_is_the_ratio_cut_at_the_cap() -> None:
    ratio = importance.behaviour_ratio(logs(0.5, 0.2, 0.3), logs(0.25, 0.4, 0.3))
    close(ratio, [2.0, 0.5, 1.0])
    close(importance.truncated(ratio, 1.0), [1.0, 0.5, 1.0])
    close(importance.truncated(ratio, 1.5), [1.5, 0.5, 1.0])
    close(importance.truncated(ratio, 10.0), [2.0, 0.5, 1.0])


def test_masked_weight_is_the_ratio_within_bounds_and_0_outside() -> None:
    ratio = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1])
    close(importance.masked(ratio, 0.5, 2.0), [0.0, 0.5, 1.0, 2.0, 0.0])
    with pytest.raises(ValueError, match="floor"):
        importance.masked(ratio, 2.0, 2.0)


def test_importance_of_a_sequence_is_the_product_over_its_tokens() -> None:
    # Steps of 2 and 1 tokens: 2 · ½ · … : (0.5/0.25) · (0.1/0.4) = 0.5, and 0.3/0.1 = 3.
    ratio = importance.sequence_behaviour_ratio(logs(0.5, 0.1, 0.3), logs(0.25, 0.4, 0.1), steps(2, 1))
    close(ratio, [0.5, 0.5, 3.0])


def test_the_ratio_of_a_sequence_may_overflow_its_weight_may_not() -> None:
    ratio = importance.sequence_behaviour_ratio(torch.full((9,), -1.0), torch.full((9,), -20.0), steps(9))
    close(importance.truncated(ratio, 1.0), [1.0] * 9)
    close(importance.masked(ratio, 0.5, 2.0), [0.0] * 9)


@pytest.mark.parametrize("wrong", [[math.nan, -1.0], [-math.inf, -1.0], [-1.0, math.inf], [0.5, -1.0], [-1.0], []])
def test_missing_or_misaligned_behaviour_is_an_error(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="behaviour"):
        importance.behaviour_ratio(torch.tensor([-1.0, -2.0]), torch.tensor(wrong))
    with pytest.raises(ValueError, match="behaviour"):
        importance.sequence_behaviour_ratio(torch.tensor([-1.0, -2.0]), torch.tensor(wrong), steps(2))


def test_importance_weight_carries_no_gradient() -> None:
    old = logs(0.5).requires_grad_()
    assert not importance.truncated(importance.behaviour_ratio(old, logs(0.25)), 1.0).requires_grad
    assert not importance.sequence_behaviour_ratio(old, logs(0.25), steps(1)).requires_grad


def test_clip_higher() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.1, 1.5, 1.5])
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0])
    # Falling ratios are cut for bad actions, rising ones for good actions; never the other way round.
    close(clipped_surrogate(ratio, advantages, 0.2, 0.28), [0.5, -0.8, 2.2, 1.28, -1.5])


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    new = logs(0.2, 0.5, 0.1).requires_grad_()
    ratio, advantages = torch.tensor([0.5, 1.5, 1.1]), torch.tensor([1.0, 2.0, -1.0])
    value = clipped_importance(new, ratio, advantages, 0.2, 0.28)
    # sg[clip(ρ)] A ln π: 0.8 · 1 · ln 0.2, 1.28 · 2 · ln 0.5, 1.1 · −1 · ln 0.1; the factors of ln π are the gradient.
    close(value, [0.8 * math.log(0.2), 2.56 * math.log(0.5), -1.1 * math.log(0.1)])
    close(gradient(value.sum(), new), [0.8, 2.56, -1.1])
    # ε_low = 1: no lower bound.
    close(gradient(clipped_importance(new, ratio, advantages, 1.0, 0.28).sum(), new), [0.5, 2.56, -1.1])


def test_token_ratio() -> None:
    close(token_ratio(logs(0.3, 0.1), logs(0.1, 0.2)), [3.0, 0.5])


def test_sequence_ratio_is_the_geometric_mean_of_the_tokens() -> None:
    new, old = logs(0.4, 0.1, 0.3).requires_grad_(), logs(0.1, 0.1, 0.1)
    # Steps of 2 and 1 tokens: √(4 · 1) = 2, and 3.
    whole, by_token = sequence_ratio(new, old, steps(2, 1)), sequence_token_ratio(new, old, steps(2, 1))
    close(whole, [2.0, 2.0, 3.0])
    close(by_token, [2.0, 2.0, 3.0])
    # The first token's entry alone: s/|y| = 1 to both of its step's tokens; with GSPO-token s = 2 to itself.
    close(gradient(whole[0], new), [1.0, 1.0, 0.0])
    close(gradient(sequence_token_ratio(new, old, steps(2, 1))[0], new), [2.0, 0.0, 0.0])
    # Summed over the step they are the same.
    close(gradient(sequence_ratio(new, old, steps(2, 1)).sum(), new), [2.0, 2.0, 3.0])
    close(gradient(by_token.sum(), new), [2.0, 2.0, 3.0])


def test_kl_estimators() -> None:
    new, reference = logs(0.4, 0.2, 0.3), logs(0.2, 0.4, 0.3)
    two = math.log(2)
    close(k1(new, reference), [two, -two, 0.0])
    close(k2(new, reference), [two**2 / 2, two**2 / 2, 0.0])
    # r = ref / new = 1/2: 1/2 + ln 2 − 1; r = 2: 2 − ln 2 − 1; r = 1: 0.
    close(k3(new, reference), [two - 0.5, 1 - two, 0.0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_kl_estimators_are_on_average(name: str) -> None:
    """Over a ~ π exactly, a policy of 5 tokens: the mean of the value, and of the gradient, against the KL's own."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=draw, dtype=torch.float64).log_softmax(0)
    new = logits.log_softmax(0)
    values = ESTIMATORS[name](new, reference)
    reverse = (new.exp() * (new - reference)).sum()
    forward = (reference.exp() * (reference - new)).sum()
    mean, mean_gradient = (new.exp() * values).sum(), gradient((new.exp().detach() * values).sum(), logits)
    expected = {"k1": torch.zeros(5).double(), "k2": gradient(reverse, logits), "k3": gradient(forward, logits)}
    torch.testing.assert_close(mean_gradient, expected[name], rtol=1e-12, atol=1e-12)
    assert name == "k2" or float(mean.detach()) == pytest.approx(float(reverse.detach()), rel=1e-12)


VALUES = [1.0, 1.0, 1.0, 1.0, 6.0]


def test_each_step_counts_once_however_long() -> None:
    values = torch.tensor(VALUES)
    assert float(step_mean(values, steps(4, 1), Totals(2, 5, 5))) == pytest.approx((1 + 6) / 2)
    assert float(step_mean(values, steps(4, 1), Totals(10, 50, 5))) == pytest.approx((1 + 6) / 10)


def test_each_token_counts_once() -> None:
    values = torch.tensor(VALUES)
    assert float(token_mean(values, steps(4, 1), Totals(2, 5, 5))) == pytest.approx(10 / 5)
    assert float(token_mean(values, steps(4, 1), Totals(10, 50, 5))) == pytest.approx(10 / 50)


def test_each_token_counts_the_same_in_every_batch() -> None:
    values = torch.tensor(VALUES)
    assert float(constant_mean(values, steps(4, 1), Totals(2, 5, 5), 8)) == pytest.approx((4 / 8 + 6 / 8) / 2)
    with pytest.raises(ValueError, match="length is 0"):
        constant_mean(values, steps(4, 1), Totals(2, 5, 5), 0)


def test_more_than_the_whole_batch_is_refused() -> None:
    for totals in (Totals(1, 5, 5), Totals(2, 4, 4)):
        with pytest.raises(ValueError, match="whole batch"):
            step_mean(torch.tensor(VALUES), steps(4, 1), totals)


@pytest.mark.parametrize(("index", "lengths"), [([0, 0], [3]), ([0, 1], [1]), ([0], [1, 0]), ([0, 2], [1, 1])])
def test_steps_that_are_not_whole_are_refused(index: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="step"):
        Steps(torch.tensor(index), torch.tensor(lengths))


def test_sums_and_means_of_steps() -> None:
    values = torch.tensor(VALUES)
    close(steps(4, 1).sums(values), [4.0, 6.0])
    close(steps(4, 1).means(values), [1.0, 6.0])
    close(steps(4, 1).spread(torch.tensor([1.0, 2.0])), [1.0, 1.0, 1.0, 1.0, 2.0])


def test_the_threshold_is_the_quantile_of_each_group() -> None:
    entropies = torch.tensor([5.0, 1.0, 2.0, 4.0, 3.0, 0.5, 0.1])
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 2])
    # Position 0.2 · 4 = 0.8 of (1, 2, 3, 4, 5), so 1.8; position 0.25 · 4 is 2 itself; one value is its own quantile.
    close(entropy_thresholds(entropies, groups, 0.2), [1.8, 0.5, 0.1])
    assert high_entropy_steps(entropies, groups, 0.2).tolist() == [True, False, True, True, True, True, True]
    assert high_entropy_steps(entropies, groups, 0.25).tolist() == [True, False, True, True, True, True, True]
    assert high_entropy_steps(entropies, groups, 0.5).tolist() == [True, False, False, True, True, True, True]
    assert high_entropy_steps(entropies, groups, 0.0).all()


def test_ties_stay_and_of_each_group_something_stays() -> None:
    alike = torch.tensor([2.0, 2.0, 2.0, 1.0])
    assert high_entropy_steps(alike, torch.tensor([0, 0, 0, 0]), 0.9).tolist() == [True, True, True, False]
    draw = torch.Generator().manual_seed(2)
    for count in range(1, 40):
        entropies = torch.rand(count, generator=draw, dtype=torch.float64)
        for quantile in (0.1, 0.2, 0.5, 0.999):
            kept = high_entropy_steps(entropies, torch.zeros(count, dtype=torch.int64), quantile)
            assert kept[entropies.argmax()]
            # Those below a quantile between ranks are exactly the ones of lower rank.
            assert int((~kept).sum()) in (math.ceil(quantile * (count - 1)), math.floor(quantile * (count - 1)) + 1)
    assert high_entropy_steps(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.2).tolist() == []
    with pytest.raises(ValueError, match="finite"):
        high_entropy_steps(torch.tensor([math.nan]), torch.tensor([0]), 0.2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: token_logprobs(log_distribution(x.view(3, 4), 0.7, torch.tensor([3])), torch.tensor([0, 2, 1])),
        lambda x: token_entropy(log_distribution(x.view(3, 4), 0.7, torch.tensor([3])), gradient=True),
        lambda x: token_ratio(x, double(12)),
        lambda x: clipped_surrogate(x, double(12), 0.2, 0.28),
        lambda x: k1(x, double(12)),
        lambda x: k2(x, double(12)),
        lambda x: k3(x, double(12)),
        lambda x: step_mean(x.exp(), steps(5, 1, 6), Totals(3, 12, 12)),
        lambda x: token_mean(x.exp(), steps(5, 1, 6), Totals(3, 12, 12)),
        lambda x: constant_mean(x.exp(), steps(5, 1, 6), Totals(3, 12, 12), 7),
    ],
)
def test_gradients_are_those_of_differences(function: Any) -> None:
    x = double(12, seed=1).requires_grad_()
    assert function(x).dtype == torch.float64
    assert torch.autograd.gradcheck(function, (x,))


def test_the_whole_loss_has_the_gradient_of_differences() -> None:
    old, advantages, reference = double(12) - 3, double(12, seed=2), double(12, seed=3) - 3

    def loss(new: Any, entropy: Any) -> Any:
        return policy_loss(
            recipe(kl_coefficient=0.3, entropy_coefficient=0.2, importance_cap=1.3), new=new, old=old,
            behaviour=old + 0.3 * double(12, seed=4), advantages=advantages, steps=steps(5, 1, 6),
            totals=Totals(4, 15, 12), reference=reference, entropy=entropy,
        ).loss  # fmt: skip

    new = (old + 0.2 * double(12, seed=1)).requires_grad_()
    assert torch.autograd.gradcheck(loss, (new, double(12, seed=5).abs().requires_grad_()))
