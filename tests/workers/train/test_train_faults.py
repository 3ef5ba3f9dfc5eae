"""Samples that come to no number, and folders that are damaged: what is left out, what is skipped, who is named."""

from __future__ import annotations

import hashlib
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from train_samples import mixed, sample, screenshot, settings, text, totals  # noqa: E402

from dart.errors import UserError  # noqa: E402
from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.wire.convert import sample_from_proto  # noqa: E402
from dart.workers.train import batch as batches  # noqa: E402
from dart.workers.train import checkpoint  # noqa: E402
from dart.workers.train.errors import NonFiniteError, SampleError  # noqa: E402
from dart.workers.train.model import check_folder  # noqa: E402
from dart.workers.train.passes.runner import Alone, Passed  # noqa: E402
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


def dealt(trainer: Trainer, samples: list[pb.Sample]) -> list[set[str]]:
    """The trajectories of each minibatch of the trainer's next update."""
    minibatches = trainer._read(samples, ())
    return [{one.trajectory_id for row in rows for one in row.samples} for rows in minibatches]


@pytest.mark.parametrize("entropy_quantile", [0.0, 0.4])
def test_a_later_minibatch_without_a_number_costs_its_own_step_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, entropy_quantile: float
) -> None:
    trainer = trainer_of(folder, minibatches=2, loss={"entropy_quantile": entropy_quantile})
    forward = trainer._forward

    def broken(model: Any, inputs: Any) -> Any:
        logprobs, entropy = forward(model, inputs)
        return torch.where(inputs.advantages == POISON, torch.nan, logprobs), entropy

    monkeypatch.setattr(trainer, "_forward", broken)
    _, later = dealt(trainer, mixed(groups=3))
    samples = with_advantage(POISON, *later)
    before = trainer.snapshot()
    metrics = trainer.update(samples, *totals(samples))
    assert (metrics["steps_taken"], metrics["steps_skipped"]) == (1, 1)
    assert metrics["samples_left_out"] == len(later) > 0
    assert metrics["gradient_norm"] > 0
    *left_out, skipped = trainer.remarks
    assert skipped == "nothing of a minibatch was left to train on: the optimiser's step was skipped"
    assert len(left_out) == len(later) and all("its log-probs are not finite" in line for line in left_out)
    assert any(not torch.equal(before[name], value) for name, value in trainer.snapshot().items())


def test_weights_that_only_a_later_minibatch_shows_to_be_no_numbers_end_the_update_before_its_first_step(
    folder: Path,
) -> None:
    trainer = trainer_of(folder, minibatches=2)
    words = {"one": "<", "other": ">"}
    samples = [sample(name, word, "12", 1.0, [screenshot(n)]) for n, (name, word) in enumerate(words.items())]
    _, (later,) = dealt(trainer, samples)
    with torch.no_grad():
        # No other sample has this token, so all numbers of the first minibatch are finite.
        trainer.model.get_input_embeddings().weight[text(words[later])[0]] = torch.nan
    with pytest.raises(NonFiniteError, match="the weights are not finite") as caught:
        trainer.update(samples, *totals(samples))
    assert not caught.value.weights_changed


def test_samples_that_break_the_gradient_twice_are_named(folder: Path) -> None:
    trainer = trainer_of(folder)
    before = trainer.snapshot()
    samples = with_advantage(PITFALL, "0-1", "2-2")
    metrics = trainer.update(samples, *totals(samples))
    assert (metrics["samples_left_out"], metrics["steps_skipped"], metrics["gradient_norm"]) == (0, 1, 0)
    assert "the optimiser's step was skipped" in trainer.remarks[0]
    named = "at 2 steps in a row: the cause is trajectories 0-1, 2-2 of groups 0, 2"
    with pytest.raises(SampleError, match=named) as caught:
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
    with pytest.raises(SampleError, match="no sample of a minibatch gives finite numbers") as caught:
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


