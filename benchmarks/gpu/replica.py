"""What one replica does on a GPU: `python -m benchmarks.gpu.replica`, on one GPU with vLLM, in about five minutes.

A model of UI-TARS-1.5-7B's size with random weights is served by the rollout worker's own engine, and gets the prompts
that `dart.agent` makes of full-HD screenshots. Nothing is downloaded; the weights (17 GB) are written to a temporary
folder, or to `--folder`, where a later run finds them. Answers have 130 tokens each: random weights do not end a turn.

- *memory*: what the engine took, and what is left for the KV cache, beside `dart.core.capacity`'s estimate;
- *decoding*: seconds of a pass by the number of requests, with prompts of text;
- *prompts*: seconds for five screenshots of which nothing is cached, and for a prompt that continues one;
- *episodes*: several at once, without any environment: steps a second with `agent.history_stride` 1 and 3, and the
  share of prompt tokens that the engine found in its prefix cache.

Writes results/gpu/replica-CARD.json after each. `--device cpu --tiny` shows that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.models import UI_TARS_7B
from benchmarks.gpu.record import file_of, record
from dart.agent.prompt import Conversation, Turn
from dart.config import BUILTIN_MODELS, RolloutWorkerConfig
from dart.config.policy import Agent, Model, Rollout
from dart.config.trainer import Sync
from dart.core.capacity import memory
from dart.core.capacity.shape import read_shape
from dart.core.types import Generation, Image, Markup
from dart.processes.gpus import cards_of, gpus_here
from dart.workers.rollout.engine import Engine
from dart.worlds import from_pixels

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
Result = dict[str, object]
USED = ("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", "--id=0")
FULL_HD, SMALL = (1920, 1080), (160, 224)
SYSTEM = 1000
"""Tokens of a system text with an instruction, and of a prompt without screenshots."""
ANSWER = 130
TOKENIZER = BUILTIN_MODELS / "tiny-qwen3vl"
"""Its special tokens stand for Qwen's; with random weights any words will do."""


class Counting(Engine):
    """Counts prompt tokens, and those of them that were found in the prefix cache."""

    prompt_tokens = 0
    cached_tokens = 0

    def _generation(self, output: RequestOutput) -> Generation:
        self.prompt_tokens += len(output.prompt_token_ids or ())
        self.cached_tokens += output.num_cached_tokens or 0
        return super()._generation(output)

    @property
    def kv_tokens(self) -> int:
        cache = self._llm.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)


