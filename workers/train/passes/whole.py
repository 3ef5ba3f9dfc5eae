"""The policy and the reference of a rank that holds all weights; `dart.workers.train.sharding` has the other case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from dart.config import TrainWorkerConfig
from dart.workers.train.adapters import lora as adapters
from dart.workers.train.batch import MicroBatch
from dart.workers.train.model import load_model
from dart.workers.train.passes.runner import Alone, PassRunner
from dart.workers.train.policy import Blank, Policy

MakePolicy = Callable[[PreTrainedModel, Blank | None], Policy]
Forward: TypeAlias = Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]]
"""As `Policy.forward`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A policy, the reference if the loss has one, and whether its passes are kept in step with other ranks'."""

    policy: Policy
    reference: Forward | None
    runner: PassRunner


def load(config: TrainWorkerConfig, folder: Path, device: torch.device, make_policy: MakePolicy) -> Ready:
    """Load the policy from the folder, and the reference from `model.path`. Raises UserError.

    The reference is float32, as the policy is, and computes in the same dtype, so that the KL to it is exactly 0 at the
    start. With an adapter, it is the policy without it.
    """
    lora, referred = config.trainer.lora, config.trainer.loss.kl_coefficient > 0

    def prepare(model: PreTrainedModel) -> None:
        if lora is not None:
            adapters.attach(model, lora, config.seed)
            # Before it moves to a GPU, which may have no room for all of it in float32.
            adapters.hold_narrow(model, getattr(torch, config.model.dtype))

    policy = make_policy(load_model(folder, device, prepare), None)
    if not referred:
        return Ready(policy, None, Alone())
    if lora is not None:
        return Ready(policy, adapters.SwitchedOff(policy), Alone())
    return Ready(policy, make_policy(load_model(config.model.folder, device).requires_grad_(False), None), Alone())