def out_of_memory(trainer: Trainer, *, backward: bool, rows: int, length: int = 10**9) -> list[tuple[int, int]]:
    """From now on a micro-batch of more rows than this, or as long as this, does not fit. Returns the shapes tried."""
    tried = []

    def too_much(hidden: Any) -> bool:
        return bool(hidden.shape[0] > rows or hidden.shape[1] >= length)

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        tried.append((hidden.shape[0], hidden.shape[1]))
        if not backward and too_much(hidden):
            raise torch.OutOfMemoryError("injected")

    def raising(_gradient: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    def after(_module: Any, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if backward and hidden.requires_grad and too_much(hidden):
            hidden.register_hook(raising)

    layer = trainer.model.get_decoder().layers[0]
    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)
    return tried


@pytest.mark.parametrize(("where", "adapter"), [("forward", {}), ("backward", {}), ("backward", {"lora": {}})])
def test_a_micro_batch_that_does_not_fit_is_halved_and_changes_nothing(
    folder: Path, where: str, adapter: dict[str, Any]
) -> None:
    if adapter:
        pytest.importorskip("peft")
    samples = mixed(groups=3)
    rate = {"learning_rate": 2e-6, "loss": {"entropy_quantile": 0.4, "kl_coefficient": 0.1}, **adapter}
    roomy, full = (Trainer(settings(folder, microbatch_tokens=400, **rate)) for _ in range(2))
    tried = out_of_memory(full, backward=where == "backward", rows=1)
    expected, metrics = (one.update(samples, *totals(samples)) for one in (roomy, full))
    assert max(rows for rows, _ in tried) > 1
    assert metrics["microbatches"] > expected["microbatches"]
    for name in ("loss", "gradient_norm", "selected_share"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
    ours, theirs = full.snapshot(), roomy.snapshot()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)
    told = r"a micro-batch of \d+ rows of up to \d+ tokens did not fit .* was halved: lower trainer\.microbatch_tokens"
    assert full.remarks and all(re.fullmatch(told, line) for line in full.remarks)
    assert (roomy.token_limit, full.token_limit <= 200) == (400, True)


def test_micro_batches_that_are_all_too_large_are_each_computed_once_in_vain(folder: Path) -> None:
    """A backward pass that fails begins the whole minibatch again, which must not cost all the others each time."""
    samples = mixed(groups=12)
    trainer = Trainer(settings(folder, microbatch_tokens=150))
    rows = batches.make_rows([sample_from_proto(one, {}) for one in samples], 150, trainer.layout)
    halvings = sum(len(part) - 1 for part in batches.cut(rows, 150))
    tried = out_of_memory(trainer, backward=True, rows=1)
    trainer.update(samples, *totals(samples))
    assert halvings >= 10
    assert sum(count > 1 for count, _ in tried) == halvings
    assert len(tried) <= halvings + 3 * len(rows)


class Told(Alone):
    """Notes, when a pass has failed, whether anybody still holds what it was about."""

    def __init__(self) -> None:
        self.about: weakref.ref[Any] | None = None
        self.held: list[bool] = []

    def run(self, name: str, work: Callable[[], Any], *, keep_graph: bool = False) -> Passed[Any]:
        passed = super().run(name, work, keep_graph=keep_graph)
        if passed.trouble is not None and self.about is not None:
            self.held.append(self.about() is not None)
        return passed


def test_a_backward_pass_that_fails_leaves_nothing_behind_that_fills_the_memory(folder: Path) -> None:
    """What a rank that shares weights then still has to take part in needs memory of its own."""
    trainer, runner = Trainer(settings(folder, microbatch_tokens=400)), Told()
    trainer._runner = runner

    def after(_module: Any, _args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad and hidden.shape[0] > 1:
            runner.about = weakref.ref(hidden)

    trainer.model.get_decoder().layers[0].register_forward_hook(after)
    out_of_memory(trainer, backward=True, rows=1)
    trainer.update(mixed(groups=3), *totals(mixed(groups=3)))
    assert runner.held and not any(runner.held)


def test_memory_that_a_library_does_not_find_is_no_fault_of_the_samples() -> None:
    def fails(words: str) -> Callable[[], None]:
        def work() -> None:
            raise RuntimeError(words)

        return work

    passed = Alone().run("loss", fails("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert isinstance(passed.trouble, torch.OutOfMemoryError) and not passed.all_passed
    with pytest.raises(RuntimeError, match="size mismatch"):
        Alone().run("loss", fails("size mismatch"))


def test_a_sample_that_does_not_fit_alone_is_left_out_and_named(folder: Path) -> None:
    trainer, without = (Trainer(settings(folder, microbatch_tokens=400, learning_rate=2e-6)) for _ in range(2))
    out_of_memory(trainer, backward=False, rows=9, length=120)
    long = [sample("long", "go" * 60, "12345", advantage, [screenshot(7)], group="l") for advantage in (1.0, 0.0)]
    with_it, silent = [*mixed(groups=1), long[0]], [*mixed(groups=1), long[1]]
    metrics = trainer.update(with_it, *totals(with_it))
    assert (metrics["samples_left_out"], metrics["steps_taken"]) == (1, 1)
    assert trainer.remarks[-1].startswith("sample long/0 of group l was left out of the update: its ")
    assert "tokens alone do not fit the device's memory: set trainer.gradient_checkpointing" in trainer.remarks[-1]
    assert metrics["gradient_norm"] == pytest.approx(without.update(silent, *totals(silent))["gradient_norm"], rel=1e-4)
    with pytest.raises(SampleError, match=r"finite numbers and fits the device's memory: \['long'\]"):
        trainer.update([long[0]], *totals([long[0]]))


@pytest.mark.parametrize("left", ["half of it", "text", "code"])
def test_a_damaged_state_of_the_trainer_names_the_checkpoint_and_the_remedy(left: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    file = tmp_path / "trainer_state.pt"
    torch.save({"optimizer": optimizer.state_dict()}, file)
    if left == "code":
        torch.save({"optimizer": Path("a class that is not on the list")}, file)
    else:
        file.write_bytes(file.read_bytes()[:500] if left == "half of it" else b"what is this?")
    with pytest.raises(UserError, match=r"trainer_state\.pt is damaged .*--resume continues") as told:
        checkpoint.resume(tmp_path, model, optimizer)  # type: ignore[arg-type]
    assert str(tmp_path) in str(told.value) and "weights_only" not in str(told.value)


def test_a_model_with_code_of_its_own_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    told = {"model_type": "ours", "auto_map": {"AutoConfig": "configuration_ours.OurConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    (tmp_path / "configuration_ours.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match=r"config\.json in .* cannot be read"):
        check_folder(tmp_path)
    assert not asked
