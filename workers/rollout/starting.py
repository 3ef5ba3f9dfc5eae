"""Starts vLLM: checks arguments and model folder, then starts an engine process with the run's settings."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import json
import multiprocessing
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from dart.config import RolloutWorkerConfig, ServedAdapter
from dart.config.base import remedy
from dart.core.capacity import devices
from dart.core.capacity.memory import ENCODED_PROMPTS
from dart.errors import USER_ERROR, UserError
from dart.shortage import of_program, tight
from dart.workers.rollout import environment, forkserver
from dart.workers.weights.owner import own_engines
from dart.workers.weights.transfer import ADAPTER_FILE

if TYPE_CHECKING:  # vLLM takes seconds to import, and is imported when the engine starts.
    from transformers import PretrainedConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_EXTENSION = "dart.workers.weights.vllm_extension.Extension"
"""The class (`worker_extension_cls`) whose methods vLLM's workers get."""
_QUANTISED: dict[str, dict[str, object]] = {
    "none": {},
    # A scale for each output channel, and one for each token. The tower, small and with channels of other multiples
    # than kernels like, stays as it is.
    "fp8": {"quantization": "fp8_per_channel", "quantization_config": {"ignore": ["re:.*visual.*"]}},
}
"""The engine's arguments by `rollout.quantization`."""
_OFTEN = (
    "the engine process says why above; often rollout.max_model_len or kv_cache_bytes does not fit the memory, another "
    "process has some of the GPU's (rollout.engine_args.gpu_memory_utilization), or /dev/shm is too small for an "
    "engine on more than one GPU"
)
"""Why vLLM did not start, where neither its error nor a limit of this process says so."""
_KILL_SECONDS = 0.5
"""How often an engine that is not wanted any more is killed while it starts: its process may not be there yet."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM can make room for (`max_lora_rank`)."""


def check_model(folder: Path) -> None:
    """Raises UserError unless the folder holds a model that vLLM can load; imports vLLM last."""
    if not folder.is_dir():
        raise UserError(f"model.path: {folder} is not a folder: name a Hugging Face model folder or builtin:NAME")
    try:
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except FileNotFoundError:
        raise UserError(f"model.path: {folder} has no config.json: name a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model.path: {folder / 'config.json'} is not JSON ({error}): restore the folder") from None
    if not list(folder.glob("*.safetensors")):
        raise UserError(f"model.path: {folder} has no *.safetensors weights: download or build the model again")
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    if not set(architectures) & set(known):
        raise UserError(
            f"model.path: {folder} is a {', '.join(architectures) or 'model of no named architecture'}, "
            "which this vLLM cannot load: use a vision-language model that vLLM supports, for example Qwen3-VL"
        )


def check_adapter(adapter: ServedAdapter | None) -> None:
    """Raises UserError if the adapter of a checkpoint is not there."""
    if adapter is None or adapter.folder is None or (adapter.folder / ADAPTER_FILE).is_file():
        return
    raise UserError(
        f"there is no {ADAPTER_FILE} in {adapter.folder}: with trainer.lora.sync: adapter, replicas begin with that of "
        "the newest checkpoint, so put run.directory on a file system that they see, too, under the same path"
    )


def interleave_positions(config: PretrainedConfig) -> PretrainedConfig:
    """Make vLLM rotate Qwen3-VL's image positions as transformers does.

    transformers always interleaves the three axes; vLLM does so only if the checkpoint's config says so. A checkpoint
    that does not would silently be a different policy in vLLM than in the trainer.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if str(text.model_type).startswith("qwen3_vl") and isinstance(rope, dict) and "mrope_section" in rope:
        rope.setdefault("mrope_interleaved", True)
    return config


def check_known(names: Iterable[str], known: Collection[str], version: str) -> None:
    """Raises UserError unless the installed vLLM has an engine argument of each name."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    close = difflib.get_close_matches(unknown[0], known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "see the engine arguments in vLLM's documentation"
    raise UserError(
        f"rollout.engine_args.{unknown[0]} is not an engine argument of the installed vLLM ({version}): {hint}"
    )


