"""The trainer: what an update does to the policy, what it refuses, and what a checkpoint holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from train_samples import alone, mixed, read, same_bits, sample, screenshot, settings, totals  # noqa: E402

from dart import manifest  # noqa: E402
from dart.errors import UserError  # noqa: E402
from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.workers.train import collectives  # noqa: E402
from dart.workers.train.errors import CancelledUpdateError, NonFiniteError, SampleError, UnknownScreenshotError  # noqa: E402
from dart.workers.train.policy import Policy  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402


def logprob(trainer: Trainer, one: pb.Sample) -> float:
    row = alone(one, trainer.layout)
    with torch.no_grad():
        values, _ = trainer._forward(trainer.policy, trainer._collate([row]))
    return float(values.sum())


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


def test_a_frozen_tower_stays_as_it_is_and_a_screenshot_is_encoded_once(tmp_path: Path) -> None:
    tiny_model.build(tmp_path)
    samples = mixed()
    distinct = {image.sha256 for one in samples for image in one.images}
    options = {"microbatch_tokens": 150, "loss": {"entropy_quantile": 0.2, "kl_coefficient": 0.1}}
    metrics, changed, trainers = [], [], []
    for chosen in ({}, {"image_threads": 0}, {"freeze_vision": True}):
        one = Trainer(settings(tmp_path, **options, **chosen))
        before = one.snapshot()
        metrics.append(one.update(samples, *totals(samples)))
        one.update(samples, *totals(samples))
        changed.append({name for name, value in one.snapshot().items() if not torch.equal(value, before[name])})
        trainers.append(one)
    whole, threadless, frozen = metrics
    assert (whole["loss"], whole["gradient_norm"]) == (threadless["loss"], threadless["gradient_norm"])
    assert frozen["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert any("visual" in name for name in changed[0])
    assert changed[2] and not any("visual" in name for name in changed[2])
    encoded = trainers[2].encoded
    assert encoded is not None and encoded.encoded == len(distinct)
    reference = trainers[2].reference
    assert isinstance(reference, Policy) and reference.kept is not None
    assert 3 <= reference.kept.encoded <= len(distinct), "once by the reference, too, of the steps that are selected"
    trainers[2].save_checkpoint(tmp_path / "saved")
    again = Trainer(settings(tmp_path, resume_from=tmp_path / "saved", freeze_vision=True, **options))
    again.update(samples, *totals(samples))
    with pytest.raises(UserError, match="freeze_vision"):
        Trainer(settings(tmp_path, resume_from=tmp_path / "saved", **options))


def test_update_raises_good_actions_and_lowers_bad_ones(folder: Path) -> None:
    trainer = Trainer(settings(folder))
    image = screenshot(0)
    good, bad = sample("good", "go", "12", 1.0, [image]), sample("bad", "go", "98", -1.0, [image])
    before = logprob(trainer, good), logprob(trainer, bad)
    for _ in range(3):
        metrics = trainer.update([good, bad], *totals([good, bad]))
    assert logprob(trainer, good) > before[0] + 0.1
    assert logprob(trainer, bad) < before[1] - 0.1
    assert trainer.version == 3
    assert 0 <= metrics["padding_share"] < 1
    assert metrics["staleness"] == 2
    assert metrics["entropy"] > 0


def test_a_screenshot_whose_bytes_are_with_another_sample_is_the_same(folder: Path) -> None:
    image = screenshot(0)
    whole = [sample("a", "go", "12", 1.0, [image]), sample("b", "stop", "98", -1.0, [image])]
    once = [pb.Sample.FromString(one.SerializeToString()) for one in whole]
    once[0].images[0].ClearField("data")
    trainers = Trainer(settings(folder)), Trainer(settings(folder))
    for trainer, samples in zip(trainers, (whole, once), strict=True):
        trainer.update(samples, *totals(samples))
    assert same_weights(trainers[0].snapshot(), trainers[1].snapshot())


def test_a_rescored_sample_weighs_as_if_it_had_just_been_sampled(folder: Path) -> None:
    image = screenshot(0)
    with_log_probs = sample("pooled", "go", "12", 1.0, [image], logprob=-0.001)
    old = sample("pooled", "go", "12", 1.0, [image])
    del old.logprobs[:]
    with pytest.raises(SampleError, match="0 log-probs for 3 tokens"):
        read(old, Trainer(settings(folder)).layout)
    old.rescore = True
    trained = Trainer(settings(folder))
    metrics = trained.update([old], *totals([old]))
    assert metrics["importance_weight"] == pytest.approx(1.0)
    assert metrics["same_version_tokens"] == 0
    assert Trainer(settings(folder)).update([with_log_probs], *totals([old]))["importance_weight"] < 0.1
    with_log_probs.rescore = True
    with pytest.raises(SampleError, match="3 log-probs and asks to be re-scored"):
        read(with_log_probs, trained.layout)


def test_metrics_compare_with_the_engine_where_versions_agree(folder: Path) -> None:
    trainer = Trainer(settings(folder))
    one = sample("t", "go", "12", 1.0, [screenshot(0)])
    with torch.no_grad():
        row = alone(one, trainer.layout)
        values, _ = trainer._forward(trainer.policy, trainer._collate([row]))
    del one.logprobs[:]
    one.logprobs.extend((values.cpu() + torch.tensor([0.0, -0.3, 0.0])).tolist())
    old = sample("old", "go", "1", 1.0, [screenshot(1)], version=0)
    trainer.version = 4
    one.versions[0].version = 4
    metrics = trainer.update([one, old], *totals([one, old]))
    assert metrics["same_version_tokens"] == 3
    assert metrics["same_version_difference"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["same_version_difference_max"] == pytest.approx(0.3, abs=1e-5)
    assert metrics["staleness"] == pytest.approx(4 * 2 / 5)


def test_importance_weights_are_those_of_the_behaviour_logprobs(folder: Path) -> None:
    trainer = Trainer(settings(folder))
    one = sample("t", "go", "12", 1.0, [screenshot(0)])
    with torch.no_grad():
        row = alone(one, trainer.layout)
        values, _ = trainer._forward(trainer.policy, trainer._collate([row]))
    # The engine thought twice as much of the first token, half as much of the second.
    del one.logprobs[:]
    one.logprobs.extend((values.cpu() + torch.tensor([2.0, 0.5, 1.0]).log()).tolist())
    metrics = trainer.update([one], *totals([one]))
    assert metrics["importance_weight"] == pytest.approx((0.5 + 1 + 1) / 3, abs=1e-4)
    # The gradient of −J at ρ = 1 is −mean(w · A), so that is the loss.
    assert metrics["loss"] == pytest.approx(-(0.5 + 1 + 1) / 3, abs=1e-4)


def test_minibatches_clip_against_the_policy_before_the_first_step(folder: Path) -> None:
    samples = mixed(groups=4)
    one = Trainer(settings(folder, learning_rate=3e-3)).update(samples, *totals(samples))
    four = Trainer(settings(folder, learning_rate=3e-3, minibatches=4)).update(samples, *totals(samples))
    assert (one["ratio"], one["clip_fraction"], one["kl_old"]) == (pytest.approx(1.0), 0.0, 0.0)
    assert four["clip_fraction"] > 0
    assert four["kl_old"] > 0


def test_few_rows_make_fewer_optimiser_steps(folder: Path) -> None:
    one = sample("t", "go", "12", 1.0, [screenshot(0)])
    few, whole = Trainer(settings(folder, minibatches=4)), Trainer(settings(folder))
    assert few.update([one], *totals([one]))["steps_taken"] == whole.update([one], *totals([one]))["steps_taken"] == 1
    for ours, theirs in zip(few.parameters, whole.parameters, strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(SampleError, match="got 0 samples with 0 tokens, but the batch has 0 with 0"):
        few.update([], 0, 0)


def test_kl_to_the_reference_starts_at_zero_and_holds_the_policy(folder: Path) -> None:
    samples = mixed(groups=2)

    def drift(beta: float) -> float:
        trainer = Trainer(settings(folder, loss={"kl_coefficient": beta}))
        kl = [trainer.update(samples, *totals(samples))["kl_reference"] for _ in range(4)]
        assert kl[0] == pytest.approx(0.0, abs=1e-6)
        return kl[-1]

    assert 0 < drift(10.0) < drift(0.01)


def test_the_references_tower_runs_once_for_each_screenshot(folder: Path) -> None:
    trainer, samples = Trainer(settings(folder, loss={"kl_coefficient": 0.1})), mixed(groups=2)
    for _ in range(2):
        trainer.update(samples, *totals(samples))
    assert isinstance(trainer.reference, Policy) and trainer.reference.kept and trainer.policy.kept is None
    assert trainer.reference.kept.encoded == len({image.sha256 for one in samples for image in one.images}) == 4


def test_an_entropy_bonus_raises_entropy(folder: Path) -> None:
    samples = mixed(groups=1)
    for one in samples:
        one.advantage = 0.0
    trainer = Trainer(settings(folder, loss={"entropy_coefficient": 0.1}))
    seen = [trainer.update(samples, *totals(samples))["entropy"] for _ in range(3)]
    assert seen[0] + 0.01 < seen[1] and seen[1] + 0.01 < seen[2]
    still = Trainer(settings(folder))
    before = still.snapshot()
    still.optimizer.param_groups[0]["weight_decay"] = 0.0
    assert still.update(samples, *totals(samples))["gradient_norm"] == 0
    assert same_weights(before, still.snapshot())


@pytest.mark.parametrize(
    "loss",
    [
        {"ratio": "sequence"},
        {"kind": "cispo", "aggregation": "token_mean"},
        {"kind": "likelihood", "importance": "none"},
        {"aggregation": "constant", "constant_length": 8},
        {"importance": "masked", "importance_cap": 1e9, "importance_floor": 0.0},
        {"importance": "none"},
        {"importance_level": "sequence"},
        {"kind": f"{__name__}:reinforce"},
    ],
    ids=lambda loss: "-".join(str(value) for value in loss.values()),
)
def test_every_loss_raises_good_actions_and_lowers_bad_ones(folder: Path, loss: dict[str, Any]) -> None:
    trainer = Trainer(settings(folder, minibatches=2, loss=loss))
    good, bad = sample("good", "go", "12", 1.0, [screenshot(0)]), sample("bad", "stop", "98", -1.0, [screenshot(1)])
    before = logprob(trainer, good), logprob(trainer, bad)
    for _ in range(3):
        metrics = trainer.update([good, bad], *totals([good, bad]))
    assert logprob(trainer, good) > before[0] + 0.1
    assert logprob(trainer, bad) < before[1] - 0.1
    assert ("importance_weight" in metrics) == (loss.get("importance") != "none")


def reinforce(tokens: Any, clip_low: float, clip_high: float) -> Any:
    return tokens.advantages * tokens.new


def test_a_loss_that_is_not_there_is_told_before_the_model_loads(tmp_path: Path) -> None:
    def refused(kind: str) -> str:
        with pytest.raises(UserError) as caught:
            Trainer(settings(tmp_path / "nowhere", loss={"kind": kind}))
        return str(caught.value)

    assert refused("no_such_module:f").startswith("trainer.loss.kind: module no_such_module cannot be imported")
    assert f"({__file__}) has no function nothing" in refused(f"{__name__}:nothing")
    assert "it must be f(tokens, clip_low, clip_high)" in refused(f"{__name__}:logprob")


def test_the_whole_gradient_is_scaled_down_to_the_clip_and_no_further(folder: Path) -> None:
    """Adam hides the gradient's scale, so it is looked at just before the step."""
    samples = mixed(groups=1)

    def stepped(clip: float) -> tuple[dict[str, float], list[Any]]:
        trainer, gradients = Trainer(settings(folder, gradient_clip=clip)), []
        trainer.optimizer.register_step_pre_hook(
            lambda *_: gradients.extend(p.grad.clone() for p in trainer.parameters)
        )
        return trainer.update(samples, *totals(samples)), gradients

    metrics, whole = stepped(1e6)
    norm = metrics["gradient_norm"]
    assert float(torch.stack([one.norm() for one in whole]).norm()) == pytest.approx(norm, rel=1e-5)
    for clip in (0.25 * norm, 0.9 * norm, 1.1 * norm):
        clipped_metrics, clipped = stepped(clip)
        assert clipped_metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5), "the norm before it was clipped"
        scale = min(1.0, clip / norm)
        torch.testing.assert_close(clipped, [one * scale for one in whole], rtol=1e-4, atol=1e-7)