def write_model(folder: Path, device: str, tiny: bool) -> None:
    """A Hugging Face folder with random bfloat16 weights."""
    if tiny:
        shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
        return
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    number = tokenizer.convert_tokens_to_ids
    document: dict[str, Any] = copy.deepcopy(UI_TARS_7B) | {
        "image_token_id": number("<|image_pad|>"),
        "video_token_id": number("<|video_pad|>"),
        "vision_start_token_id": number("<|vision_start|>"),
        "vision_end_token_id": number("<|vision_end|>"),
    }
    document["text_config"] |= {"eos_token_id": number("<|im_end|>"), "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(**document)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20GB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 12845056},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def agent_of(stride: int) -> Agent:
    """Without a system text: `SYSTEM` tokens of instruction stand for both."""
    return Agent(prompt="minimal", history_screenshots=5, history_stride=stride)


def config_of(folder: Path, options: argparse.Namespace) -> RolloutWorkerConfig:
    rollout: dict[str, Any] = {"slots": 32, "enforce_eager": options.eager, "max_tokens": 200}
    rollout |= {"max_model_len": 4096, "kv_cache_bytes": 1 << 28} if options.tiny else {"max_model_len": 32768}
    rollout |= {"quantization": "fp8"} if options.fp8 else {}
    rollout |= {"encoder_cache_tokens": options.encoder_cache_tokens}
    return RolloutWorkerConfig(
        model=Model(path=str(folder), dtype="bfloat16"),
        rollout=Rollout(**rollout),
        sync=Sync(transport="gloo"),
        max_images=5,
        screenshot_tokens=35 if options.tiny else 2691,
        seed=0,
    )


def screenshot(number: int, size: tuple[int, int]) -> Image:
    """A page of coloured bars, no two alike, so that nothing is found by its digest."""
    width, height = size
    rows = []
    for row in range(height):
        band = (row // 24 + number) % 97
        colour = bytes(((band * 37) % 256, (band * 91 + number) % 256, (band * 53) % 256))
        rows.append(colour * (width // 2) + b"\xff" * 3 * (width - width // 2))
    return from_pixels(b"".join(rows), width, height)


async def answer(engine: Engine, name: str, parts: Sequence[Any], tokens: int) -> Generation:
    return await engine.generate(name, parts, 1.0, tokens)


async def decoding(engine: Counting, options: argparse.Namespace) -> Result:
    """Seconds of a pass, from the difference of long and short answers."""
    counts, short, long = ((1, 2), 4, 24) if options.tiny else ((1, 8, 16, 32), 20, 200)

    async def batch(count: int, tokens: int) -> float:
        began = time.perf_counter()
        texts = [[Markup(f"{count} {tokens} {i} ".ljust(SYSTEM, "x"))] for i in range(count)]
        await asyncio.gather(*(answer(engine, f"d{count}-{tokens}-{i}", text, tokens) for i, text in enumerate(texts)))
        return time.perf_counter() - began

    await batch(counts[-1], short)
    found = {}
    for count in counts:
        # The first of each fills the prefix cache, so that only decoding differs.
        await batch(count, short), await batch(count, long)
        found[f"{count} requests"] = (await batch(count, long) - await batch(count, short)) / (long - short)
    return {"seconds_per_pass": found}


async def prompts(engine: Counting, options: argparse.Namespace) -> Result:
    """One request alone, one token each."""
    size = SMALL if options.tiny else FULL_HD
    whole, continued = [], []

    async def seconds(name: str, conversation: Conversation, picture: Image) -> float:
        prompt = conversation.prompt(picture)
        began = time.perf_counter()
        await answer(engine, name, prompt.parts, 1)
        return time.perf_counter() - began

    for trial in range(1 if options.tiny else 4):
        new = [screenshot(10_000 + 10 * trial + i, size) for i in range(5)]
        whole.append(await seconds(f"whole-{trial}", _after(f"Whole {trial}.", new[:4]), new[4]))
        new = [screenshot(20_000 + 10 * trial + i, size) for i in range(5)]
        conversation = _after(f"Continued {trial}.", new[:3])
        await seconds(f"before-{trial}", conversation, new[3])
        conversation.add(_turn(new[3]))
        continued.append(await seconds(f"continued-{trial}", conversation, new[4]))
    first = 0 if options.tiny else 1  # the first compiles
    return {"five_screenshots_seconds": whole[first:], "one_more_screenshot_seconds": continued[first:]}


def _after(instruction: str, pictures: Sequence[Image]) -> Conversation:
    """After steps with these screenshots."""
    conversation = Conversation(agent_of(3), instruction.ljust(SYSTEM, "x"))
    for picture in pictures:
        conversation.add(_turn(picture))
    return conversation


def _turn(picture: Image) -> Turn:
    return Turn(picture, tuple(range(20, 20 + ANSWER)), truncated=True)


async def episodes(engine: Counting, options: argparse.Namespace, stride: int) -> Result:
    """All at once; each begins its next step when its answer has come, as if environments took no time."""
    number, steps, tokens = (2, 4, 8) if options.tiny else (options.episodes, options.steps, ANSWER)
    size = SMALL if options.tiny else FULL_HD
    base = 100_000 * stride
    pictures = [[screenshot(base + 1000 * e + s, size) for s in range(steps)] for e in range(number)]
    engine.prompt_tokens = engine.cached_tokens = 0
    latencies: list[float] = []

    async def episode(index: int) -> None:
        conversation = Conversation(agent_of(stride), f"Stride {stride}, episode {index}.".ljust(SYSTEM, "x"))
        for step, picture in enumerate(pictures[index]):
            began = time.perf_counter()
            prompt = conversation.prompt(picture)
            made = await answer(engine, f"e{stride}-{index}-{step}", prompt.parts, tokens)
            latencies.append(time.perf_counter() - began)
            conversation.add(Turn(picture, made.token_ids, truncated=made.truncated))

    began = time.perf_counter()
    await asyncio.gather(*(episode(index) for index in range(number)))
    seconds = time.perf_counter() - began
    latencies.sort()
    return {
        "episodes": number, "steps": steps, "answer_tokens": tokens, "seconds": seconds,
        "steps_per_second": number * steps / seconds, "prompt_tokens": engine.prompt_tokens,
        "cached_share": engine.cached_tokens / max(1, engine.prompt_tokens),
        "median_step_seconds": latencies[len(latencies) // 2], "longest_step_seconds": latencies[-1],
    }  # fmt: skip


def memory_of(engine: Counting, config: RolloutWorkerConfig, folder: Path, *, on_gpu: bool) -> Result:
    """`used_bytes`: of the whole GPU, which the engine alone uses."""
    shape = read_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    found: Result = {"kv_cache_tokens": engine.kv_tokens, "weights": shape.weights}
    if on_gpu:
        used, total = (int(mebibytes) << 20 for mebibytes in subprocess.check_output(USED, text=True).split(","))
        set_up = memory.ReplicaSetUp(
            slots=config.rollout.slots, quantised=config.rollout.quantization != "none",
            encoder_tokens=memory.ENCODED_PROMPTS * config.max_images * config.screenshot_tokens,
        )  # fmt: skip
        needs = memory.of_replica_gpu(shape, set_up, engine.kv_tokens)
        found |= {"used_bytes": used, "card_bytes": total, "estimate_bytes": needs.total}
        found |= {"estimate_parts": dict(needs.parts)}
    return found


async def measure(options: argparse.Namespace, path: Path, folder: Path) -> None:
    began = time.monotonic()
    if not (folder / "config.json").is_file():
        # In a process of its own, which leaves nothing on the GPU.
        context = multiprocessing.get_context("spawn")
        writer = context.Process(target=write_model, args=(folder, options.device, options.tiny))
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit("the weights could not be written; the lines above say why")
    written = time.monotonic() - began
    config = config_of(folder, options)
    began = time.monotonic()
    engine = await Counting.start(config)
    assert isinstance(engine, Counting)
    try:
        start = {"write_seconds": written, "start_seconds": time.monotonic() - began}
        keep(path, options, "memory", start | memory_of(engine, config, folder, on_gpu=options.device == "cuda"))
        keep(path, options, "decoding", await decoding(engine, options))
        keep(path, options, "prompts", await prompts(engine, options))
        for stride in (3, 1):
            keep(path, options, f"episodes, stride {stride}", await episodes(engine, options, stride))
    finally:
        await engine.close()


def keep(path: Path, options: argparse.Namespace, name: str, result: Mapping[str, object]) -> None:
    name += (", eager" if options.eager else "") + (", fp8" if options.fp8 else "")
    name += f", {options.encoder_cache_tokens} encoded tokens" if options.encoder_cache_tokens else ""
    print(json.dumps({name: result}), flush=True)
    what = "real: vLLM and the rollout worker's engine over random weights" + (", tiny" if options.tiny else "")
    record(path, {"name": "gpu_replica", "real_or_simulated": what}, name, result)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the model that ships with dart, and small screenshots")
    parser.add_argument("--eager", action="store_true", help="with rollout.enforce_eager")
    parser.add_argument("--fp8", action="store_true", help="with rollout.quantization: fp8")
    parser.add_argument("--encoder-cache-tokens", type=int, help="rollout.encoder_cache_tokens (default: dart's own)")
    parser.add_argument("--episodes", type=int, default=16, help="at once")
    parser.add_argument("--steps", type=int, default=12, help="of each episode")
    parser.add_argument("--folder", type=Path, help="where to write the weights and leave them, or where they are")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    gpus = gpus_here() if options.device == "cuda" else []
    if options.device == "cuda" and not gpus:
        sys.exit("this machine has no GPU: --device cpu --tiny shows only that everything runs")
    if options.device == "cpu" and not options.tiny:
        sys.exit("a model of the full size is for GPUs: add --tiny")
    card = cards_of(gpus[:1])[gpus[0]].name if gpus else "cpu"
    path = file_of(options.output, "replica", f"{card}{'-tiny' if options.tiny else ''}")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, path, options.folder or Path(folder)))
    print(path)


if __name__ == "__main__":
    main()
