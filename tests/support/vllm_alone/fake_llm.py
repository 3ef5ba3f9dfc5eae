"""vLLM's AsyncLLM as far as `dart.workers.rollout.engine.Engine` uses it, with calls that can be made to hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm_alone.stand_ins import replaced_modules

VOCABULARY = {"<|image_pad|>": 1, "<|vision_start|>": 2, "<|vision_end|>": 3, "word": 4}


class EngineDeadError(Exception):
    """Takes the place of vLLM's."""


class _Error(Exception):
    """Takes the place of vLLM's other errors, which nothing here raises."""


@dataclass
class Request:
    """Takes the place of vLLM's requests to transfer weights."""

    info: dict[str, Any]


class Tokenizer:
    eos_token_id = 5
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012 - read only

    def get_vocab(self) -> dict[str, int]:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [VOCABULARY["word"]]

    def decode(self, ids: object, skip_special_tokens: bool) -> str:
        return "word"


class FakeLLM:
    """`calls`: the names of what was called, in order. A call for which `hangs` is true never returns, as in NCCL."""

    output_handler = None
    errored = False
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_size_tokens=None, num_gpu_blocks=100, block_size=16)
    )

    def __init__(self, hangs: Callable[[str], bool] = lambda name: False) -> None:
        self.hangs = hangs
        self.calls: list[str] = []
        self.ended = False
        self._requests = 0

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def shutdown(self, timeout: float = 0.0) -> None:
        self.ended = True

    async def add_request(
        self, request_id: str, prompt: object, sampling: object, lora_request: object = None
    ) -> SimpleNamespace:
        self._requests += 1
        self.calls.append("add_request")

        async def output() -> SimpleNamespace:
            flat = SimpleNamespace(logprobs=[-0.5], start_indices=[0])
            version = SimpleNamespace(version="0", start=0, end=1)
            completion = SimpleNamespace(finish_reason="stop", token_ids=[5], logprobs=flat, weight_versions=[version])
            return SimpleNamespace(
                request_id=request_id, prompt_token_ids=[4], outputs=[completion], num_cached_tokens=None
            )

        return SimpleNamespace(request_id=f"{self._requests}", get=output)

    def __getattr__(self, name: str) -> Any:
        """Every other call is a coroutine that does nothing. One GPU answers `collective_rpc`."""

        async def called(*arguments: object, **named: object) -> list[int]:
            self.calls.append(name)
            if self.hangs(name):
                await asyncio.Event().wait()
            return [0]

        return called


@contextlib.contextmanager
def fake_vllm() -> Iterator[None]:
    """Inside, what `Engine` imports of vLLM is here."""
    with replaced_modules(
        {
            "vllm": {"SamplingParams": SimpleNamespace},
            "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
            "vllm.exceptions": {"GenerationError": _Error, "GracefulHTTPError": _Error, "VLLMClientError": _Error},
            "vllm.v1": {},
            "vllm.v1.engine": {},
            "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError, "EngineGenerateError": _Error},
            "vllm.multimodal": {},
            "vllm.multimodal.media": {"MediaWithBytes": lambda *held: held},
            "vllm.distributed": {},
            "vllm.distributed.weight_transfer": {},
            "vllm.distributed.weight_transfer.base": {
                "WeightTransferInitRequest": Request,
                "WeightTransferUpdateRequest": Request,
            },
        }
    ):
        yield
