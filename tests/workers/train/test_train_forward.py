"""The forward pass of training is the plain one: same log-probs, same gradients, however the batch is cut."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from train_samples import PAD, alone, episodes, mixed, read, sample, screenshot, settings, totals  # noqa: E402

from dart.v1 import session_pb2 as pb  # noqa: E402
from dart.wire.convert import image_from_proto  # noqa: E402
from dart.workers.train import batch as batches  # noqa: E402
from dart.workers.train import policy as policies  # noqa: E402
from dart.workers.train.kernels import linear  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402


@pytest.fixture(scope="module")
def folder(each_family: Path) -> Path:
    return each_family


@pytest.fixture(scope="module")
def trainer(folder: Path) -> Trainer:
    return Trainer(settings(folder))


@pytest.fixture(scope="module", autouse=True)
def float32_convolutions() -> Iterator[None]:
    """On a GPU the plain model's would be in TF32, which is 1e-4 off; the trainer has matrix products instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield


def plain_logprobs(trainer: Trainer, plain: Any, one: pb.Sample) -> Any:
    """One sample alone through transformers as it comes: no sharing, no padding, logits everywhere."""
    device = trainer.device
    ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids]], device=device)
    images = trainer.screenshots.get(image_from_proto(image) for image in one.images)
    logits = plain(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == PAD).int(),
        pixel_values=torch.cat([images[image.sha256].pixel_values for image in one.images]).to(device),
        image_grid_thw=torch.tensor([images[image.sha256].grid for image in one.images], device=device),
    ).logits[0, len(one.prompt_token_ids) - 1 : -1]
    logits = logits / trainer.config.temperature
    logits[:, list(trainer.layout.banned)] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(list(one.token_ids), device=device)[:, None])[:, 0]


def logprobs(trainer: Trainer, parts: list[list[batches.Row]]) -> dict[str, Any]:
    """Of every sample by name."""
    found = {}
    for part in parts:
        values, _ = trainer._forward(trainer.policy, trainer._collate(part))
        steps = [step for row in part for step in row.samples]
        for step, value in zip(steps, values.split([len(step.generation.token_ids) for step in steps]), strict=True):
            found[step.name] = value
    return found


def cuts(trainer: Trainer, samples: list[pb.Sample]) -> dict[str, list[list[batches.Row]]]:
    steps = [read(one, trainer.layout) for one in samples]
    shared = batches.make_rows(steps, 4096, trainer.layout)
    single = [alone(one, trainer.layout) for one in samples]
    return {
        "everything in one": [shared],
        "in small parts": batches.cut(shared, 100),
        "nothing shared": [single],
        "one by one": [[row] for row in single],
    }


