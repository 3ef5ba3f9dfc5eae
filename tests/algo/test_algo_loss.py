"""The whole loss against values worked out by hand, its choices, its bounds, and losses of a user's own."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from loss_samples import arguments, close, gradient, logs, recipe, steps  # noqa: E402

from dart.algo import importance  # noqa: E402
from dart.algo.kl import ESTIMATORS, k3  # noqa: E402
from dart.algo.loss import policy_loss  # noqa: E402
from dart.algo.objectives import (  # noqa: E402
    OBJECTIVES,
    Tokens,
    find,
)
from dart.algo.ratio import RATIOS, sequence_token_ratio, token_ratio  # noqa: E402
from dart.algo.steps import Totals  # noqa: E402
from dart.config import LOSS_KINDS, Loss  # noqa: E402
from dart.workers.train.passes.settings import loss_recipe  # noqa: E402


def test_policy_loss_by_hand() -> None:
    terms = policy_loss(**arguments())
    # Ratio 1.5 is cut to 1.28, w is 1, 0.5, 1; steps: (1·1.28 + 0.5·1)/2 and −2; J is their mean.
    assert float(terms.loss) == pytest.approx(-((1.28 + 0.5) / 2 - 2) / 2)
    metrics = {name: float(value) for name, value in terms.metrics.items()}
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx(3.5 / 3)
    assert metrics["importance_weight"] == pytest.approx(2.5 / 3)
    assert metrics["importance_truncated"] == pytest.approx(1 / 3)
    assert metrics["kl_old"] == pytest.approx((1.5 - math.log(1.5) - 1) / 3)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        # The surrogates are 1.28, 1, −2, and w is 1, 0.5, 1 unless said otherwise.
        ({"aggregation": "token_mean"}, (1.28 + 0.5 - 2) / 3),
        ({"aggregation": "constant", "constant_length": 4}, ((1.28 + 0.5) / 4 - 2 / 4) / 2),
        ({"importance": "none"}, ((1.28 + 1) / 2 - 2) / 2),
        ({"importance_cap": 3.0}, ((2 * 1.28 + 0.5) / 2 - 2) / 2),
        ({"importance": "masked", "importance_floor": 0.6, "importance_cap": 2.1}, (2 * 1.28 / 2 - 2) / 2),
        # Over the first step 2 · 0.5 = 1.
        ({"importance_level": "sequence"}, ((1.28 + 1) / 2 - 2) / 2),
        # s = √1.5 = 1.224745 is not clipped; of both tokens.
        ({"ratio": "sequence"}, (1.224745 * (1 + 0.5) / 2 - 2) / 2),
        ({"ratio": "sequence", "clip_high": 0.1}, (1.1 * (1 + 0.5) / 2 - 2) / 2),
        # 1.28 · ln 0.3 and 0.5 · ln 0.2 in the first step, −2 · ln 0.5 in the second.
        ({"kind": "cispo"}, ((1.28 * math.log(0.3) + 0.5 * math.log(0.2)) / 2 - 2 * math.log(0.5)) / 2),
    ],
)
def test_choices_by_hand(choices: dict[str, Any], expected: float) -> None:
    assert float(policy_loss(**arguments(**choices)).loss) == pytest.approx(-expected, rel=1e-6)


def test_steps_that_selection_left_out_stay_in_the_denominator() -> None:
    terms = policy_loss(**arguments({"totals": Totals(steps=5, tokens=9, trained_tokens=3)}))
    assert float(terms.loss) == pytest.approx(-((1.28 + 0.5) / 2 - 2) / 5)
    assert float(terms.metrics["ratio"]) == pytest.approx(3.5 / 3)


def test_kl_is_not_weighted_by_importance() -> None:
    reference = logs(0.3, 0.4, 0.5)
    terms = policy_loss(**arguments({"reference": reference}, kl_coefficient=0.1))
    kl = 1 - math.log(2)
    assert float(terms.loss) == pytest.approx(-((1.28 + 0.5 - 0.1 * kl) / 2 - 2) / 2)
    assert float(terms.metrics["kl_reference"]) == pytest.approx(kl / 3)
    terms = policy_loss(**arguments({"reference": reference}, kl_coefficient=0.1, kl_estimator="k1"))
    assert float(terms.loss) == pytest.approx(-((1.28 + 0.5 + 0.1 * math.log(2)) / 2 - 2) / 2)


def test_entropy_is_a_bonus_and_not_weighted_either() -> None:
    entropy = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    terms = policy_loss(**arguments({"entropy": entropy}, entropy_coefficient=0.1))
    assert float(terms.loss.detach()) == pytest.approx(-((1.28 + 0.5 + 0.05 + 0.1) / 2 - 2 + 0.2) / 2)
    # −c / (T_step · |D|)
    close(gradient(terms.loss, entropy), [-0.025, -0.025, -0.05])


def test_what_a_term_needs_must_be_there() -> None:
    with pytest.raises(ValueError, match="reference"):
        policy_loss(**arguments(kl_coefficient=0.1))
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(**arguments(entropy_coefficient=0.1))


def test_gradient_at_the_first_step_is_the_policy_gradient() -> None:
    """−w · A / (T_step · |D|), with every kind and ratio: at π = π_old they are one."""
    for choices in ({}, {"ratio": "sequence"}, {"kind": "cispo"}, {"kind": "cispo", "ratio": "sequence"}):
        new = logs(0.2, 0.2, 0.5).requires_grad_()
        loss = policy_loss(**arguments({"new": new, "old": new.detach()}, **choices)).loss
        close(gradient(loss, new), [-1 / 4, -0.5 / 4, 2 / 2])


@pytest.mark.parametrize("aggregation", ["step_mean", "token_mean", "constant"])
def test_parts_add_up_to_the_whole(aggregation: str) -> None:
    whole = arguments(aggregation=aggregation, constant_length=4, ratio="sequence", importance_level="sequence")
    names = ("new", "old", "behaviour", "advantages")
    parts = [
        policy_loss(**whole | {name: whole[name][:2] for name in names} | {"steps": steps(2)}),
        policy_loss(**whole | {name: whole[name][2:] for name in names} | {"steps": steps(1)}),
    ]
    terms = policy_loss(**whole)
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(terms.loss))
    for name, value in terms.metrics.items():
        assert float(sum(part.metrics[name] for part in parts)) == pytest.approx(float(value))


@pytest.mark.parametrize("name", ["new", "old", "behaviour", "advantages"])
def test_shapes_are_checked_before_broadcasting(name: str) -> None:
    with pytest.raises(ValueError, match=r"misaligned|flat"):
        policy_loss(**arguments({name: torch.tensor([-1.0])}))
    with pytest.raises(ValueError, match="flat"):
        policy_loss(**arguments({name: torch.ones(3, 1)}))


def test_the_configuration_names_what_there_is() -> None:
    def choices(field: str) -> set[str]:
        return set(Loss.model_fields[field].annotation.__args__)

    assert set(LOSS_KINDS) == set(OBJECTIVES)
    assert choices("ratio") == set(RATIOS)
    assert choices("kl_estimator") == set(ESTIMATORS)
    for aggregation in choices("aggregation"):
        for kind in choices("importance"):
            for level in choices("importance_level"):
                changes = {"aggregation": aggregation, "importance": kind, "importance_level": level}
                policy_loss(**arguments(constant_length=4, importance_cap=2.0, **changes))


def own_loss(tokens: Tokens, clip_low: float, clip_high: float) -> Any:
    """REINFORCE."""
    return tokens.advantages * tokens.new


def without_bounds(tokens: Tokens) -> Any:
    return tokens.new


def a_number(tokens: Tokens, clip_low: float, clip_high: float) -> float:
    return 1.0


def summed(tokens: Tokens, clip_low: float, clip_high: float) -> Any:
    return tokens.new.sum()


def detached(tokens: Tokens, clip_low: float, clip_high: float) -> Any:
    return tokens.new.detach()


def test_a_loss_of_ones_own_goes_by_its_name() -> None:
    objective = find(f"{__name__}:own_loss")
    assert objective is own_loss
    terms = policy_loss(**arguments({"recipe": dataclasses.replace(recipe(), objective=objective)}))
    # A ln π, w = 1, 0.5, 1.
    expected = ((math.log(0.3) + 0.5 * math.log(0.2)) / 2 - 2 * math.log(0.5)) / 2
    assert float(terms.loss) == pytest.approx(-expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpro", "gpro is not a loss: use grpo, cispo, likelihood, or module:function"),
        ("no_such_module:f", "module no_such_module cannot be imported"),
        (f"{__name__}:nothing", "has no function nothing"),
        (f"{__name__}:VALUES", "has no function VALUES"),
        (f"{__name__}:without_bounds", r"the wrong signature \(too many positional arguments\): it must be f\(tokens"),
        (f"{__name__}:a_number", "returned float for 2 tokens"),
        (f"{__name__}:summed", r"returned \(\) for 2 tokens"),
        (f"{__name__}:detached", r"returned \(2,\) for 2 tokens: it must be .* with gradient"),
    ],
)
def test_a_loss_that_cannot_be_used_says_why(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(name)


def test_a_loss_is_found_in_the_folder_in_which_a_worker_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loss_of_this_folder.py").write_text("def loss(tokens, clip_low, clip_high):\n    return tokens.new\n")
    (tmp_path / "broken_loss.py").write_text("def loss(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [one for one in sys.path if one not in ("", str(tmp_path))])
    assert find("loss_of_this_folder:loss").__name__ == "loss"
    with pytest.raises(ValueError, match="module broken_loss cannot be imported"):
        find("broken_loss:loss")


# ---- dual clip: tokens that an update has made likelier although their advantage is negative ----


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_dual_clip_bounds_what_a_token_of_negative_advantage_weighs(ratio: str) -> None:
    """new − old = 20: without, the value is e^20 · A, and so is the gradient; with c = 3 they are 3 A and exactly 0."""

    def of(advantage: float, apart: float, **choices: Any) -> tuple[float, float]:
        new = torch.tensor([-21.0 + apart], dtype=torch.float64, requires_grad=True)
        old = torch.tensor([-21.0], dtype=torch.float64)
        advantages = torch.tensor([advantage], dtype=torch.float64)
        changes = {"new": new, "old": old, "behaviour": old, "advantages": advantages, "steps": steps(1),
                   "totals": Totals(1, 1, 1)}  # fmt: skip
        terms = policy_loss(**arguments(changes, ratio=ratio, **choices))
        return float(terms.loss.detach()), float(gradient(terms.loss, new))

    assert of(-0.5, 20.0) == pytest.approx((0.5 * math.exp(20), 0.5 * math.exp(20)))
    assert of(-0.5, 20.0, dual_clip=3.0) == (1.5, 0.0)
    assert of(-0.5, math.log(3.01), dual_clip=3.0) == (1.5, 0.0)
    for advantage, apart in (
        (0.5, 20.0),
        (0.5, -20.0),
        (0.0, 20.0),
        (-0.5, math.log(2.99)),
        (-0.5, -20.0),
        (-0.5, 0.0),
    ):
        assert of(advantage, apart, dual_clip=3.0) == of(advantage, apart, dual_clip=0.0) == of(advantage, apart)
    assert of(-0.5, math.log(2.99), dual_clip=3.0) == pytest.approx((0.5 * 2.99, 0.5 * 2.99))


def test_tokens_beyond_the_dual_clip_count_as_clipped() -> None:
    """Of three tokens the first has ratio 1.5, above 1.28; ratio 5 of the last is beyond 3."""
    changes = {"new": logs(0.3, 0.2, 0.5), "old": logs(0.2, 0.2, 0.1)}
    shares = [policy_loss(**arguments(changes, dual_clip=c)).metrics["clip_fraction"] for c in (0.0, 3.0)]
    assert [float(share) for share in shares] == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("kind", ["cispo", "likelihood"])
def test_dual_clip_bounds_grpo_alone(kind: str) -> None:
    changes = {"new": logs(0.9, 0.9, 0.9), "old": logs(0.1, 0.1, 0.1), "advantages": torch.tensor([-1.0, -1.0, -1.0])}
    given = arguments(changes, kind=kind)
    bounded = given | {"recipe": dataclasses.replace(given["recipe"], dual_clip=3.0)}
    assert torch.equal(policy_loss(**given).loss, policy_loss(**bounded).loss)
    with pytest.raises(ValidationError, match="dual_clip bounds the objective grpo alone: leave it out with kind"):
        Loss(kind=kind, dual_clip=3.0)


@pytest.mark.parametrize(
    ("written", "minibatches", "bound"),
    [(None, 1, None), (None, 2, 3.0), (None, 8, 3.0), (0.0, 8, 0.0), (5.0, 1, 5.0), (5.0, 8, 5.0)],
)
def test_dual_clip_is_on_where_a_batch_is_used_more_than_once(
    written: float | None, minibatches: int, bound: float | None
) -> None:
    assert loss_recipe(Loss(dual_clip=written), minibatches).dual_clip == bound


@pytest.mark.parametrize("bound", [-1.0, 0.5, 1.0, math.inf, math.nan])
def test_a_dual_clip_that_would_leave_no_gradient_is_refused(bound: float) -> None:
    with pytest.raises(ValidationError, match="dual_clip"):
        Loss(dual_clip=bound)


# ---- log-ratios that mean nothing any more ----


@pytest.mark.parametrize("apart", [25.0, 100.0, 1e4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_ratio_is_infinite_and_no_gradient_is_the_whole_update(apart: float, sign: float) -> None:
    new = torch.tensor([-1.0 - apart if sign < 0 else -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0 if sign < 0 else -1.0 - apart, -1.0])
    for value in (
        token_ratio(new, old),
        sequence_token_ratio(new, old, steps(1, 1)),
        k3(new, old),
    ):
        (slope,) = torch.autograd.grad(value.sum(), new, retain_graph=True)
        assert bool(torch.isfinite(value).all()) and bool(torch.isfinite(slope).all())
        assert abs(float(slope[0])) <= 1e-8
    assert float(k3(new, old)[0].detach()) == 10.0
    assert bool(torch.isfinite(importance.behaviour_ratio(old, new.detach())).all())


def test_a_token_that_the_policies_disagree_about_leaves_the_loss_finite() -> None:
    """∞ · 0 would be no number: the advantage is 0, and ρ overflows."""
    new = torch.tensor([-0.5, -1.0], requires_grad=True)
    old = torch.tensor([-200.0, -1.0])
    loss = policy_loss(
        recipe(kl_coefficient=0.1), new=new, old=old, behaviour=old, advantages=torch.tensor([0.0, 1.0]),
        steps=steps(2), totals=Totals(1, 2, 2), reference=torch.tensor([-0.5, -90.0]),
    ).loss  # fmt: skip
    (slope,) = torch.autograd.grad(loss, new)
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(slope).all())
    assert float(slope.abs().max()) <= 1.0


def test_inside_the_bounds_nothing_changes() -> None:
    apart = torch.linspace(-19.9, 19.9, 200, dtype=torch.float64)
    new = torch.full_like(apart, -30.0)
    assert torch.equal(token_ratio(new + apart, new), (new + apart - new).exp())
    log_ratio = new + apart[(apart > -10.9) & (apart < 2.6)][0] - new
    assert float(k3(new, new + log_ratio)[0]) == float(log_ratio[0].exp() - log_ratio[0] - 1)


def test_the_bounds_are_fields() -> None:
    new, old = torch.tensor([-1.0, -1.0], dtype=torch.float64), torch.tensor([-31.0, -1.0], dtype=torch.float64)
    changes = {"new": new, "old": old, "behaviour": old, "advantages": torch.tensor([-1.0, 1.0]),
               "steps": steps(1, 1), "totals": Totals(2, 2, 2), "reference": old}  # fmt: skip

    def loss(**choices: Any) -> float:
        return float(policy_loss(**arguments(changes, **choices)).loss)

    # The ratio of the first token is e^30, cut to e^20 or e^5; the other's is 1. J is the mean of -ratio and 1.
    assert loss() == pytest.approx((math.exp(20) - 1) / 2)
    assert loss(log_ratio_bound=5.0) == pytest.approx((math.exp(5) - 1) / 2)
    # k3 is r - log r - 1 with r = e^-5: 4 and a bit, cut to 3; the other token's is 0.
    bounds = {"log_ratio_bound": 5.0, "kl_coefficient": 2.0}
    assert loss(**bounds) - loss(log_ratio_bound=5.0) == pytest.approx(math.exp(-5) + 5 - 1)
    assert loss(kl_bound=3.0, **bounds) - loss(log_ratio_bound=5.0) == pytest.approx(3.0)
