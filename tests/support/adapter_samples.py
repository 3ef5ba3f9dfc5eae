"""A trainer's view of a policy whose adapter alone trains, for engine tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from engine_samples import Trainer, engine_config

from dart.config import Lora
from dart.workers.train.adapters import lora as adapters
from dart.workers.train.adapters.weights import copied_adapter

LORA = Lora(rank=5, alpha=20)  # vLLM makes room for 8


class Adapted(Trainer):
    """Has an adapter, of which alone it sends new versions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        adapters.attach(self.model, LORA, seed=0)

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        for name, weight in self.model.named_parameters():
            if adapters.is_adapter(name):
                weight.data = 0.3 * torch.randn_like(weight)

    def tensors(self) -> list[tuple[str, Any]]:
        return list(copied_adapter(self.model, torch.float32, True, None).items())


def adapter_config(folder: Path, **adapter: Any) -> str:
    told = json.loads(engine_config(folder))
    settings = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    return json.dumps(told | {"adapter": settings} | adapter)
