"""How many floating-point operations the passes of an update take, by the loads that they had."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from dart.core.capacity.shape import UnknownShape, read_shape
from dart.core.capacity.work import Load, Passes, Work, backward, forward
from dart.workers.train import collectives


@dataclass
class Operations:
    """The passes that a rank's models have made since `begin`: the policy's and the reference's."""

    forwards: list[Load] = field(default_factory=list)
    backwards: list[Load] = field(default_factory=list)

    def begin(self) -> None:
        """Of an update."""
        self.forwards.clear()
        self.backwards.clear()

    def metrics(self, model: PreTrainedModel, passes: Passes, device: torch.device) -> dict[str, float]:
        """`model_operations` and `recomputed_operations`, as in `core.capacity.work.Work`, over all ranks; nothing for
        a model of an unknown family. All ranks call it at the same time.

        passes: says what a backward pass goes through. A pass that is made again, because memory ran out or a sample
        was left out, counts each time.
        """
        try:
            shape = read_shape(model.config.to_dict())
        except UnknownShape:
            return {}
        done = [Work(forward(shape, load), 0.0) for load in self.forwards]
        done += [backward(shape, load, passes) for load in self.backwards]
        sums = sum(one.model for one in done), sum(one.recomputed for one in done)
        return dict(zip(("model_operations", "recomputed_operations"), collectives.all_sum(sums, device), strict=True))
