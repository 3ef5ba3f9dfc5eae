"""`trainer.lora`: only the adapter trains, and everybody else sees a model without one."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.torch

import tiny_model  # noqa: E402
from pydantic import ValidationError  # noqa: E402
from ranks import train_lora as cases  # noqa: E402
from ranks.start import run_ranks  # noqa: E402
from ranks.train_sharded import BOTH, batch  # noqa: E402
from train_samples import alone, mixed, same_bits, settings, totals  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

from dart.errors import UserError  # noqa: E402
from dart.workers.train.adapters.lora import is_adapter  # noqa: E402
from dart.workers.train.adapters.pinned import Slabs  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402

CLOSE = 2e-6
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _small(folder: Path) -> None:
    tiny_model.build(folder, text={"num_hidden_layers": 2}, vision={"depth": 2})


@pytest.fixture(scope="module", params=["qwen3", "qwen2_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    {"qwen3": _small, "qwen2_5": tiny_model.build_windowed}[request.param](path)
    return path


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    """A trainer without an adapter."""
    return Trainer(settings(folder))


def _update(trainer: Trainer) -> dict[str, float]:
    return trainer.update(mixed(groups=2), *totals(mixed(groups=2)))


def _logprobs(trainer: Trainer, *, reference: bool = False) -> Any:
    inputs = trainer._collate([alone(one, trainer.layout) for one in mixed(groups=1)])
    with torch.no_grad():
        return trainer.evaluate_reference(inputs) if reference else trainer.evaluate(inputs)[0]


def _furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("tower", [False, True])
def test_the_adapter_alone_trains_and_others_see_merged_weights(
    folder: Path, base: Trainer, tmp_path: Path, tower: bool
) -> None:
    trainer = Trainer(settings(folder, lora={"tower": tower}, loss={"kl_coefficient": 0.1}))
    plain = base.snapshot()
    assert _furthest(trainer.snapshot(), plain) == 0, "B begins at zero"
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trained = sum(state.numel() for state in trainer.parameters)
    assert trained == sum(weight.numel() for name, weight in before.items() if is_adapter(name))
    assert _update(trainer)["kl_reference"] == 0
    assert _update(trainer)["kl_reference"] > 0
    after = dict(trainer.model.named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(filter(is_adapter, before))
    assert len(trainer.optimizer.state) == len(trainer.parameters)

    served = trainer.snapshot()
    assert {n: (w.shape, w.dtype) for n, w in served.items()} == {n: (w.shape, w.dtype) for n, w in plain.items()}
    changed = {name for name in served if not torch.equal(served[name], plain[name])}
    matrices = {f"{name}.weight" for name, part in base.model.named_modules() if isinstance(part, torch.nn.Linear)}
    assert changed == {
        n for n in matrices
        if ("language_model" in n and n.split(".")[-2] in TARGETS) or (tower and ".visual." in n)
    }  # fmt: skip
    assert any(".visual." in name for name in changed) == tower
    assert _furthest(trainer.snapshot(), served) == 0, "merging leaves the base as it was"
    assert torch.equal(_logprobs(trainer, reference=True), _logprobs(base)), "switched off, it is the base model"

    trainer.save_checkpoint(tmp_path / "v2")
    merged = Trainer(settings(tmp_path / "v2"))
    assert _furthest(merged.snapshot(), served) == 0
    assert float((_logprobs(merged) - _logprobs(base)).abs().max()) > 0.01
    torch.testing.assert_close(_logprobs(merged), _logprobs(trainer), rtol=0, atol=5e-4)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), tmp_path / "v2" / "adapter"
    ).merge_and_unload()
    assert _furthest({name: weight.detach() for name, weight in loaded.named_parameters()}, served) < 1e-6


def test_an_adapted_layer_computes_what_peft_computes(folder: Path) -> None:
    trainer = Trainer(settings(folder, lora={}))
    _update(trainer)
    layer = trainer.model.get_submodule("model.language_model.layers.0.mlp.up_proj")
    rows = torch.randn(2, 5, layer.in_features, device=trainer.device)
    found = []
    for forward in (layer.forward, type(layer).forward.__get__(layer)):
        layer.zero_grad()
        given = rows.clone().requires_grad_()
        out = forward(given)
        out.square().sum().backward()
        trained = [weight.grad for weight in layer.parameters() if weight.requires_grad]
        found.append([out.detach(), given.grad, *trained])
    assert len(found[0]) == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_tower_encodes_a_screenshot_once_beside_an_adapter(folder: Path) -> None:
    trainer = Trainer(settings(folder, lora={}, loss={"kl_coefficient": 0.1, "entropy_quantile": 0.2}))
    for _ in range(2):
        _update(trainer)
    assert trainer.encoded is not None
    assert trainer.encoded.encoded == len({image.sha256 for one in mixed(groups=2) for image in one.images})


@same_bits
def test_a_resumed_trainer_goes_on_as_if_nothing_had_happened(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}, "dtype": "bfloat16",
        "loss": {"kl_coefficient": 0.1}, "freeze_vision": True, "gradient_checkpointing": True,
    }  # fmt: skip
    trainer = Trainer(settings(folder, **options))
    _update(trainer)
    trainer.save_checkpoint(tmp_path / "v1")
    resumed = Trainer(settings(folder, resume_from=tmp_path / "v1", **options))
    assert (resumed.updates, resumed.version) == (1, 1)
    assert _update(resumed)["loss"] == _update(trainer)["loss"]
    for (name, one), other in zip(trainer.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert {weight.dtype for weight in resumed.snapshot().values()} == {torch.bfloat16}


def test_what_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other, saved = tmp_path / "one", tmp_path / "other", tmp_path / "saved"
    _small(folder)
    tiny_model.build(other, seed=1, text={"num_hidden_layers": 2}, vision={"depth": 2})
    trainer = Trainer(settings(folder, lora={}))
    trainer.save_checkpoint(saved)
    shutil.copytree(saved, plain := tmp_path / "plain")
    shutil.rmtree(plain / "adapter")
    for model, resumed, lora, told in (
        (folder, saved, None, r"checkpoint .* was made with trainer\.lora"),
        (folder, plain, {}, r"trainer\.lora: .* has no adapter"),
        (folder, saved, {"rank": 8}, r"trainer\.lora\.rank is 8, and was 16"),
        (folder, saved, {"alpha": 8}, r"trainer\.lora\.alpha is 8, and was 32"),
        (folder, saved, {"target_modules": ["q_proj"]}, "target_modules, tower or model.dtype"),
        (folder, saved, {"tower": True}, "target_modules, tower or model.dtype"),
        (other, saved, {}, r"model\.path: the adapter in .* was trained with other base weights"),
        (folder, None, {"target_modules": ["qkv"]}, r"no linear layer qkv: choose from down_proj, gate_proj"),
    ):
        with pytest.raises(UserError, match=told):
            Trainer(settings(model, lora=lora, resume_from=resumed))
    (saved / "adapter" / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"checkpoint .*saved: its adapter cannot be read .*: remove that folder"):
        Trainer(settings(folder, lora={}, resume_from=saved))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"PEFT is not installed: install dart's extra `train`"):
        Trainer(settings(folder, lora={}))


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        ({"dropout": 0.1}, "log-probabilities differ from those of the replicas: leave it out"),
        ({"rank": 0}, "greater than or equal to 1"),
        ({"target_modules": []}, "at least 1 item"),
        ({"target_modules": [".*"]}, "is not the last part of a layer's name"),
        ({"tower": True, "sync": "adapter"}, "use sync: merged, or leave tower out"),
    ],
)
def test_a_wrong_setting_is_refused(tmp_path: Path, lora: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        settings(tmp_path, lora=lora)


def test_two_ranks_that_share_the_weights_train_as_one_does(tmp_path: Path) -> None:
    one, other, out = tmp_path / "one", tmp_path / "other", tmp_path / "out"
    _small(one)
    tiny_model.build_windowed(other)
    out.mkdir()
    single = Trainer(settings(one, **cases.LORA, loss=BOTH))
    start = single.snapshot()
    single.update(batch(), *totals(batch()))
    single.save_checkpoint(tmp_path / "earlier")
    first = single.snapshot()
    metrics = single.update(batch(), *totals(batch()))
    run_ranks(Path(cases.__file__), [str(path) for path in (one, other, tmp_path / "earlier", out)])

    def had(name: str, rank: int = 0) -> Any:
        return torch.load(out / f"{name}-{rank}.pt", weights_only=False)

    result = had("sharded")
    assert _furthest(result["start"], start) == 0
    assert _furthest(first, start) > 10 * CLOSE
    assert _furthest(result["first"], first) <= CLOSE
    assert _furthest(result["second"], single.snapshot()) <= CLOSE
    assert result["metrics"]["kl_reference"] == pytest.approx(metrics["kl_reference"], abs=1e-5)
    assert result["metrics"]["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-3)
    assert result["held"] == pytest.approx({"weights": 0.5, "moments": 0.5}, abs=1e-3)
    assert _furthest(result["again"], result["first"]) == _furthest(result["second again"], result["second"]) == 0
    assert had("sharded", rank=1)["second"] == {}
    assert _furthest(had("from_one_rank")["weights"], single.snapshot()) <= CLOSE
    resumed = Trainer(settings(one, **cases.LORA, loss=BOTH, resume_from=out / "checkpoints" / "v1"))
    assert _furthest(resumed.snapshot(), result["first"]) == 0
    tower = Trainer(settings(one, **cases.TOWER))
    metrics = tower.update(batch(), *totals(batch()))
    assert any(not one.images for one in batch()), "as a micro-batch of its own"
    assert _furthest(had("tower")["weights"], tower.snapshot()) <= CLOSE
    assert had("tower")["metrics"]["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-3)
    family = had("another_family")
    assert family["kl"][0] == 0 < family["kl"][1]
    assert {tensor.dtype for tensor in family["weights"].values()} == {torch.bfloat16}


def test_pinned_copies_do_not_overlap_and_waste_little() -> None:
    shapes = [(151, 100), (7,), (), (1000, 3), (40, 50), (1, 1), (300, 300)] * 3
    sizes = [2 * torch.Size(shape).numel() for shape in shapes]
    slabs = Slabs(pinned=False)
    tensors = [slabs.empty(torch.Size(shape), torch.bfloat16) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())
    assert sum(sizes) <= slabs.allocated_bytes < 2 * sum(sizes)
    # transformers copies tensors that share a storage before it saves them.
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes
    del slabs
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors)), "they keep their slab"


def test_slabs_of_a_large_model_waste_a_tenth() -> None:
    """Sizes of UI-TARS-1.5-7B, on a device without memory."""
    with torch.device("meta"):
        slabs = Slabs(pinned=False)
        shapes = [(152064, 3584)] * 2
        for _ in range(28):
            shapes += [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), *[(18944, 3584)] * 3]
        for _ in range(32):
            shapes += [(3840, 1280), (1280, 1280), *[(3420, 1280)] * 3]
        for shape in shapes:
            slabs.reserve(2 * torch.Size(shape).numel())
    needed = sum(2 * torch.Size(shape).numel() for shape in shapes)
    assert needed > 16e9 and slabs.allocated_bytes < 1.12 * needed


def test_frozen_weights_are_narrow_before_they_move_to_the_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[set[torch.dtype]] = []
    to = torch.nn.Module.to

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved.append({weight.dtype for weight in self.parameters() if not weight.requires_grad})
        return to(self, *args, **kwargs)

    monkeypatch.setattr("transformers.PreTrainedModel.to", told)
    Trainer(settings(folder, dtype="bfloat16", lora={}))
    assert moved and all(dtypes == {torch.bfloat16} for dtypes in moved), "a GPU may have no room for float32"
