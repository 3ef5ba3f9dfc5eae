"""Which of vLLM's engine arguments a config may set (`rollout.engine_args`), and why it may not set the others.

Nothing here imports vLLM: only the worker knows the arguments of the vLLM that it has, and refuses unknown ones. What
is refused here would make the replica another policy than the one that is trained, break what the coordinator relies
on, or say again what another field says.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

_PARITY = "the trainer recomputes every log-probability from model.path in model.dtype, and this would change what is "
_STALE = "caches outside of the engine would keep what older weights have computed: leave it out"
_ALONE = "a replica is one engine on one machine: set rollout.replicas instead"
_DISTRIBUTION = "the trainer recomputes log-probabilities without it: leave it out"
_ADAPTERS = "an adapter comes from the trainer: set trainer.lora instead"
_SPECULATION = (
    "a draft model would keep its first weights, and on a CPU vLLM 0.32 then samples from another distribution than "
    "the policy's (docs/decisions.md): leave it out"
)
_QUANTISED = _PARITY + "computed; it is untested how far: leave it out"
_TOKENS = "prompts reach the engine as tokens and whole screenshots, which the trainer has, too: leave it out"

OWNED = {
    "model": "set model.path instead",
    "model_weights": "set model.path instead",
    "dtype": "set model.dtype instead",
    "seed": "set run.seed instead",
    "max_model_len": "set rollout.max_model_len instead",
    "max_num_seqs": "set rollout.slots instead",
    "tensor_parallel_size": "set rollout.tensor_parallel instead",
    "pipeline_parallel_size": "set rollout.pipeline_parallel instead",
    "enforce_eager": "set rollout.enforce_eager instead",
    "kv_cache_memory_bytes": "set rollout.kv_cache_bytes instead",
    "mm_processor_cache_gb": "set rollout.processor_cache_bytes instead",
    "limit_mm_per_prompt": "it follows from agent.history_screenshots and agent.goal_images: set those instead",
    "mm_processor_kwargs": "the trainer resizes screenshots as model.path's preprocessor_config.json says: change that "
    "file, and agent.max_pixels with it",
    "weight_transfer_config": "set sync.transport instead",
    "worker_extension_cls": "weights arrive through dart's own: leave it out",
    "worker_cls": "weights arrive through vLLM's own: leave it out",
    "scheduler_cls": "updates pause and resume vLLM's own: leave it out",
    "load_format": "a replica begins with the weights of model.path: leave it out",
    "logprobs_mode": "the trainer needs the log-probabilities of the distribution that is sampled from: leave it out",
    "max_logprobs": "the trainer needs no others than the sampled token's: leave it out",
    "logits_processors": _DISTRIBUTION,
    "watermark_config": _DISTRIBUTION,
    "generation_config": _DISTRIBUTION,
    "override_generation_config": _DISTRIBUTION,
    "diffusion_config": _DISTRIBUTION,
    "hf_overrides": _PARITY + "loaded: change model.path's config.json",
    "hf_config_path": _PARITY + "loaded: change model.path's config.json",
    "quantization*": "set rollout.quantization instead",
    "kv_cache_dtype*": _QUANTISED,
    "mm_encoder_fp8*": _QUANTISED,
    "mm_encoder_attn_dtype": _QUANTISED,
    "spec_*": _SPECULATION,
    "speculative_config": _SPECULATION,
    "*lora*": _ADAPTERS,
    "*tokenizer*": _TOKENS,
    "runner": _TOKENS,
    "convert": _TOKENS,
    "pooler_config": _TOKENS,
    "language_model_only": _TOKENS,
    "mm_encoder_only": _TOKENS,
    "tokens_only": _TOKENS,
    "kv_transfer_config": _STALE,
    "kv_offloading*": _STALE,
    "ec_transfer_config": _STALE,
    "data_parallel*": _ALONE,
    "enable_elastic_ep": _ALONE,
    "nnodes": _ALONE,
    "node_rank": _ALONE,
    "master_addr": _ALONE,
    "master_port": _ALONE,
    "device_ids": "set CUDA_VISIBLE_DEVICES in rollout.environment instead",
    "prefill_context_parallel_size": "the weights' transfer counts rollout.tensor_parallel times "
    "rollout.pipeline_parallel ranks: use those",
    "_*": "vLLM sets it itself: leave it out",
}
"""Reason and remedy by argument; `*` stands for any characters. The names are those of vLLM 0.32 and 0.33."""


def refused(names: Iterable[str]) -> list[str]:
    """For each of the names that a config may not set, one sentence that says why not and what to do."""
    return [
        f"{name} cannot be set: {why}"
        for name in names
        if (why := next((why for owned, why in OWNED.items() if fnmatchcase(name, owned)), None))
    ]
