"""The equations of dart.algo against two other implementations, verl's and trl's: values and gradients, in float64.

`make references` puts both into build/references; without them these tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dart.algo import importance  # noqa: E402
from dart.algo.kl import ESTIMATORS  # noqa: E402
from dart.algo.logprobs import log_distribution, token_entropy  # noqa: E402
from dart.algo.loss import Recipe, policy_loss  # noqa: E402
from dart.algo.objectives import find  # noqa: E402
from dart.algo.selection import high_entropy_steps  # noqa: E402
from dart.algo.steps import Steps, Totals  # noqa: E402
from dart.core.curation.advantage import group_advantages  # noqa: E402

TESTS = Path(__file__).parents[1] / "support"
REFERENCES = TESTS.parents[1] / "build" / "references"
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not (REFERENCES / "verl").is_dir(), reason="verl and trl are not there: run `make references`"),
]
CASES = 4
CLIP_LOW, CLIP_HIGH, CAP, FLOOR, LENGTH, BETA, ENTROPY, QUANTILE = 0.2, 0.28, 1.6, 0.6, 11, 0.07, 0.03, 0.2


def make_case(seed: int) -> dict[str, Any]:
    """Twelve responses of 1 to 9 tokens in three groups of four; rows are padded with values that must not matter."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, 10, (12,), generator=draw)
    longest = int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None]).double()
    old = -normal(12, longest).abs() - 1.5
    weight = (0.3 * normal(12, longest)).exp()
    logits = normal(6, 17)
    return {
        "lengths": lengths, "mask": mask, "old": old, "new": old + 0.3 * normal(12, longest),
        "behaviour": (old + 0.4 * normal(12, longest)).clamp(max=0), "reference": old + 0.3 * normal(12, longest),
        "advantages": normal(12, 1).expand(12, longest).clone(), "weight": weight, "entropy": normal(12, longest).abs(),
        "rewards": torch.randint(0, 3, (12,), generator=draw).double() / 2 + torch.arange(12) * 1e-3,
        "groups": torch.arange(12) // 4, "logits": logits, "step_entropies": normal(3, 11).abs().float(),
        "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "cap": CAP, "floor": FLOOR, "length": LENGTH, "beta": BETA,
        "entropy_coef": ENTROPY, "quantile": QUANTILE,
    }  # fmt: skip


def make_extreme(seed: int) -> dict[str, Any]:
    """The same with log-ratios of up to 30 either way between any two policies, and a response of advantage 0."""
    case = make_case(seed)
    draw = torch.Generator().manual_seed(seed)
    apart = torch.tensor([-30.0, -21.0, -12.0, -2.0, 0.0, 0.2, 1.0, 9.0, 19.0, 22.0, 30.0], dtype=torch.float64)

    def far() -> Any:
        return apart[torch.randint(0, len(apart), case["old"].shape, generator=draw)]

    old = case["old"] - 70
    case |= {"old": old, "new": old + far(), "behaviour": old + far()}
    case["reference"] = case["new"] + far()
    case["advantages"][3] = 0.0
    case["behaviour"][5] = old[5] + 0.05  # verl divides by the sum of weights, which masking must not make 0
    return case


Cases = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Each case, usual and extreme, with what the references made of it."""
    folder = tmp_path_factory.mktemp("references")
    made = [make_case(seed) for seed in range(CASES)] + [make_extreme(seed) for seed in range(CASES)]
    torch.save(made, folder / "in.pt")
    command = [sys.executable, str(TESTS / "reference_losses.py"), REFERENCES, folder / "in.pt", folder / "out.pt"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(zip(made, torch.load(folder / "out.pt"), strict=True))


@pytest.fixture(scope="module")
def cases(both: Cases) -> Cases:
    return both[:CASES]


@pytest.fixture(scope="module")
def extremes(both: Cases) -> Cases:
    return both[CASES:]


def flat(case: dict[str, Any], values: Any) -> Any:
    """The tokens of a padded [steps, longest] tensor, one response after the other."""
    return values[case["mask"].bool()]


def steps_of(case: dict[str, Any]) -> Steps:
    return Steps(torch.repeat_interleave(torch.arange(12), case["lengths"]), case["lengths"])


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def ours(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Loss, and its gradient by log π."""
    choices: dict[str, Any] = {
        "ratio": "token", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "aggregation": "step_mean",
        "constant_length": LENGTH, "kl_estimator": "k3", "kl_bound": 10.0, "log_ratio_bound": 20.0,
        "kl_coefficient": 0.0, "importance": "truncated",
        "importance_level": "token", "importance_cap": CAP, "importance_floor": FLOOR, "entropy_coefficient": 0.0,
    }  # fmt: skip
    kind = changes.pop("kind", "grpo")
    behaviour = changes.pop("behaviour", flat(case, case["behaviour"]))
    new = flat(case, case["new"]).clone().requires_grad_()
    terms = policy_loss(
        Recipe(objective=find(kind), **choices | changes),
        new=new,
        old=flat(case, case["old"]),
        behaviour=behaviour,
        advantages=flat(case, case["advantages"]),
        steps=steps_of(case),
        totals=Totals(12, new.shape[0], new.shape[0]),
        reference=flat(case, case["reference"]),
        entropy=flat(case, case["entropy"]),
    )
    (gradient,) = torch.autograd.grad(terms.loss, new)
    return {"loss": terms.loss.detach(), "gradient": gradient}


