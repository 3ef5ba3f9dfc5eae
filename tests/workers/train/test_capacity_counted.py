"""The estimates of `dart.core.capacity` against the bytes of real tiny models on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from capacity_samples import QWEN3_VL_8B, TINY_QWEN2_5

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from train_samples import fusing  # noqa: E402, F401
from transformers import AutoConfig, AutoModelForImageTextToText  # noqa: E402

from benchmarks.gpu.models import UI_TARS_7B  # noqa: E402
from dart.config import BUILTIN_MODELS, Lora  # noqa: E402
from dart.core.capacity import memory  # noqa: E402
from dart.core.capacity.memory import Prompts, TrainerSetUp  # noqa: E402
from dart.core.capacity.shape import read_shape  # noqa: E402
from dart.workers.train import vision  # noqa: E402
from dart.workers.train.adapters import lora as adapters  # noqa: E402
from dart.workers.train.kernels import fused  # noqa: E402

GRID = (1, 16, 18)
PATCHES, TOKENS = 288, 450
"""Sizes that no weight has, so that weights can be told from activations."""
TINY_QWEN3: dict[str, Any] = json.loads((BUILTIN_MODELS / "tiny-qwen3vl" / "config.json").read_text())
_LARGE_QWEN3 = {**QWEN3_VL_8B, "text_config": {**QWEN3_VL_8B["text_config"], "model_type": "qwen3_vl_text"}}
TINY = {"qwen2_5": TINY_QWEN2_5, "qwen3": TINY_QWEN3}
CLOSE = 0.05


@pytest.fixture(autouse=True)
def _layer_norms_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast computes them in float32 there, and in bfloat16 on a CPU (torch's lists of operations)."""
    forward = torch.nn.LayerNorm.forward

    def widened(norm: Any, rows: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return forward(norm, rows)
        with torch.autocast("cpu", enabled=False):
            weight, bias = norm.weight.float(), norm.bias.float()
            return torch.nn.functional.layer_norm(rows.float(), norm.normalized_shape, weight, bias, norm.eps)

    monkeypatch.setattr(torch.nn.LayerNorm, "forward", widened)


def _model(document: dict[str, Any], fuse: bool = False) -> Any:
    config = AutoConfig.for_model(**document)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    vision.speed_up(model)
    if fuse:
        # Keeps what the compiler for GPUs keeps, without building anything.
        fused.speed_up(model, backend="aot_eager_decomp_partition")
    return model


class Kept:
    """Bytes that autograd keeps while this is open, each storage once, without weights and their casts."""

    def __init__(self, model: Any) -> None:
        self._storages: dict[int, Any] = {}
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
        self._shapes |= {shape[::-1] for shape in self._shapes}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights and tuple(tensor.shape) not in self._shapes:
            self._storages.setdefault(storage.data_ptr(), tensor)  # the tensor keeps its storage from being used again
        return tensor

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._storages.values())


def _kept(model: Any, *, mixed: bool) -> tuple[int, int]:
    """Bytes kept by the tower over PATCHES patches, and by the decoder over TOKENS tokens."""
    settings = model.config.vision_config
    pixels = torch.randn(PATCHES, 3 * 2 * settings.patch_size**2)
    ids = torch.full((1, TOKENS), 8)
    ids[0, 2 : 2 + PATCHES // 4] = model.config.image_token_id
    positions = torch.arange(TOKENS).expand(3, 1, -1)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        with Kept(model) as tower:
            images = model.model.get_image_features(pixels, torch.tensor([GRID]), return_dict=True)
        images.pooler_output = tuple(one.detach() for one in images.pooler_output)
        if getattr(images, "deepstack_features", None) is not None:
            images.deepstack_features = [tuple(one.detach() for one in level) for level in images.deepstack_features]
        with Kept(model) as decoder:
            model.model(input_ids=ids, position_ids=positions, use_cache=False, mm_encoder_outputs={"image": images})
    return tower.bytes, decoder.bytes


@pytest.mark.parametrize("document", [UI_TARS_7B, _LARGE_QWEN3], ids=["ui_tars_7b", "qwen3_vl_8b"])
def test_the_released_models_have_as_many_weights_in_transformers(document: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**document))
    assert sum(parameter.numel() for parameter in model.parameters()) == read_shape(document).weights


@pytest.mark.parametrize("family", TINY)
def test_what_a_rank_keeps_between_steps_is_counted_exactly(family: str) -> None:
    model, shape = _model(TINY[family]), read_shape(TINY[family])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    needs = memory.of_rank(shape, TrainerSetUp(mixed=False), Prompts(100, 0, 0)).parts
    assert needs["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    assert needs["gradients"] == sum(parameter.grad.nbytes for parameter in model.parameters())
    moments = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert needs["optimiser state"] == moments
    assert shape.vision.weights == sum(parameter.numel() for parameter in model.model.visual.parameters())


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("in_tower", [False, True])
@pytest.mark.usefixtures("fusing")
def test_what_autograd_keeps_beside_an_adapter_is_what_is_estimated(
    family: str, mixed: bool, fuse: bool, in_tower: bool
) -> None:
    pytest.importorskip("peft")
    model, lora = _model(TINY[family], fuse), Lora(rank=24, tower=in_tower)
    adapters.attach(model, lora, seed=0)
    if mixed:
        adapters.hold_narrow(model, torch.bfloat16)
    shape = read_shape(TINY[family])
    set_up = TrainerSetUp(mixed=mixed, lora_rank=24, lora_targets=lora.target_modules, lora_tower=in_tower,
                         fused=fuse)  # fmt: skip
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert held == memory.of_rank(shape, set_up, Prompts(100, 0, 0)).parts["weights"]
    tower, decoder = _kept(model, mixed=mixed)
    of_tower = memory.activations(shape, set_up, 0, PATCHES)
    assert (tower > 0) is in_tower
    assert of_tower == pytest.approx(tower, rel=CLOSE)
    assert memory.activations(shape, set_up, TOKENS, 0) == pytest.approx(decoder, rel=CLOSE)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("family", TINY)
@pytest.mark.usefixtures("fusing")
def test_what_autograd_keeps_is_what_is_estimated(family: str, mixed: bool, fuse: bool, checkpointing: bool) -> None:
    model = _model(TINY[family], fuse)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    tower, decoder = _kept(model, mixed=mixed)
    shape, set_up = read_shape(TINY[family]), TrainerSetUp(mixed=mixed, fused=fuse, checkpointing=checkpointing)
    assert memory.activations(shape, set_up, TOKENS, 0) == pytest.approx(decoder, rel=CLOSE)
    assert memory.activations(shape, set_up, 0, PATCHES) == pytest.approx(tower, rel=CLOSE)
