"""Which adapters a replica refuses, in the place of serving a part of them. vLLM is a stand-in here; the real one is in
test_rollout_adapter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_alone.stand_ins import replaced_modules  # noqa: E402

from dart.workers.weights.transfer import ADAPTER_PREFIX, ADAPTER_SLOT  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "dart.workers.weights.vllm_adapter"


class Manager:
    """vLLM's manager of adapters. It knows the layer `qkv`, in whose place PEFT has three, and passes over others."""

    def __init__(self) -> None:
        self.modules = {"qkv": None}
        self.model = torch.nn.ModuleDict({"qkv": torch.nn.Identity(), "mlp": torch.nn.Identity()})
        self.lora_config = SimpleNamespace(lora_dtype=torch.float32)
        self.served: list[int] = []

    def remove_adapter(self, slot: int) -> None:
        self.served.clear()

    def add_adapter(self, adapter: Any) -> None:
        adapter.loras["qkv"] = [adapter.loras.pop(name) for name in "qkv"]

    def activate_adapter(self, slot: int) -> None:
        self.served.append(slot)


class Read:
    @staticmethod
    def from_lora_tensors(slot: int, tensors: dict[str, Any], settings: object, **_: object) -> SimpleNamespace:
        return SimpleNamespace(loras={name.removeprefix(ADAPTER_PREFIX).split(".")[0]: None for name in tensors})


@pytest.fixture
def stages() -> SimpleNamespace:
    """The stages of the pipeline."""
    return SimpleNamespace(world_size=1)


@pytest.fixture
def module(stages: SimpleNamespace) -> Iterator[ModuleType]:
    stand_ins: dict[str, dict[str, object]] = {
        "vllm": {},
        "vllm.lora": {},
        "vllm.lora.lora_model": {"LoRAModel": Read},
        "vllm.lora.peft_helper": {"PEFTHelper": SimpleNamespace},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: stages},
    }
    with replaced_modules(stand_ins, NAME):
        yield importlib.import_module(NAME)


@pytest.mark.parametrize(
    ("layers", "pipeline", "lost"),
    [
        ("q k v", 1, ""),
        ("q k v mlp up", 1, r"no layer mlp that could take an adapter \(2 such in all\)"),
        ("q k v up", 2, ""),  # which another stage has
        ("q k v mlp up", 2, r"no layer mlp that could take an adapter \(1 such in all\)"),
    ],
)
def test_an_adapter_of_which_vllm_would_serve_a_part_is_refused(
    module: ModuleType, stages: SimpleNamespace, layers: str, pipeline: int, lost: str
) -> None:
    stages.world_size, manager = pipeline, Manager()
    adapter = module.Adapter(SimpleNamespace(lora_manager=manager), 4, 8, layers.split())
    tensors = {f"{ADAPTER_PREFIX}{name}.lora_{part}.weight": torch.ones(1) for name in layers.split() for part in "AB"}
    if lost:
        with pytest.raises(ValueError, match=lost):
            adapter.take(tensors)
        assert manager.served == []
    else:
        adapter.take(tensors)
        assert manager.served == [ADAPTER_SLOT]