@pytest.fixture(scope="module")
def plain(folder: Path, trainer: Trainer) -> Any:
    """The model with nothing of ours in it; eager attention, so that not even the kernels are the same."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval().to(trainer.device)


@pytest.mark.parametrize("cutting", ["everything in one", "in small parts", "nothing shared", "one by one"])
def test_logprobs_and_gradients_equal_the_plain_forward(trainer: Trainer, plain: Any, cutting: str) -> None:
    samples = [*mixed(), *episodes()]
    expected = {f"sample {s.trajectory_id}/0": plain_logprobs(trainer, plain, s) for s in samples}
    found = logprobs(trainer, cuts(trainer, samples)[cutting])
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-6, atol=5e-6)

    def gradients(model: Any, values: dict[str, Any]) -> dict[str, Any]:
        model.zero_grad()
        (sum((number + 1) * values[name].mean() for number, name in enumerate(sorted(values))) / 100).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}

    theirs, ours = gradients(plain, expected), gradients(trainer.model, found)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    trainer.model.zero_grad()


def test_padding_does_not_change_a_sample(trainer: Trainer) -> None:
    short = sample("short", "go", "12", 1.0, [screenshot(0)])
    long = sample("long", "go to the other side of the page", "123456789", 1.0, [screenshot(1)])
    alone = logprobs(trainer, cuts(trainer, [short])["one by one"])["sample short/0"]
    padded = logprobs(trainer, cuts(trainer, [short, long])["everything in one"])["sample short/0"]
    torch.testing.assert_close(padded, alone, rtol=0, atol=5e-6)


@pytest.mark.parametrize("bonus", [0.0, 0.1], ids=["", "entropy bonus"])
def test_chunks_of_the_head_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, bonus: float) -> None:
    trainer = Trainer(settings(folder, loss={"entropy_coefficient": bonus}))
    (part,) = cuts(trainer, mixed())["everything in one"]
    inputs = trainer._collate(part)
    chunks: list[int] = []
    trainer.model.lm_head.register_forward_hook(lambda _module, inputs, _output: chunks.append(inputs[0].shape[0]))

    def run() -> tuple[Any, ...]:
        trainer.model.zero_grad()
        found, entropies = trainer.evaluate(inputs)
        weights = torch.linspace(-1.0, 1.0, len(found), device=found.device)
        assert entropies.requires_grad == bool(bonus)
        (weights * found + (weights.flip(0) * entropies if bonus else 0.0)).sum().backward()
        gradients = (trainer.model.lm_head.weight.grad, trainer.model.get_input_embeddings().weight.grad)
        return found.detach(), entropies.detach(), *(one.clone() for one in gradients)

    whole = run()
    assert len(chunks) == 1
    monkeypatch.setattr(policies, "HEAD_ELEMENTS", 264 * 7)
    torch.testing.assert_close(run(), whole, rtol=1e-5, atol=1e-5)
    assert max(chunks[1:]) == 7


def test_the_head_is_float32_under_bfloat16(trainer: Trainer) -> None:
    device = trainer.device
    hidden = torch.randn(40, trainer.model.lm_head.weight.shape[1], device=device)
    ids, banned = torch.arange(40, device=device), torch.tensor([0], device=device)

    def head() -> Any:
        return policies.head(trainer.model.lm_head, hidden, ids, 1.0, banned, False)[0].detach()

    plain = head()
    with torch.autocast(device.type, torch.bfloat16):
        torch.testing.assert_close(head(), plain, rtol=0, atol=1e-6)


def test_head_runs_at_response_positions_only(trainer: Trainer) -> None:
    samples = mixed()
    rows = []
    hook = trainer.model.lm_head.register_forward_hook(lambda _m, inputs, _o: rows.append(inputs[0].shape[0]))
    logprobs(trainer, cuts(trainer, samples)["everything in one"])
    hook.remove()
    assert sum(rows) == totals(samples)[1]


def test_loss_and_gradients_of_an_update_do_not_depend_on_the_cut(folder: Path) -> None:
    """Padding, micro-batches and sharing: the same loss, and the same gradients reach the optimiser."""
    samples = mixed(groups=4)
    results = []
    for tokens in (60, 120, 4096):
        one = Trainer(settings(folder, microbatch_tokens=tokens))
        gradients: list[Any] = []
        one.optimizer.register_step_pre_hook(
            lambda *_, one=one, into=gradients: into.extend(p.grad.clone() for p in one.parameters)
        )
        results.append((one.update(samples, *totals(samples)), gradients))
    first, expected = results[0]
    assert [metrics["microbatches"] for metrics, _ in results] == sorted({m["microbatches"] for m, _ in results})[::-1]
    for metrics, gradients in results[1:]:
        assert metrics["loss"] == pytest.approx(first["loss"], abs=1e-6)
        assert metrics["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-5)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_gradient_checkpointing_computes_again_and_changes_nothing(folder: Path) -> None:
    samples = mixed(groups=2)
    results = []
    for again in (False, True):
        one = Trainer(settings(folder, gradient_checkpointing=again))
        calls: list[int] = []
        gradients: list[Any] = []
        one.model.model.language_model.layers[0].mlp.register_forward_pre_hook(lambda *_, into=calls: into.append(1))
        one.optimizer.register_step_pre_hook(
            lambda *_, one=one, into=gradients: into.extend(p.grad.clone() for p in one.parameters)
        )
        metrics = one.update(samples, *totals(samples))
        results.append((len(calls), metrics["loss"], gradients))
    (calls, loss, gradients), (calls_again, loss_again, gradients_again) = results
    assert calls_again > calls
    assert loss_again == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(gradients_again, gradients, rtol=1e-5, atol=1e-7)


def test_linear_layers_compute_what_they_did_and_in_the_precision_asked_for() -> None:
    torch.manual_seed(0)
    layer, same = torch.nn.Linear(24, 40), torch.nn.Linear(24, 40)
    same.load_state_dict(layer.state_dict())
    linear.speed_up(layer)
    rows, grad = torch.randn(3, 5, 24), torch.randn(3, 5, 40)

    def run(module: Any) -> list[Any]:
        module.zero_grad()
        inputs = rows.clone().requires_grad_()
        output = module(inputs)
        output.backward(grad)
        return [output.detach(), inputs.grad, module.weight.grad, module.bias.grad]

    torch.testing.assert_close(run(layer), run(same), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(rows), same(rows), rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rows).dtype == torch.bfloat16
        assert torch.equal(layer(rows), same(rows))
    assert layer(rows[:0]).shape == (0, 5, 40)


def test_temperature_is_that_of_sampling(folder: Path, plain: Any) -> None:
    hot = Trainer(settings(folder, temperature=2.0))
    one = sample("t", "go", "123", 1.0, [screenshot(0)])
    found = logprobs(hot, cuts(hot, [one])["one by one"])["sample t/0"]
    torch.testing.assert_close(found, plain_logprobs(hot, plain, one), rtol=2e-6, atol=5e-6)


def test_an_update_tells_where_its_time_went_and_what_it_computed(folder: Path) -> None:
    trainer = Trainer(settings(folder, loss={"entropy_quantile": 0.5}))
    image = screenshot(0)
    steps = [sample(name, "go", "12", reward, [image]) for name, reward in (("one", 1.0), ("other", -1.0))]
    metrics = trainer.update(steps, *totals(steps))
    phases = [metrics[f"{name}_seconds"] for name in ("read", "score", "gradient", "step")]
    assert all(seconds > 0 for seconds in phases)
    assert sum(phases) + metrics["reduce_seconds"] <= metrics["update_seconds"]
    lengths = [len(one.prompt_token_ids) + len(one.token_ids) for one in steps]
    assert max(lengths) <= metrics["computed_tokens"] < sum(lengths), "their common prompt is computed once"


@pytest.mark.parametrize("defaults", [None, '{"do_sample": false, "temperature": 1e-06}'])
def test_defaults_of_generation_that_transformers_would_not_save_stay_as_they_are(
    folder: Path, tmp_path: Path, defaults: str | None
) -> None:
    source, file = shutil.copytree(folder, tmp_path / "source"), "generation_config.json"
    (source / file).unlink(missing_ok=True)
    if defaults is not None:
        (source / file).write_text(defaults)
    Trainer(settings(source)).save_checkpoint(tmp_path / "saved")
    saved = tmp_path / "saved" / file
    assert (saved.read_text() if saved.exists() else None) == defaults