def test_adam_has_the_settings_asked_for_and_decays_neither_norms_nor_biases(folder: Path) -> None:
    options = {"adam_betas": [0.8, 0.97], "adam_epsilon": 1e-6, "learning_rate": 0.1, "weight_decay": 0.2}
    trainer = Trainer(settings(folder, **options))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed, kept = ({names[id(one)] for one in group["params"]} for group in trainer.optimizer.param_groups)
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert kept == {name for name in names.values() if name.endswith(".bias") or "norm" in name}
    assert {"lm_head.weight", "model.language_model.embed_tokens.weight"} <= decayed
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.2, 0.0]
    for group in trainer.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.97), 1e-6)
    # Without a gradient, the decay is all that an update does.
    samples = mixed(groups=1)
    for one in samples:
        one.advantage = 0.0
    before = trainer.snapshot()
    trainer.update(samples, *totals(samples))
    for name, value in trainer.snapshot().items():
        torch.testing.assert_close(value, before[name] * (1 - 0.1 * 0.2 if name in decayed else 1.0))


def test_learning_rate_decays_linearly_or_not_at_all(folder: Path) -> None:
    trainer = Trainer(settings(folder, learning_rate=1.0, final_learning_rate_fraction=0.2, total_updates=5))
    assert [trainer.learning_rate(update) for update in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    trainer.config = settings(folder, learning_rate=1.0, final_learning_rate_fraction=0.2)
    assert trainer.learning_rate(1000) == 1.0


def test_learning_rate_rises_over_the_warm_up(folder: Path) -> None:
    trainer = Trainer(settings(folder, learning_rate=1.0, warmup_updates=3))
    assert [trainer.learning_rate(update) for update in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    trainer.config = settings(
        folder, learning_rate=1.0, warmup_updates=1, final_learning_rate_fraction=0.5, total_updates=4
    )
    assert [trainer.learning_rate(update) for update in range(5)] == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.5])