def same(case: dict[str, Any], actual: dict[str, Any], expected: dict[str, Any]) -> None:
    close(actual["loss"], expected["loss"])
    close(actual["gradient"], flat(case, expected["gradient"]))
    assert float(expected["gradient"].abs().sum()) > 0


AGGREGATIONS = {
    "step_mean": "seq-mean-token-mean", "token_mean": "token-mean", "constant": "seq-mean-token-sum-norm"
}  # fmt: skip
VERL = {
    "vanilla": {"kind": "grpo"},
    "dual": {"kind": "grpo", "dual_clip": 3.0},
    "gspo": {"kind": "grpo", "ratio": "sequence"},
    "cispo": {"kind": "cispo"},
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("theirs", VERL)
def test_losses_are_those_of_verl(cases: Any, theirs: str, aggregation: str) -> None:
    for case, results in cases:
        expected = results["verl"][f"{theirs} {AGGREGATIONS[aggregation]}"]
        same(case, ours(case, aggregation=aggregation, **VERL[theirs]), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("theirs", ["vanilla", "dual", "cispo"])
def test_losses_at_extremes_are_those_of_verl(extremes: Any, theirs: str, aggregation: str) -> None:
    """Its GSPO cuts the mean log-ratio at 10 and from above alone, so that it cannot be compared here."""
    for case, results in extremes:
        expected = results["verl"][f"{theirs} {AGGREGATIONS[aggregation]}"]
        same(case, ours(case, aggregation=aggregation, **VERL[theirs]), expected)


TRL = {
    "grpo": {"aggregation": "step_mean"},
    "bnpo": {"aggregation": "token_mean", "entropy_coefficient": ENTROPY},
    "dr_grpo": {"aggregation": "constant"},
    "dapo": {"aggregation": "token_mean"},
    "cispo": {"kind": "cispo", "aggregation": "token_mean", "clip_low": 1.0},
}


@pytest.mark.parametrize("theirs", TRL)
def test_losses_with_kl_and_entropy_are_those_of_trl(cases: Any, theirs: str) -> None:
    for case, results in cases:
        weight = flat(case, case["weight"])
        # The weight is given there; here it is what the log-probabilities of sampling make of it.
        changes = {"behaviour": flat(case, case["old"]) - weight.log(), "importance_cap": 1e9, "kl_coefficient": BETA}
        same(case, ours(case, **changes, **TRL[theirs]), results["trl"][f"{theirs} token"])


@pytest.mark.parametrize("theirs", ["grpo", "dr_grpo", "dapo"])
def test_sequence_ratios_are_those_of_trl(cases: Any, theirs: str) -> None:
    for case, results in cases:
        changes = {"ratio": "sequence", "importance": "none", "kl_coefficient": BETA}
        same(case, ours(case, **changes, **TRL[theirs]), results["trl"][f"{theirs} sequence"])


def test_importance_weights_are_those_of_verl(both: Any) -> None:
    for case, results in both:
        old, behaviour = flat(case, case["old"]), flat(case, case["behaviour"])
        token = importance.behaviour_ratio(old, behaviour)
        sequence = importance.sequence_behaviour_ratio(old, behaviour, steps_of(case))
        for name, ratio in (("token", token), ("sequence", sequence)):
            theirs = {kind: flat(case, results["verl"][f"weight {kind} {name}"]) for kind in ("truncated", "masked")}
            close(importance.truncated(ratio, CAP), theirs["truncated"])
            close(importance.masked(ratio, FLOOR, CAP), theirs["masked"])
            assert 0 < int((theirs["masked"] == 0).sum()) < ratio.shape[0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimators_are_those_of_verl(both: Any, name: str) -> None:
    for case, results in both:
        new = flat(case, case["new"]).clone().requires_grad_()
        values = ESTIMATORS[name](new, flat(case, case["reference"]))
        close(values.detach(), flat(case, results["verl"][name]["values"]))
        close(torch.autograd.grad(values.sum(), new)[0], flat(case, results["verl"][name]["gradient"]))


def test_group_advantages_are_those_of_verl(cases: Any) -> None:
    for case, results in cases:
        for group in range(3):
            members = case["groups"] == group
            rewards, lengths = case["rewards"][members].tolist(), case["lengths"][members].tolist()
            centred = group_advantages(rewards, lengths, level="trajectory", std_normalise=False)
            close(torch.tensor(centred).double(), results["verl"]["advantages False"][members])
            # verl divides by the sample deviation of the n = 4 rewards, we by the population's: sqrt(4 / 3) apart.
            scaled = torch.tensor(group_advantages(rewards, lengths, level="trajectory")).double() * (3 / 4) ** 0.5
            close(scaled, results["verl"]["advantages True"][members])


def test_entropy_is_that_of_verl(cases: Any) -> None:
    for case, results in cases:
        close(token_entropy(log_distribution(case["logits"], 1.0)), results["verl"]["entropy"])


def test_selection_is_that_of_trl(cases: Any) -> None:
    """Entropies are float32: trl makes its threshold in that."""
    for case, results in cases:
        entropies = case["step_entropies"]
        groups = torch.arange(3).repeat_interleave(11)
        kept = high_entropy_steps(entropies.flatten(), groups, QUANTILE)
        assert torch.equal(kept.view(3, 11), results["trl"]["selected"])
        # 11 values: Q_0.2 is at position 2, so two of each group go.
        assert kept.view(3, 11).sum(1).tolist() == [9, 9, 9]
