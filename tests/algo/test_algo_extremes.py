"""Every combination of what `trainer.loss` offers, at log-ratios of up to ±30, against a second implementation.

Losses and gradients agree to 1e-6 in float64, and in float32 every loss, gradient and metric is a finite number.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from loss_samples import recipe  # noqa: E402
from plain_loss import Choices, Rows, plain_loss  # noqa: E402

from dart.algo.loss import Terms, policy_loss  # noqa: E402
from dart.algo.steps import Steps, Totals  # noqa: E402

CLIP_LOW, CLIP_HIGH, CAP, FLOOR, LENGTH, BETA, ENTROPY = 0.2, 0.28, 1.6, 0.6, 11, 0.1, 0.03
STEPS, LONGEST = 14, 9
APART = (-30.0, -20.5, -12.0, -2.0, -0.1, 0.0, 0.15, 1.0, 9.0, 20.5, 30.0)
CORRECTIONS = [("none", "token"), *product(("truncated", "masked"), ("token", "sequence"))]


def rows(seed: int) -> Rows:
    """Ragged responses of 1 to 9 tokens; what is beyond their ends must not matter, so it is huge there."""
    draw = torch.Generator().manual_seed(seed)
    shape = (STEPS, LONGEST)
    apart = torch.tensor(APART, dtype=torch.float64)

    def far() -> Any:
        return apart[torch.randint(0, len(apart), shape, generator=draw)]

    lengths = torch.randint(1, LONGEST + 1, (STEPS,), generator=draw)
    mask = (torch.arange(LONGEST) < lengths[:, None]).double()
    old = -70 - torch.rand(shape, generator=draw, dtype=torch.float64)
    advantages = torch.randn(STEPS, 1, generator=draw, dtype=torch.float64).expand(shape).clone()
    advantages[1] = advantages[2] = 0.0
    new, behaviour = old + far(), old - far()
    new[3], behaviour[3] = old[3] + 30, old[3] - 30  # a response that lies beyond every bound
    behaviour[4] = old[4] + 30  # and one that masking leaves nothing of
    new[5], behaviour[5] = old[5], old[5]
    kept = torch.ones(STEPS, dtype=torch.bool)
    kept[6] = kept[7] = False
    entropy = torch.rand(shape, generator=draw, dtype=torch.float64)
    made = Rows(mask, new, old, behaviour, new + far(), advantages, entropy, kept)
    outside = ~mask.bool()
    for values in (made.new, made.old, made.behaviour, made.reference, made.advantages, made.entropy):
        values[outside] = 1e30
    return made


def choices(kind: str, ratio: str, correction: tuple[str, str], kl: str | None, aggregation: str) -> Choices:
    importance, level = correction
    return Choices(
        kind=kind, ratio=ratio, importance=importance, importance_level=level, kl_estimator=kl or "k3",
        kl_coefficient=BETA if kl else 0.0, entropy_coefficient=ENTROPY, aggregation=aggregation, clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH, cap=CAP, floor=FLOOR, constant_length=LENGTH,
    )  # fmt: skip


def ours(given: Rows, wanted: Choices, dtype: Any) -> tuple[Terms, Any]:
    """The loss of the kept steps' tokens, and its gradient by log π at [steps, longest]."""
    there = given.mask.bool() & given.kept[:, None]
    new = given.new.to(dtype).requires_grad_()
    lengths = given.mask.sum(1).long()[given.kept]
    terms = policy_loss(
        recipe(
            kind=wanted.kind, ratio=wanted.ratio, importance=wanted.importance,
            importance_level=wanted.importance_level, importance_cap=CAP, importance_floor=FLOOR,
            kl_estimator=wanted.kl_estimator, kl_coefficient=wanted.kl_coefficient, clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH, entropy_coefficient=ENTROPY, aggregation=wanted.aggregation, constant_length=LENGTH,
        ),
        new=new[there],
        steps=Steps(torch.repeat_interleave(torch.arange(len(lengths)), lengths), lengths),
        totals=Totals(STEPS, int(given.mask.sum()), int(there.sum())),
        **{name: getattr(given, name)[there].to(dtype) for name in
           ("old", "behaviour", "advantages", "reference", "entropy")},
    )  # fmt: skip
    return terms, torch.autograd.grad(terms.loss, new)[0]


@pytest.mark.parametrize("correction", CORRECTIONS, ids="-".join)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["grpo", "cispo", "likelihood"])
def test_every_loss_is_the_plain_one_and_finite(kind: str, ratio: str, correction: tuple[str, str]) -> None:
    for kl, aggregation in product((None, "k1", "k2", "k3"), ("step_mean", "token_mean", "constant")):
        given, wanted = rows(0), choices(kind, ratio, correction, kl, aggregation)
        terms, gradient = ours(given, wanted, torch.float64)
        zeroed = replace_padding(given)
        zeroed.new.requires_grad_()
        expected = plain_loss(zeroed, wanted)
        (slope,) = torch.autograd.grad(expected, zeroed.new)
        torch.testing.assert_close(terms.loss.detach(), expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-12)
        assert float(slope.abs().sum()) > 0
        single, slope32 = ours(given, wanted, torch.float32)
        assert bool(torch.isfinite(single.loss)) and bool(torch.isfinite(slope32).all())
        assert all(bool(torch.isfinite(value)) for value in single.metrics.values()), single.metrics


def replace_padding(given: Rows) -> Rows:
    """With 0 beyond the responses' ends, where the padded implementation computes too."""
    inside = given.mask.bool()
    names = ("new", "old", "behaviour", "reference", "advantages", "entropy")
    return replace(given, **{name: torch.where(inside, getattr(given, name), 0.0) for name in names})
