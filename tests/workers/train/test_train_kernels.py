"""Fused kernels compute what transformers computes. They are for GPUs; here they are traced, and not built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from train_samples import alone, episodes, fusing, mixed, settings, totals  # noqa: E402, F401

from dart.errors import UserError  # noqa: E402
from dart.workers.train.kernels import fused  # noqa: E402
from dart.workers.train.trainer import Trainer  # noqa: E402


@pytest.fixture(scope="module")
def folder(each_family: Path) -> Path:
    return each_family


def _computed(trainer: Trainer, dtype: Any) -> list[Any]:
    """Log-probabilities of some steps, and the gradient of their sum for every weight."""
    trainer.model.zero_grad()
    rows = [alone(one, trainer.layout) for one in [*mixed(), *episodes()]]
    with torch.autocast(trainer.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logprobs, _ = trainer.policy(trainer._collate(rows).to(trainer.device))
    logprobs.sum().backward()
    return [logprobs.detach(), *(p.grad.clone() for p in trainer.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.usefixtures("fusing")
def test_the_same_values_and_gradients(folder: Path, checkpointing: bool) -> None:
    trainer = Trainer(settings(folder, gradient_checkpointing=checkpointing, fused_kernels=False))
    before = _computed(trainer, torch.float32)
    plain = [module.forward for module in trainer.model.modules()]
    fused.speed_up(trainer.model, backend="aot_eager")
    switched = [type(m).__name__ for m, old in zip(trainer.model.modules(), plain, strict=True) if m.forward != old]
    assert any("RMSNorm" in name for name in switched) and any("MLP" in name for name in switched)
    after = _computed(trainer, torch.float32)
    assert len(before) == len(after) > 50
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("fusing")
def test_it_rounds_where_transformers_does(folder: Path) -> None:
    """Under autocast, against float32: the error is that of transformers' own way, not a larger one."""
    trainer = Trainer(settings(folder, fused_kernels=False))
    exact, plain = (_computed(trainer, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    fused.speed_up(trainer.model, backend="aot_eager")
    error, own = ((_computed(trainer, torch.bfloat16)[0] - exact).abs().mean(), (plain - exact).abs().mean())
    assert 0 < error < 1.5 * own


def test_what_it_does_not_know_or_cannot_compile_it_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Trainer(settings(folder, fused_kernels=False)).model
    plain = [module.forward for module in model.modules()]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"fused_kernels needs a C compiler .*: install gcc"):
        fused.speed_up(model)
    model.config.model_type = "qwen3_5"
    fused.speed_up(model)
    assert [module.forward for module in model.modules()] == plain


@pytest.mark.usefixtures("fusing")
def test_sharded_weights_and_an_adapter_train_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Trainer._make_policy

    def fused_too(trainer: Trainer, model: Any, blank: Any) -> Any:
        fused.speed_up(model, backend="aot_eager")
        return plain(trainer, model, blank)

    options = {"sharding": "full", "gradient_checkpointing": True, "loss": {"kl_coefficient": 0.1}}
    for more in ({}, {"lora": {}}):
        found = []
        for make in (plain, fused_too):
            monkeypatch.setattr(Trainer, "_make_policy", make)
            trainer = Trainer(settings(folder, **options, **more, fused_kernels=False))
            found.append([trainer.update(mixed(), *totals(mixed())) for _ in range(2)][-1])
        for name in ("loss", "gradient_norm", "kl_reference"):
            assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("width", [44, 48])
def test_channels_that_fill_no_16_bytes_are_padded(width: int) -> None:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

    config = Qwen2_5_VLVisionConfig(hidden_size=32, intermediate_size=width, hidden_act="silu")
    mlp = Qwen2_5_VLMLP(config, bias=True)
    rows = torch.randn(5, 32, requires_grad=True)

    def computed(result: Any) -> list[Any]:
        mlp.zero_grad()
        rows.grad = None
        result.square().sum().backward()
        return [result.detach(), rows.grad, *(weight.grad.clone() for weight in mlp.parameters())]

    expected = computed(mlp(rows))
    assert fused._is_gated(mlp) and fused._missing(mlp) == (4 if width == 44 else 0)
    for one, other in zip(computed(fused._gated(fused.Kernels("eager"), mlp, rows)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
