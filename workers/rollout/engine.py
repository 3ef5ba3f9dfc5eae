"""vLLM's async engine as the policy's sampler: prompt parts in, tokens with log-probs and weight versions out.

What always holds:
- log-probs are those of the distribution that was sampled from: after temperature, with the vision tokens banned, and
  without top-k, top-p or penalties, so that the trainer can recompute them. There are no per-request seeds.
- every sampled token is labelled with the weight version that made it.
- nothing enters vLLM while its weights change (`gate`); after an update no cache holds anything of older weights, but
  with `keep` requests in flight or waiting go on with what is cached.
- when the engine process dies, `check_alive` and every call that begins raise EngineDiedError; the worker then ends,
  with whatever still waits for an answer, and is started again. The same happens when an update hangs: an engine that
  waits in NCCL serves nothing and answers nothing.

Called by `role` on one event loop. Importing this module loads no vLLM; `Engine.start` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dart.config import RolloutWorkerConfig
from dart.core.fleet.room import Room
from dart.core.types import Generation, Image, PromptPart, VersionSpan
from dart.malloc import release_free_memory
from dart.screenshots.holder import Holder
from dart.screenshots.picture import decoded
from dart.screenshots.shared import SharedScreenshots
from dart.v1 import weights_pb2 as wpb
from dart.wire.tokens import vision_token_ids
from dart.workers.rollout.errors import ContextFullError, EngineDiedError, RequestAbortedError, RequestFailedError
from dart.workers.rollout.gate import Gate
from dart.workers.rollout.prompts import EnginePrompt, Prompts
from dart.workers.rollout.starting import give_up, start_vllm
from dart.workers.rollout.tokenise import PromptEncoder
from dart.workers.weights.requests import init_info, update_info
from dart.workers.weights.transfer import ADAPTER_SLOT, TensorSpec, TransferError

if TYPE_CHECKING:  # vLLM takes seconds to import, and is imported when the engine starts.
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

log = logging.getLogger(__name__)

PauseMode = Literal["keep", "drain", "abort"]
_TOO_LONG = ("maximum context length", "longer than the maximum")
"""vLLM's errors for a prompt that is too long, before and after it has counted the screenshots' tokens."""
_VLLM_PAUSE = {"keep": "keep", "drain": "wait", "abort": "abort"}
_CLOSE_SECONDS = 2.0
"""After this the engine process is killed; it holds nothing worth waiting for."""
_RELEASE_SECONDS = 60.0
GRACE_SECONDS = 10.0
"""How much longer than `sync.timeout_seconds` an update may take before the engine counts as stuck. Both ends of a
transfer have given up by then, each by itself."""
_BAN = -100.0
"""Added to the logits of banned tokens: vLLM's largest bias."""


@dataclass(frozen=True, slots=True)
class Update:
    pause_seconds: float
    bytes: int
    checksum: int
    """As in `WeightsLoaded`."""