def test_what_cannot_be_trained_leaves_the_weights_alone(folder: Path) -> None:
    trainer = Trainer(settings(folder))
    before = trainer.snapshot()
    samples = mixed(groups=1)
    count, tokens = totals(samples)
    with pytest.raises(SampleError, match="but the batch has"):
        trainer.update(samples[1:], count, tokens)
    with pytest.raises(SampleError, match="but the batch has"):
        trainer.update([], 0, 1)
    with pytest.raises(SampleError, match="got 0 samples"):
        trainer.update([], 0, 0)
    bad = mixed(groups=1)
    bad[-1].prompt_token_ids.insert(2, 6)
    with pytest.raises(SampleError, match="placeholders"):
        trainer.update(bad, count, tokens)
    trainer.cancel()
    with pytest.raises(CancelledUpdateError):
        trainer.update(samples, count, tokens)
    assert trainer.version == 0
    assert same_weights(before, trainer.snapshot())


def test_a_gradient_that_is_not_finite_costs_a_step_and_when_it_repeats_the_update(folder: Path) -> None:
    trainer = Trainer(settings(folder))
    samples = mixed(groups=1)
    before = trainer.snapshot()
    hook = trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    metrics = trainer.update(samples, *totals(samples))
    assert (metrics["steps_skipped"], metrics["gradient_norm"]) == (1, 0)
    assert trainer.remarks == ["the gradient's norm is nan: the optimiser's step was skipped"]
    assert (trainer.version, same_weights(before, trainer.snapshot())) == (1, True)
    with pytest.raises(NonFiniteError, match="at 2 steps in a row, and every sample alone gives such a") as caught:
        trainer.update(samples, *totals(samples))
    hook.remove()
    assert not caught.value.weights_changed
    assert same_weights(before, trainer.snapshot())
    with torch.no_grad():
        trainer.model.lm_head.weight[10] = float("nan")
    with pytest.raises(NonFiniteError, match="the weights are not finite"):
        trainer.update(samples, *totals(samples))


