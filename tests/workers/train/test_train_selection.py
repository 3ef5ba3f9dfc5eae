"""High-entropy step selection in the trainer: which steps train, what that costs, and what is told of it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from train_samples import alone, mixed, settings, totals  # noqa: E402

from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.workers.train.errors import CancelledUpdateError, SampleError  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402


def entropies(trainer: Trainer, samples: list[pb.Sample]) -> list[float]:
    """H of each step, alone."""
    with torch.no_grad():
        rows = [alone(one, trainer.layout) for one in samples]
        return [float(trainer._forward(trainer.policy, trainer._collate([row]))[1].mean()) for row in rows]


@pytest.mark.parametrize("aggregation", ["step_mean", "token_mean"])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_steps_below_the_quantile_do_not_train_but_count(folder: Path, aggregation: str, minibatches: int) -> None:
    """As if their advantage were 0: without KL that is all they have to say, and means are over all steps."""
    samples = mixed(groups=4)
    rate = {"learning_rate": 2e-6, "minibatches": minibatches}
    loss = {"aggregation": aggregation, "entropy_quantile": 0.4}
    selecting = Trainer(settings(folder, loss=loss, **rate))
    entropy = dict(zip(map(id, samples), entropies(selecting, samples), strict=True))
    thresholds = []
    for group in range(4):
        mates = [one for one in samples if one.group_id == str(group)]
        first, second, third, _ = sorted(mates, key=lambda one: entropy[id(one)])
        # Of four steps the quantile is at position 0.4 · 3 = 1.2, a fifth of the way from the second to the third.
        thresholds.append(0.8 * entropy[id(second)] + 0.2 * entropy[id(third)])
        assert entropy[id(third)] - entropy[id(second)] > 1e-5
        first.advantage = second.advantage = 0.0
    original = mixed(groups=4)
    metrics = selecting.update(original, *totals(original))
    everything = Trainer(settings(folder, loss=loss | {"entropy_quantile": 0.0}, **rate))
    expected = everything.update(samples, *totals(samples))
    assert metrics["selected_share"] == 0.5
    assert metrics["entropy_threshold"] == pytest.approx(sum(thresholds) / 4, abs=1e-5)
    assert metrics["ratio"] == pytest.approx(1.0, abs=0.02)
    for name in ("loss", "gradient_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
    ours, theirs = selecting.snapshot(), everything.snapshot()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6 * minibatches)
    assert "selected_share" not in expected and "entropy_threshold" not in expected
    told = {(one.trajectory_id, one.step_index): one for one in selecting.step_entropies}
    assert everything.step_entropies == [] and len(told) == len(samples)
    for one in samples:
        seen = told[one.trajectory_id, one.step_index]
        assert seen.entropy == pytest.approx(entropy[id(one)], abs=1e-5)
        assert seen.selected == (one.advantage != 0.0)
        of_tokens = struct.unpack(f"<{len(one.token_ids)}e", seen.token_entropies)
        assert sum(of_tokens) / len(of_tokens) == pytest.approx(seen.entropy, rel=2e-3)


def test_only_selection_and_later_minibatches_cost_a_pass(folder: Path) -> None:
    samples = mixed(groups=4)

    def passes(**trainer: Any) -> tuple[int, float]:
        one = Trainer(settings(folder, microbatch_tokens=120, **trainer))
        seen = []
        one.model.lm_head.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        metrics = one.update(samples, *totals(samples))
        assert seen.count(True) == metrics["microbatches"]
        return seen.count(False), metrics["microbatches"]

    assert passes()[0] == 0
    scored, trained = passes(loss={"entropy_quantile": 0.4})
    assert scored > trained > 0
    assert passes(minibatches=2)[0] > 0


def test_what_fails_while_scoring_leaves_the_weights_alone(folder: Path) -> None:
    trainer = Trainer(settings(folder, loss={"entropy_quantile": 0.2}))
    before = trainer.snapshot()
    bad = mixed(groups=1)
    bad[-1].prompt_token_ids.insert(2, 6)
    with pytest.raises(SampleError, match="placeholders"):
        trainer.update(bad, *totals(bad))
    trainer.cancel()
    samples = mixed(groups=1)
    with pytest.raises(CancelledUpdateError):
        trainer.update(samples, *totals(samples))
    assert trainer.version == 0
    after = trainer.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)
