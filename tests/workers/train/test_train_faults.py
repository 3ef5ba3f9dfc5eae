"""Samples that come to no number: what is left out, what is skipped, who is named."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from train_samples import mixed, sample, screenshot, settings, totals  # noqa: E402

from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.workers.train.errors import SampleError  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402

POISON, PITFALL = 13.0, 17.0
"""Advantages of samples whose loss, or whose gradient alone, is no number in `poisonous`."""


class _Pitfall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Any, where: Any) -> Any:
        ctx.save_for_backward(where)
        return new.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (where,) = ctx.saved_tensors
        return torch.where(where, torch.inf, gradient), None


def poisonous(tokens: Any, clip_low: float, clip_high: float) -> Any:
    """An objective that some samples make nonsense of."""
    new = _Pitfall.apply(tokens.new, tokens.advantages == PITFALL)
    return torch.where(tokens.advantages == POISON, torch.nan, 1.0) * tokens.advantages * new


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tiny_model.build(path, text={"num_hidden_layers": 2}, vision={"depth": 2})
    return path


def trainer_of(folder: Path, **trainer: Any) -> Trainer:
    loss = {"kind": f"{__name__}:poisonous", **trainer.pop("loss", {})}
    return Trainer(settings(folder, loss=loss, learning_rate=1e-4, microbatch_tokens=120, **trainer))


def with_advantage(advantage: float, *names: str) -> list[pb.Sample]:
    samples = mixed(groups=3)
    for one in samples:
        if one.trajectory_id in names:
            one.advantage = advantage
    return samples


@pytest.mark.parametrize("trainer", [{}, {"minibatches": 2}], ids=["whole", "minibatches"])
def test_a_sample_whose_loss_is_no_number_is_left_out_and_named(folder: Path, trainer: dict[str, Any]) -> None:
    poisoned, without = trainer_of(folder, **trainer), trainer_of(folder, **trainer)
    samples = with_advantage(POISON, "1-1")
    metrics = poisoned.update(samples, *totals(samples))
    assert (metrics["samples_left_out"], metrics["steps_skipped"]) == (1, 0)
    assert metrics["steps_taken"] == trainer.get("minibatches", 1)
    (remark,) = poisoned.remarks
    assert remark == "sample 1-1/0 of group 1 was left out of the update: its loss is not finite"
    # As if it had had nothing to say.
    same = with_advantage(0.0, "1-1")
    expected = without.update(same, *totals(same))
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
    ours, theirs = poisoned.snapshot(), without.snapshot()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-5)
    clean = mixed(groups=3)
    assert poisoned.update(clean, *totals(clean))["samples_left_out"] == 0
    assert poisoned.remarks == []


def test_selection_goes_on_without_a_sample_whose_log_probs_are_no_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(folder, loss={"entropy_quantile": 0.4})
    forward = trainer._forward

    def broken(model: Any, inputs: Any) -> Any:
        logprobs, entropy = forward(model, inputs)
        return torch.where(inputs.advantages == POISON, torch.nan, logprobs), entropy

    monkeypatch.setattr(trainer, "_forward", broken)
    samples = with_advantage(POISON, "2-last")
    metrics = trainer.update(samples, *totals(samples))
    assert metrics["samples_left_out"] == 1
    assert trainer.remarks == ["sample 2-last/0 of group 2 was left out of the update: its log-probs are not finite"]


def test_samples_that_break_the_gradient_twice_are_named(folder: Path) -> None:
    trainer = trainer_of(folder)
    before = trainer.snapshot()
    samples = with_advantage(PITFALL, "0-1", "2-2")
    metrics = trainer.update(samples, *totals(samples))
    assert (metrics["samples_left_out"], metrics["steps_skipped"], metrics["gradient_norm"]) == (0, 1, 0)
    assert "the optimiser's step was skipped" in trainer.remarks[0]
    with pytest.raises(SampleError, match=r"the cause is trajectories 0-1, 2-2 of groups 0, 2") as caught:
        trainer.update(samples, *totals(samples))
    assert caught.value.trajectories == ("0-1", "2-2")
    assert not caught.value.weights_changed
    after = trainer.snapshot()
    assert all(torch.equal(before[name], after[name]) for name in before)
    clean = mixed(groups=3)
    assert trainer.update(clean, *totals(clean))["steps_skipped"] == 0


def test_one_bad_gradient_now_and_then_costs_its_step_alone(folder: Path) -> None:
    trainer = trainer_of(folder)
    good, bad = mixed(groups=3), with_advantage(PITFALL, "0-1")
    metrics = [trainer.update(one, *totals(one)) for one in (bad, good, bad, good)]
    assert [(one["steps_skipped"], one["steps_taken"]) for one in metrics] == [(1, 0), (0, 1)] * 2


def test_a_batch_of_nothing_else_is_refused_with_every_name(folder: Path) -> None:
    trainer = trainer_of(folder)
    samples = mixed(groups=1)
    for one in samples:
        one.advantage = POISON
    with pytest.raises(SampleError, match="no sample of the batch gives finite numbers") as caught:
        trainer.update(samples, *totals(samples))
    assert caught.value.trajectories == ("0-0", "0-1", "0-2", "0-last")
    assert trainer.version == 0


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_screenshot_that_cannot_be_decoded_names_its_trajectories(folder: Path, share: float) -> None:
    trainer = Trainer(settings(folder))
    broken = screenshot(0)
    broken.data = broken.data[: int(share * len(broken.data))]
    broken.sha256 = hashlib.sha256(broken.data).digest()
    samples = [
        sample("t1", "go", "12", 1.0, [screenshot(1)]),
        sample("t2", "go on", "12", 1.0, [broken]),
        sample("t3", "go back", "12", -1.0, [screenshot(1), broken]),
    ]
    with pytest.raises(SampleError, match="cut short") as caught:
        trainer.update(samples, *totals(samples))
    assert {"t2", "t3"}.issuperset(caught.value.trajectories) and caught.value.trajectories
    good = [samples[0]]
    assert trainer.update(good, *totals(good))["gradient_norm"] > 0