class Engine:
    """One replica. Made by `start`."""

    def __init__(self, llm: AsyncLLM, config: RolloutWorkerConfig) -> None:
        self._llm = llm
        self._tokenizer = tokenizer = llm.get_tokenizer()
        self._encoder = PromptEncoder(tokenizer)
        shared = SharedScreenshots.seen(config.shared_blobs)
        self.shares_blobs = shared is not None
        self._screenshots = Holder(config.rollout.image_cache_entries, shared)
        self._transfer_seconds = config.sync.timeout_seconds
        self._transport = config.sync.transport
        self._prompts = Prompts(caches_images=config.rollout.processor_cache_bytes > 0)
        self._single_gpu = config.rollout.gpus == 1
        """On several GPUs, a call that fails on one of them leaves vLLM with answers of the others that nobody took."""
        self._joined: str | None = None
        """The id of the transfer group that vLLM has joined last."""
        self._banned = dict.fromkeys(vision_token_ids(tokenizer), _BAN)
        self._adapter = None if config.adapter is None else _adapter_request()
        self._stop_token = int(tokenizer.eos_token_id)
        self._max_model_len = config.rollout.max_model_len
        self._gate = Gate()
        self._running: dict[str, str | None] = {}
        """Requests by our id → vLLM's, None until it has one."""
        self._aborted: set[str] = set()
        self._version = config.weight_version
        cache = llm.vllm_config.cache_config
        # Blocks alone say too much where layers of several kinds share them.
        tokens = cache.kv_cache_size_tokens or (cache.num_gpu_blocks or 0) * cache.block_size
        self.room = Room(tokens, config.rollout.slots)
        """For requests, in the KV cache."""

    @classmethod
    async def start(cls, config: RolloutWorkerConfig) -> Engine:
        """Load the model in an engine process; takes seconds to minutes. Raises UserError."""
        starting = asyncio.ensure_future(asyncio.to_thread(start_vllm, config))
        try:
            llm = await asyncio.shield(starting)
            engine = cls(llm, config)
            if (adapter := config.adapter) is not None:
                await llm.collective_rpc("serve_adapter", kwargs=adapter.model_dump(mode="json"))
            await llm.update_weight_version(str(config.weight_version))
        except asyncio.CancelledError:
            await give_up(starting)
            raise
        return engine

    @property
    def version(self) -> int:
        """The weight version that is serving."""
        return self._version

    async def generate(
        self, request_id: str, parts: Sequence[PromptPart], temperature: float, max_tokens: int
    ) -> Generation:
        """One turn.

        Raises UnknownScreenshot, BadScreenshot, ContextFullError, ValueError (the prompt is wrong),
        RequestAbortedError, RequestFailedError, EngineDiedError.
        """
        whole = iter(self._screenshots.resolve([part for part in parts if isinstance(part, Image)]))
        ids, images = self._encoder.encode([next(whole) if isinstance(part, Image) else part for part in parts])
        self._running[request_id] = None
        try:
            output = await self._run(request_id, ids, images, temperature, max_tokens)
        finally:
            del self._running[request_id]
            self._aborted.discard(request_id)
        generation = self._generation(output)
        self.room.used(len(generation.prompt_token_ids) + len(generation.token_ids))
        return generation

    def hold(self, screenshots: Sequence[Image]) -> None:
        """Keep the screenshots of a future prompt. Raises UnknownScreenshot, BadScreenshot."""
        self._screenshots.resolve(screenshots)

    async def force(self, request_id: str, parts: Sequence[PromptPart], text: str, max_tokens: int) -> Generation:
        """The turn as if the policy had written `text`: its tokens and the prompt's, and no log-probabilities.

        Raises the same errors as `generate`.
        """
        tokens = [*self._encoder.encode_turn(text), self._stop_token]
        token_ids = tuple(tokens[:max_tokens])
        # Only the engine knows the prompt's tokens as it runs them, so it samples one token, which is thrown away.
        version, prompt = self._version, (await self.generate(request_id, parts, 0.0, 1)).prompt_token_ids
        if len(prompt) + len(token_ids) > self._max_model_len:
            raise ContextFullError(
                f"prompt and text have {len(prompt)} + {len(token_ids)} tokens, "
                f"and rollout.max_model_len is {self._max_model_len}: raise it, or shorten the history"
            )
        return Generation(
            prompt_token_ids=prompt,
            token_ids=token_ids,
            logprobs=(),
            versions=(VersionSpan(version, 0, len(token_ids)),),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            truncated=len(tokens) > max_tokens,
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` raises RequestAbortedError. An unknown request has already ended."""
        if request_id not in self._running:
            return
        self._aborted.add(request_id)
        internal = self._running[request_id]
        if internal is not None:
            await self._llm.abort(internal, internal=True)

    async def begin_receiving(self, version: int, group: wpb.TransferGroup, tensors: Sequence[TensorSpec]) -> None:
        """Receive weights in the background; `update` then takes them. Only over gloo.

        Raises TransferError, ValueError, EngineDiedError.
        """
        if self._transport != "gloo":
            raise ValueError(
                f"over {self._transport} weights go straight into the model: send LoadWeights with the group"
            )
        arguments = {
            "init_info": init_info(self._transport, group, self._transfer_seconds),
            "update_info": update_info(self._transport, version, tensors),
        }
        async with self._in_time(f"receiving weights {version} did not begin"):
            with self._asking(f"weights {version} were not received", TransferError):
                await self._llm.collective_rpc("begin_receiving_weights", kwargs=arguments)

    async def update(
        self, version: int, group: wpb.TransferGroup | None, tensors: Sequence[TensorSpec], mode: PauseMode
    ) -> Update:
        """Serve the weights `version`: receive them from the trainer, or, without a group, take those that
        `begin_receiving` has begun to receive.

        keep: requests in flight continue with the new weights and the cache of the old ones. drain: those that have
        begun finish first, the others begin with the new weights. abort: they end with RequestAbortedError. Raises
        TransferError, after which the old version continues to serve, and EngineDiedError: also when vLLM, once paused,
        has not finished `GRACE_SECONDS` after `sync.timeout_seconds`, because over NCCL it waits for a lost trainer for
        ever. It is not asked to resume then: it would not answer.
        """
        late = f"weights {version} were not loaded"
        async with self._gate.closed():
            paused = time.monotonic()
            try:
                async with self._in_time(late):
                    await self._pause(version, mode)
                async with self._in_time(late):
                    try:
                        await self._receive(version, group, tensors)
                    except TransferError:
                        await self._llm.resume_generation()
                        raise
                    checksum = await self._checksum(version)
                    await self._forget(mode)
                    await self._llm.resume_generation()
            except (TransferError, EngineDiedError):
                raise
            except Exception as error:  # noqa: BLE001  as in `_receive`
                raise EngineDiedError(f"weights {version}: {error}") from None
            self._version = version
            return Update(time.monotonic() - paused, sum(spec.bytes for spec in tensors), checksum)

    async def _checksum(self, version: int) -> int:
        """Of the weights that were received; 0 over NCCL, where nothing keeps a copy of them."""
        if self._transport != "gloo":
            return 0
        found = set(await self._llm.collective_rpc("weights_checksum"))
        if len(found) > 1:
            raise EngineDiedError(f"its ranks have received different weights as version {version}")
        return int(found.pop())

    async def _pause(self, version: int, mode: PauseMode) -> None:
        """Raises TransferError if that takes as long as a transfer may: the coordinator has given it up by then."""
        try:
            async with asyncio.timeout(self._transfer_seconds):
                await self._llm.pause_generation(mode=_VLLM_PAUSE[mode], clear_cache=False)
        except TimeoutError:
            await self._llm.resume_generation()
            raise TransferError(
                f"weights {version}: requests in flight did not end within sync.timeout_seconds "
                f"({self._transfer_seconds:g}): raise it, or set sync.mode to keep or abort"
            ) from None

    def check_alive(self) -> None:
        """Raises EngineDiedError once the engine process has ended. vLLM fails the requests in flight by itself then,
        but leaves other calls waiting for their answer."""
        if self._llm.errored:
            raise EngineDiedError("its process has ended")

    async def release_memory_now_and_then(self) -> None:
        """Give the kernel back, every minute, what this process and the engine's hold free, until cancelled. Raises
        EngineDiedError.

        Between blocks that live long, those of requests otherwise leave gaps that grow for hours.
        """
        said: set[str] = set()
        while True:
            await asyncio.sleep(_RELEASE_SECONDS)
            try:
                with self._asking("memory was not released", RuntimeError):
                    await self._llm.collective_rpc("release_free_memory")
            except RuntimeError as error:
                if str(error) not in said:
                    said.add(str(error))
                    log.warning("the engine's free memory was not given back: %s", error)
            await asyncio.to_thread(release_free_memory)

    @contextlib.asynccontextmanager
    async def _in_time(self, late: str) -> AsyncIterator[None]:
        """Raises EngineDiedError, which begins with `late`, for what lasts longer than a transfer may and
        `GRACE_SECONDS`."""
        limit = self._transfer_seconds + GRACE_SECONDS
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError:
            raise EngineDiedError(
                f"{late} within sync.timeout_seconds and {GRACE_SECONDS:g} s more ({limit:g} s): the engine hangs, or "
                "the trainer's end of the transfer has failed, or is slower than that"
            ) from None

    @contextlib.contextmanager
    def _asking(self, failed: str, otherwise: type[Exception]) -> Iterator[None]:
        """For a call to the engine's GPUs that fails: raises EngineDiedError if the engine is dead or, with `failed`,
        has several GPUs, and else `otherwise`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise EngineDiedError(str(error)) from None
        except Exception as error:  # noqa: BLE001  as in `_receive`
            if not self._single_gpu:
                raise EngineDiedError(f"{failed}: {error}") from None
            raise otherwise(str(error)) from None

    async def close(self) -> None:
        """End the engine process."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # Otherwise it reports this as an engine that died.
        await asyncio.to_thread(self._llm.shutdown, timeout=_CLOSE_SECONDS)

    async def _run(
        self, request_id: str, ids: list[int], images: list[Image], temperature: float, max_tokens: int
    ) -> RequestOutput:
        from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            sampling = self._sampling(temperature, max_tokens)
            async with self._gate.entering():
                if request_id in self._aborted:
                    raise RequestAbortedError(f"request {request_id} was aborted before it began")
                collector = await self._enter(request_id, self._prompts.made(ids, images), sampling)
            try:
                return await collector.get()
            except asyncio.CancelledError:
                await self._llm.abort(collector.request_id, internal=True)
                raise
        except EngineDeadError as error:
            raise EngineDiedError(str(error)) from None
        except VLLMClientError as error:
            self._prompts.rename(images)  # what vLLM has noted of them, its engine process has not been sent
            if any(words in str(error) for words in _TOO_LONG):
                raise ContextFullError(
                    f"the prompt is longer than rollout.max_model_len ({self._max_model_len}): raise it, or shorten "
                    "agent.history_turns and history_screenshots"
                ) from None
            raise ValueError(f"vLLM refuses the request: {error}") from None
        except (GenerationError, EngineGenerateError, GracefulHTTPError) as error:
            self._prompts.forget()
            raise RequestFailedError(f"vLLM failed the request: {error}") from None
        except Exception:  # of a model's own code, which prepares the prompt, and may wrap what a decoder raised
            self._prompts.forget()
            for image in images:
                decoded(image)  # names the one that cannot be
            raise

    async def _enter(self, request_id: str, prompt: EnginePrompt, sampling: SamplingParams) -> RequestOutputCollector:
        """Hand the request to vLLM without interruption: stopping half-way leaves the halves of its image cache
        disagreeing."""
        entering = asyncio.ensure_future(
            self._llm.add_request(request_id, prompt, sampling, lora_request=self._adapter)
        )
        try:
            collector = await asyncio.shield(entering)
        except asyncio.CancelledError:
            collector = await entering
            await self._llm.abort(collector.request_id, internal=True)
            raise
        self._running[request_id] = collector.request_id
        if request_id in self._aborted:
            await self._llm.abort(collector.request_id, internal=True)
        return collector

    def _sampling(self, temperature: float, max_tokens: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            logit_bias=self._banned,
            stop_token_ids=[self._stop_token],
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _generation(self, output: RequestOutput) -> Generation:
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            raise RequestAbortedError(f"request {output.request_id} was aborted")
        if completion.finish_reason not in ("stop", "length"):
            self._prompts.forget()  # Most likely the image cache: begin a new one.
            raise RequestFailedError(f"vLLM ended request {output.request_id} with {completion.finish_reason!r}")
        token_ids = completion.token_ids
        flat = completion.logprobs
        # The engine's own lists, not copies: they are only written into the reply.
        return Generation(
            prompt_token_ids=output.prompt_token_ids,
            token_ids=token_ids,
            logprobs=tuple(flat.logprobs[start] for start in flat.start_indices),
            versions=tuple(VersionSpan(int(s.version), s.start, s.end) for s in completion.weight_versions),
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            truncated=completion.finish_reason == "length",
            cached_tokens=output.num_cached_tokens,
        )

    async def _receive(self, version: int, group: wpb.TransferGroup | None, tensors: Sequence[TensorSpec]) -> None:
        """Join, receive, load. Raises TransferError while the model is untouched, EngineDiedError after that, and at
        once on several GPUs."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.v1.engine.exceptions import EngineDeadError

        staged = self._transport == "gloo"
        touched = False
        try:
            if group is not None:
                await self._join(group)
            touched = not staged
            await self._llm.start_weight_update()
            described = update_info(self._transport, version, tensors)
            await self._llm.update_weights(WeightTransferUpdateRequest(described))
            touched = True
            await self._llm.finish_weight_update(weight_version=str(version))
            if self._adapter is not None:
                await self._llm.collective_rpc("take_adapter")
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  vLLM re-raises any worker's error as a plain Exception.
            if touched:
                raise EngineDiedError(f"weights {version} are only partly loaded: {error}") from None
            if not self._single_gpu:
                raise EngineDiedError(f"weights {version} were not received: {error}") from None
            raise TransferError(f"weights {version}: {error}") from None

    async def _join(self, group: wpb.TransferGroup) -> None:
        """Have vLLM join the group. Over NCCL only once, because vLLM would set it up again and wait for a trainer that
        does not; the former group is left first, because vLLM does not free its communicator. Our engine for gloo does
        both itself, and is told the group of each transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self._transport == "nccl":
            if group.group_id == self._joined:
                return
            if self._joined is not None:
                self._joined = None
                await self._llm.shutdown_weight_transfer_engine()
        described = init_info(self._transport, group, self._transfer_seconds)
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(described))
        self._joined = group.group_id

    async def _forget(self, mode: PauseMode) -> None:
        """Make sure that nothing computed with older weights is used again."""
        if mode == "keep":
            # Requests in flight still use their cache; resetting it under them would end vLLM's engine process.
            self._prompts.forget()
            return
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.reset_encoder_cache()


def _adapter_request() -> LoRARequest:
    """The replica's adapter, as each request names it. vLLM requires a path, but the adapter is loaded already."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_SLOT, "policy")