def test_snapshots_do_not_change_with_training(folder: Path) -> None:
    trainer = Trainer(settings(folder))
    snapshot = trainer.snapshot()
    copy = {name: tensor.clone() for name, tensor in snapshot.items()}
    samples = mixed(groups=1)
    trainer.update(samples, *totals(samples))
    assert same_weights(snapshot, copy)
    assert not same_weights(snapshot, trainer.snapshot())


@same_bits
def test_checkpoint_loads_everywhere_and_training_goes_on_as_if_uninterrupted(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = tmp_path / "checkpoints" / "v1"
    samples = mixed(groups=2)
    trainer = Trainer(settings(folder))
    trainer.update(samples, *totals(samples))
    write = trainer.stage_checkpoint(path)
    saved = trainer.snapshot()
    trainer.update(samples, *totals(samples))
    write()  # of what was staged, and not of what has been made of it since
    assert (manifest.problem(path), (path / manifest.NAME).exists()) == (None, True)

    loaded = AutoModelForImageTextToText.from_pretrained(path)
    assert same_weights(dict(loaded.named_parameters()), saved)
    AutoProcessor.from_pretrained(path)
    assert (path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert [entry.name for entry in path.parent.iterdir()] == ["v1"]

    resumed = Trainer(settings(folder, resume_from=str(path)))
    assert (resumed.version, resumed.updates) == (1, 1)
    resumed.update(samples, *totals(samples))
    assert same_weights(resumed.snapshot(), trainer.snapshot())
    changed = Trainer(settings(folder, resume_from=str(path), weight_decay=0.03, adam_epsilon=1e-7))
    decays = {group["weight_decay"]: group["eps"] for group in changed.optimizer.param_groups}
    assert decays == {0.03: 1e-7, 0.0: 1e-7}, "the config's, not the checkpoint's"
    # In a long run what it resumed from is deleted; a save that was killed leaves its folder.
    shutil.rmtree(path)
    (path.parent / ".v0.1.tmp").mkdir()
    resumed.save_checkpoint(path)
    assert manifest.problem(path) is None
    assert [entry.name for entry in path.parent.iterdir()] == ["v1"]
    assert Trainer(settings(folder, resume_from=str(path))).version == 2


def test_bfloat16_keeps_float32_masters(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    samples = mixed(groups=1)
    trainer = Trainer(settings(folder, dtype="bfloat16", learning_rate=1e-5, loss={"kl_coefficient": 0.1}))
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.update(samples, *totals(samples))["kl_reference"] == 0
    # Steps this small are lost in bfloat16, and must not be lost here.
    assert not same_weights(start, dict(trainer.model.named_parameters()))
    assert {tensor.dtype for tensor in trainer.snapshot().values()} == {torch.bfloat16}
    trainer.save_checkpoint(tmp_path / "c")
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "c").dtype == torch.bfloat16
    resumed = Trainer(settings(folder, dtype="bfloat16", resume_from=str(tmp_path / "c")))
    assert same_weights(dict(trainer.model.named_parameters()), dict(resumed.model.named_parameters()))


def test_folders_that_hold_no_vision_language_model(folder: Path, tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            Trainer(settings(path))
        message = str(caught.value)
        assert str(path) in message and "\n" not in message
        return message

    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")

    text = tmp_path / "text"
    text.mkdir()
    (text / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "sees no images" in refused(text)

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (broken / "config.json").write_text(json.dumps(config))
    assert "do not fit" in refused(broken)
    config["text_config"]["intermediate_size"] //= 2
    config["text_config"]["num_hidden_layers"] += 1
    (broken / "config.json").write_text(json.dumps(config))
    assert "missing keys" in refused(broken)
    with pytest.raises(UserError, match=r"has neither trainer_state\.pt nor .* --resume continues"):
        Trainer(settings(folder, resume_from=str(folder)))


def test_all_ranks_say_that_a_screenshot_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(settings(folder))
    other = collectives._report(UnknownScreenshotError("screenshot 12 is not held"))
    monkeypatch.setattr(collectives, "all_sum", lambda values, device: [value + 1 for value in values])
    monkeypatch.setattr(collectives, "all_gather", lambda value: [value, other])
    with pytest.raises(UnknownScreenshotError, match="another rank could not read its samples: screenshot 12 is not"):
        collectives.raise_together(None, "read its samples", trainer.device)
    with pytest.raises(UnknownScreenshotError, match="mine"):
        collectives.raise_together(UnknownScreenshotError("mine"), "read its samples", trainer.device)


def test_a_thread_takes_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    for name in ("cpu", "cuda", "cuda:3"):
        assert collectives.take(torch.device(name)) == torch.device(name)
    assert taken == [torch.device("cuda:3")]