def settings(config: RolloutWorkerConfig) -> dict[str, object]:
    """The engine's arguments: the user's own, and those that they may not set (`dart.config.engine_args`)."""
    rollout = config.rollout
    replaceable: dict[str, object] = {
        "block_size": 32 if devices.on_cpu() else None,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    return replaceable | rollout.engine_args | _adapter(config.adapter) | _QUANTISED[rollout.quantization] | {
        "model": str(config.model.folder),
        "dtype": config.model.dtype,
        # Not simply the config's seed: two replicas, or one before and after a restart, must not draw alike.
        "seed": (config.seed + int.from_bytes(os.urandom(4), "big")) % 2**31,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.slots,
        "tensor_parallel_size": rollout.tensor_parallel,
        "pipeline_parallel_size": rollout.pipeline_parallel,
        "enforce_eager": rollout.enforce_eager,
        "kv_cache_memory_bytes": rollout.kv_cache_bytes,
        "mm_processor_cache_gb": rollout.processor_cache_bytes / (1 << 30),
        "limit_mm_per_prompt": {"image": config.max_images, "video": 0},
        "generation_config": "vllm",  # Otherwise the folder's own sampling defaults and extra stop tokens apply.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "hf_overrides": interleave_positions,
        "worker_extension_cls": _EXTENSION,
    }  # fmt: skip


def _adapter(adapter: ServedAdapter | None) -> dict[str, object]:
    """Room for one adapter, in those layers that it is for."""
    if adapter is None:
        return {}
    room = next((width for width in LORA_RANKS if width >= adapter.rank), None)
    if room is None:
        raise UserError(
            f"trainer.lora.rank is {adapter.rank}, and vLLM serves adapters up to {LORA_RANKS[-1]}: lower it, or set "
            "trainer.lora.sync: merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": room,
        "lora_target_modules": list(adapter.target_modules),
    }


def encoder_cache_tokens(config: RolloutWorkerConfig) -> int:
    """The least number of screenshot tokens whose encodings the engine keeps; 0: as many as vLLM chooses.

    vLLM takes the larger of `max_num_batched_tokens` and one image of the model's largest size, which is about the
    screenshots of one prompt. An episode's next step finds its own only if there is room for other requests', too.
    """
    if config.rollout.encoder_cache_tokens is not None:
        return config.rollout.encoder_cache_tokens
    return 0 if devices.on_cpu() else ENCODED_PROMPTS * config.max_images * config.screenshot_tokens


def start_vllm(config: RolloutWorkerConfig) -> AsyncLLM:
    """Blocks until the engine process is ready. Raises UserError."""
    environment.apply(config.rollout.environment)
    own_engines()
    import vllm
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMClientError
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    check_known(config.rollout.engine_args, known, vllm.__version__)
    check_model(config.model.folder)
    check_adapter(config.adapter)
    quantised = config.rollout.quantization != "none"
    if quantised and current_platform.is_cuda() and not current_platform.has_device_capability(89):
        raise UserError(
            "rollout.quantization: fp8 needs GPUs of compute capability 8.9 or newer (Ada, Hopper, Blackwell), and "
            "this machine's are older: leave it out"
        )
    transfer = WeightTransferConfig(backend=config.sync.transport)
    try:
        arguments = AsyncEngineArgs(**settings(config), weight_transfer_config=transfer)
        # As vLLM's own server: without a context, a batch has 2,048 tokens on every GPU.
        vllm_config = arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, VLLMClientError) as error:
        raise UserError(f"vLLM refuses model {config.model.folder} with this rollout section: {_line(error)}") from None
    scheduler = vllm_config.scheduler_config
    scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, encoder_cache_tokens(config))
    try:
        with forkserver.engine_starter():
            return AsyncLLM.from_vllm_config(
                vllm_config, usage_context=UsageContext.OPENAI_API_SERVER, disable_log_stats=arguments.disable_log_stats
            )
    except (OSError, MemoryError, RuntimeError) as error:
        short = of_program(error, str(error))
        raise UserError(
            f"vLLM could not start with model {config.model.folder}: {_line(error)}: {short or tight() or _OFTEN}",
            exit_code=1 if short else USER_ERROR,  # what is short now need not be when it is started again
        ) from None


async def give_up(starting: asyncio.Future[AsyncLLM]) -> None:
    """End the engine that `start_vllm` starts in a thread, or has started; its errors count no more.

    The thread cannot be stopped, but ends with the engine process that it waits for. A worker has no other children of
    `multiprocessing`.
    """
    while not starting.done():
        for process in multiprocessing.active_children():
            process.kill()
        await asyncio.wait({starting}, timeout=_KILL_SECONDS)
    if starting.exception() is None:
        await asyncio.to_thread(starting.result().shutdown)


def _line(error: Exception) -> str:
    """The line that gives the reason; of a pydantic error, the field and what is wrong with it."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        return where + remedy(first)
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
