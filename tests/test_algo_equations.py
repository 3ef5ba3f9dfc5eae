"""Every equation of dart.algo against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from dart.algo.importance import truncated_importance_weight  # noqa: E402
from dart.algo.logprobs import log_distribution, token_entropy, token_logprobs  # noqa: E402
from dart.algo.loss import (  # noqa: E402
    Totals,
    clipped_surrogate,
    k3_kl,
    policy_loss,
    probability_ratio,
    step_mean,
)


def close(actual: Any, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def logs(*probabilities: float) -> Any:
    return torch.tensor(probabilities).log()


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


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[0.0, 10.0]], dtype=torch.bfloat16)
    result = log_distribution(logits, 1.0)
    assert result.dtype == torch.float32
    close(result[0], [-10 - math.log1p(math.exp(-10)), -math.log1p(math.exp(-10))])


def test_importance_weight_is_the_ratio_cut_at_the_cap() -> None:
    old, behaviour = logs(0.5, 0.2, 0.3), logs(0.25, 0.4, 0.3)
    close(truncated_importance_weight(old, behaviour, 1.0), [1.0, 0.5, 1.0])
    close(truncated_importance_weight(old, behaviour, 1.5), [1.5, 0.5, 1.0])
    close(truncated_importance_weight(old, behaviour, 10.0), [2.0, 0.5, 1.0])


@pytest.mark.parametrize("wrong", [[math.nan, -1.0], [-math.inf, -1.0], [-1.0, math.inf], [0.5, -1.0], [-1.0], []])
def test_missing_or_misaligned_behaviour_is_an_error(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="behaviour"):
        truncated_importance_weight(torch.tensor([-1.0, -2.0]), torch.tensor(wrong), 1.0)


def test_importance_weight_carries_no_gradient() -> None:
    old = logs(0.5).requires_grad_()
    assert not truncated_importance_weight(old, logs(0.25), 1.0).requires_grad


def test_clip_higher() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.1, 1.5, 1.5])
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0, -1.0])
    # Falling ratios are cut for bad actions, rising ones for good actions; never the other way round.
    close(clipped_surrogate(ratio, advantages, 0.2, 0.28), [0.5, -0.8, 2.2, 1.28, -1.5])


def test_ratio() -> None:
    close(probability_ratio(logs(0.3, 0.1), logs(0.1, 0.2)), [3.0, 0.5])


def test_k3() -> None:
    # r = ref / new = 1/2: 1/2 + ln 2 − 1; r = 2: 2 − ln 2 − 1; r = 1: 0.
    close(k3_kl(logs(0.4, 0.2, 0.3), logs(0.2, 0.4, 0.3)), [math.log(2) - 0.5, 1 - math.log(2), 0.0])


def test_each_step_counts_once_however_long() -> None:
    values = torch.tensor([1.0, 1.0, 1.0, 1.0, 6.0])
    index, lengths = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([4, 1])
    assert float(step_mean(values, index, lengths, 2)) == pytest.approx((1 + 6) / 2)
    assert float(step_mean(values, index, lengths, 10)) == pytest.approx((1 + 6) / 10)


def test_step_mean_refuses_a_step_that_is_not_whole() -> None:
    with pytest.raises(ValueError, match="step_lengths"):
        step_mean(torch.ones(2), torch.tensor([0, 0]), torch.tensor([3]), 1)


def arguments(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "new": logs(0.3, 0.2, 0.5), "old": logs(0.2, 0.2, 0.5), "weight": torch.tensor([1.0, 0.5, 1.0]),
        "advantages": torch.tensor([1.0, 1.0, -2.0]), "step_index": torch.tensor([0, 0, 1]),
        "step_lengths": torch.tensor([2, 1]), "totals": Totals(steps=2, tokens=3),
        "clip_low": 0.2, "clip_high": 0.28, "importance_cap": 1.0,
    }  # fmt: skip
    return values | changes


def test_policy_loss_by_hand() -> None:
    terms = policy_loss(**arguments())
    # Ratios 1.5 (cut to 1.28), 1, 1; steps: (1·1.28 + 0.5·1)/2 and −2; J is their mean.
    assert float(terms.loss) == pytest.approx(-((1.28 + 0.5) / 2 - 2) / 2)
    metrics = {name: float(value) for name, value in terms.metrics.items()}
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx(3.5 / 3)
    assert metrics["importance_weight"] == pytest.approx(2.5 / 3)
    assert metrics["importance_truncated"] == pytest.approx(2 / 3)
    assert metrics["kl_old"] == pytest.approx((1.5 - math.log(1.5) - 1) / 3)


def test_kl_is_not_weighted_by_importance() -> None:
    reference = logs(0.3, 0.4, 0.5)
    terms = policy_loss(**arguments(kl_coefficient=0.1, reference=reference))
    kl = 1 - math.log(2)
    assert float(terms.loss) == pytest.approx(-((1.28 + 0.5 - 0.1 * kl) / 2 - 2) / 2)
    assert float(terms.metrics["kl_reference"]) == pytest.approx(kl / 3)


def test_kl_without_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference"):
        policy_loss(**arguments(kl_coefficient=0.1))


def test_gradient_at_the_first_step_is_the_policy_gradient() -> None:
    new = logs(0.2, 0.2, 0.5).requires_grad_()
    policy_loss(**arguments(new=new, old=new.detach())).loss.backward()
    # −w · A / (T_step · |D|)
    close(new.grad, [-1 / 4, -0.5 / 4, 2 / 2])


def test_parts_add_up_to_the_whole() -> None:
    whole = policy_loss(**arguments())
    first = {n: v[:2] for n, v in arguments().items() if n in ("new", "old", "weight", "advantages", "step_index")}
    second = {n: v[2:] for n, v in arguments().items() if n in ("new", "old", "weight", "advantages")}
    parts = [
        policy_loss(**arguments(**first, step_lengths=torch.tensor([2]))),
        policy_loss(**arguments(**second, step_index=torch.tensor([0]), step_lengths=torch.tensor([1]))),
    ]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss))
    for name, value in whole.metrics.items():
        assert float(sum(part.metrics[name] for part in parts)) == pytest.approx(float(value))


@pytest.mark.parametrize("name", ["new", "old", "weight", "advantages"])
def test_shapes_are_checked_before_broadcasting(name: str) -> None:
    with pytest.raises(ValueError, match=r"misaligned|flat"):
        policy_loss(**arguments(**{name: torch.tensor([-1.0])}))
    with pytest.raises(ValueError, match="flat"):
        policy_loss(**arguments(**{name: torch.ones(3, 1)}))
