"""What verl and trl make of the same tokens: `reference_losses.py FOLDER IN OUT`, run by `test_algo_references`.

FOLDER is where `pip install --no-deps --target FOLDER verl==0.9.1 trl==1.16.0` put them. Their equations need torch
alone; what their packages import besides and this machine lacks (Ray, datasets, ...) is stood in for by empty modules.
That is why this is a process of its own: nothing else may meet those modules.

IN holds the tensors of each case, padded as both want them: [steps, longest response] with a mask. OUT gets values
and, where a loss has one, its gradient by log π.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ABSENT = ("codetiming", "datasets", "omegaconf", "orjson", "pandas", "pyarrow", "ray", "tensordict", "torchdata")


class Empty(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on the path, so it finds only what is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def with_gradient(loss: Any, by: torch.Tensor) -> dict[str, torch.Tensor]:
    (gradient,) = torch.autograd.grad(loss, by)
    return {"loss": loss.detach(), "gradient": gradient}


def verl_results(case: dict[str, Any]) -> dict[str, Any]:
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils import torch_functional
    from verl.workers.config import ActorConfig

    mask, old, reference = case["mask"], case["old"], case["reference"]
    results: dict[str, Any] = {}
    log_ratio = old - case["behaviour"]
    for name, level, threshold in (
        ("truncated token", "token", case["cap"]),
        ("truncated sequence", "sequence", case["cap"]),
        ("masked token", "token", f"{case['floor']}_{case['cap']}"),
        ("masked sequence", "sequence", f"{case['floor']}_{case['cap']}"),
    ):
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
        results[f"weight {name}"] = weights

    def config(aggregation: str, bound: float) -> Any:
        return ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=case["clip_low"],
            clip_ratio_high=case["clip_high"], clip_ratio_c=bound, loss_agg_mode=aggregation,
            global_batch_info={"loss_scale_factor": case["length"]},
        )  # fmt: skip

    for kind, name, bound in (
        ("vanilla", "vanilla", 1e9), ("vanilla", "dual", 3.0), ("gspo", "gspo", 1e9), ("cispo", "cispo", 1e9)
    ):  # fmt: skip
        for aggregation in ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"):
            new = case["new"].clone().requires_grad_()
            loss, _ = core_algos.get_policy_loss_fn(kind)(
                old_log_prob=old, log_prob=new, advantages=case["advantages"], response_mask=mask,
                loss_agg_mode=aggregation, config=config(aggregation, bound),
                rollout_is_weights=results["weight truncated token"],
            )  # fmt: skip
            results[f"{name} {aggregation}"] = with_gradient(loss, new)
    for kind in ("k1", "k2", "k3"):
        new = case["new"].clone().requires_grad_()
        estimate = core_algos.kl_penalty(new, reference, kind)
        results[kind] = {"values": estimate.detach()} | with_gradient((estimate * mask).sum(), new)
    scores = torch.zeros_like(old)
    scores[:, 0] = case["rewards"]
    for normalise in (True, False):
        advantages, _ = core_algos.compute_grpo_outcome_advantage(
            scores.clone(), mask, case["groups"].numpy(), epsilon=0.0, norm_adv_by_std_in_grpo=normalise
        )
        results[f"advantages {normalise}"] = advantages[:, 0]
    results["entropy"] = torch_functional.entropy_from_logits(case["logits"])
    return results


class Alone:
    """As much of an accelerator as one process needs."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, reduction: str) -> Any:
        return value

    def pad_across_processes(self, value: Any, dim: int, pad_index: float) -> Any:
        return value


def trl_results(case: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer's loss has no function of its own, so the method is called on what it reads of a trainer."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = case["mask"]
    results: dict[str, Any] = {}
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo"):
        for level in ("token", "sequence"):
            new = case["new"].clone().requires_grad_()
            trainer = types.SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *_, new=new, **__: (new, case["entropy"], None),
                aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=case["beta"],
                importance_sampling_level=level, loss_type=kind, epsilon_low=case["clip_low"],
                epsilon_high=case["clip_high"] + (1 if kind == "cispo" else 0), use_vllm=True,
                vllm_importance_sampling_correction=True, model=types.SimpleNamespace(training=True),
                current_gradient_accumulation_steps=1, max_completion_length=case["length"], accelerator=Alone(),
                args=types.SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
                _entropy_bonus_enabled=kind == "bnpo", use_adaptive_entropy=False, entropy_coef=case["entropy_coef"],
                _metrics={"train": defaultdict(list)},
            )  # fmt: skip
            weight = case["weight"] if level == "token" else torch.ones_like(mask)
            loss = GRPOTrainer._compute_loss(
                trainer,
                None,
                {
                    "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0], "completion_ids": mask,
                    "completion_mask": mask, "advantages": case["advantages"][:, 0],
                    "old_per_token_logps": case["old"], "ref_per_token_logps": case["reference"],
                    "importance_sampling_ratio": weight, "num_items_in_batch": mask.sum(),
                },
            )  # fmt: skip
            results[f"{kind} {level}"] = with_gradient(loss, new)
    trainer = types.SimpleNamespace(accelerator=Alone())
    # Its tokens are our steps: one group after the other, as rows of one.
    entropies = case["step_entropies"]
    results["selected"] = torch.stack(
        [
            GRPOTrainer.get_high_entropy_mask(trainer, one[None], torch.ones(1, len(one)), case["quantile"])[0]
            for one in entropies
        ]
    )
    return results


def main(folder: str, source: str, target: str) -> None:
    sys.path.append(folder)
    sys.meta_path.append(Stand())
    cases = torch.load(source)
    torch.save([{"verl": verl_results(case), "trl": trl_results(case)} for case in cases], target)


if __name__ == "__main__":
    main(*(str(Path(argument)) for argument in sys.argv[1:]))
