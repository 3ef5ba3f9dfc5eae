"""One rank of the two of `test_capacity_sharded`: `count_sharded.py FOLDER WINDOWED EARLIER OUT`, as `train_sharded`.

Each case gives the bytes that this rank has of a sharded trainer, by their names in `dart.core.capacity.memory`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from ranks.train_sharded import Cases, batch, main
from torch import nn
from torch.distributed.tensor import DTensor


def here(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes on this rank."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


class Counted(Cases):
    """Each method is a case, run by all ranks at the same time."""

    def float32(self) -> dict[str, int]:
        return self._count()

    def bfloat16(self) -> dict[str, int]:
        return self._count(dtype="bfloat16")

    def windowed(self) -> dict[str, int]:
        return self._count(dtype="bfloat16", folder=self._windowed)

    def frozen_tower(self) -> dict[str, int]:
        return self._count(dtype="bfloat16", freeze_vision=True)

    def adapter(self) -> dict[str, int]:
        return self._count(dtype="bfloat16", lora={"rank": 4})

    def _count(self, **options: Any) -> dict[str, int]:
        """After two updates; "gathered": the most that passes find whole where they use a layer or the head."""
        trainer = self.trainer(loss={"kl_coefficient": 0.1}, **options)
        policy, model = trainer.policy, trainer.model
        found = {"gathered": 0}

        def gathered(*_: object) -> None:
            whole = (one for one in policy.parameters() if not isinstance(one, DTensor))
            found["gathered"] = max(found["gathered"], here(whole))

        def gradients(*_: object) -> None:
            found["gradients"] = here(one.grad for one in trainer.parameters if one.grad is not None)

        units: list[nn.Module] = [*model.get_decoder().layers, *model.model.visual.blocks, model.lm_head]
        for unit in units:
            unit.register_forward_pre_hook(gathered)
        trainer.optimizer.register_step_pre_hook(gradients)
        for _ in range(2):
            self.update(trainer, batch())
        moments = (state[name] for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
        reference = getattr(trainer.reference, "model", None)
        return found | {
            "weights": here(model.parameters()),
            "optimiser state": here(moments),
            "reference": 0 if reference is None else here(reference.parameters()),
        }


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:5]), names=sys.argv[5:], kind=Counted)
