"""What one replica does on a GPU: `python -m benchmarks.gpu.replica`, on one GPU with vLLM, in about five minutes.

A model of UI-TARS-1.5-7B's size with random weights is served by the rollout worker's own engine, and gets the prompts
that `dart.agent` makes of full-HD screenshots. Nothing is downloaded; the weights (17 GB) are written to a temporary
folder, or to `--folder`, where a later run finds them.

- *memory*: what is in use on the GPU before the start, after it, and after all the work, beside the estimate of
  `dart.core.capacity` for the KV cache that the engine made;
- *decoding*: seconds of a pass by the number of requests, with prompts of text, from answers of 20 and of 200 tokens;
- *prompts*: seconds for five screenshots of which nothing is cached, and for a prompt that continues one, each alone
  and with one token of answer;
- *episodes*: several at once, without any environment, with answers of 130 tokens (random weights do not end a turn):
  steps a second with `agent.history_stride` 3 and 1, and the share of prompt tokens found in the prefix cache.

Writes results/gpu/replica-CARD.json after each. `--device cpu --tiny` shows that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import SCREENSHOT_TOKENS, UI_TARS_7B
from benchmarks.gpu.record import RESULTS, file_of, name_of, record
from benchmarks.simulation.full_hd.prompts import ANSWER, SYSTEM
from dart.agent.prompt import Conversation, Turn
from dart.config import BUILTIN_MODELS, RolloutWorkerConfig
from dart.config.policy import Agent, Model, Rollout
from dart.config.trainer import Sync
from dart.core.capacity import devices, memory
from dart.core.capacity.shape import read_shape
from dart.core.types import Generation, Image, Markup
from dart.processes.gpus import VISIBLE, gpus_here
from dart.workers.rollout.engine import Engine
from dart.workers.rollout.starting import encoder_cache_tokens
from dart.worlds import from_pixels

Result = dict[str, object]
FULL_HD, SMALL = (1920, 1080), (160, 224)
SMALL_TOKENS = 35
REPEATS = 3


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
        screenshot_tokens=SMALL_TOKENS if options.tiny else SCREENSHOT_TOKENS,
        seed=0,
    )


def screenshot(number: int, size: tuple[int, int]) -> Image:
    """A page of coloured bars, no two alike, so that none is known by its digest."""
    width, height = size
    bars = [bytes(((row // 24 * 37) % 256, (row // 24 * 91) % 256, number % 256)) * width for row in range(height)]
    bars[0] = number.to_bytes(3, "big") * width
    return from_pixels(b"".join(bars), width, height)


async def answer(engine: Engine, name: str, parts: Sequence[Any], tokens: int) -> Generation:
    return await engine.generate(name, parts, 1.0, tokens)


async def decoding(engine: Engine, options: argparse.Namespace) -> Result:
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
        found[f"{count} requests"] = [
            (await batch(count, long) - await batch(count, short)) / (long - short) for _ in range(REPEATS)
        ]
    return {"seconds_per_pass": found}


async def prompts(engine: Engine, options: argparse.Namespace) -> Result:
    """One request alone, one token each."""
    size = SMALL if options.tiny else FULL_HD
    whole, continued = [], []

    async def seconds(name: str, conversation: Conversation, picture: Image) -> float:
        prompt = conversation.prompt(picture)
        began = time.perf_counter()
        await answer(engine, name, prompt.parts, 1)
        return time.perf_counter() - began

    for trial in range(1 if options.tiny else 1 + REPEATS):
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


async def episodes(engine: Engine, options: argparse.Namespace, stride: int) -> Result:
    """All at once; each begins its next step when its answer has come, as if environments took no time."""
    number, steps, tokens = (2, 7, 8) if options.tiny else (options.episodes, options.steps, ANSWER)
    size = SMALL if options.tiny else FULL_HD
    base = 100_000 * stride
    pictures = [[screenshot(base + 1000 * e + s, size) for s in range(steps)] for e in range(number)]
    latencies: list[float] = []
    answers: list[Generation] = []

    async def episode(index: int) -> None:
        conversation = Conversation(agent_of(stride), f"Stride {stride}, episode {index}.".ljust(SYSTEM, "x"))
        for step, picture in enumerate(pictures[index]):
            began = time.perf_counter()
            prompt = conversation.prompt(picture)
            made = await answer(engine, f"e{stride}-{index}-{step}", prompt.parts, tokens)
            latencies.append(time.perf_counter() - began)
            answers.append(made)
            conversation.add(Turn(picture, made.token_ids, truncated=made.truncated))

    began = time.perf_counter()
    await asyncio.gather(*(episode(index) for index in range(number)))
    seconds = time.perf_counter() - began
    asked = sum(len(made.prompt_token_ids) for made in answers)
    return {
        "episodes": number, "steps": steps, "answer_tokens": tokens, "seconds": seconds,
        "steps_per_second": number * steps / seconds, "prompt_tokens": asked,
        "cached_share": sum(made.cached_tokens or 0 for made in answers) / asked,
        "median_step_seconds": statistics.median(latencies), "longest_step_seconds": max(latencies),
    }  # fmt: skip


def memory_of(engine: Engine, config: RolloutWorkerConfig, folder: Path) -> Result:
    """The KV cache that the engine made, and the estimate of everything with it."""
    shape = read_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    set_up = memory.ReplicaSetUp(
        slots=config.rollout.slots,
        quantised=config.rollout.quantization != "none",
        encoder_tokens=encoder_cache_tokens(config),
    )
    needs = memory.of_replica_gpu(shape, set_up, engine.room.tokens)
    return {"kv_cache_tokens": engine.room.tokens, "weights": shape.weights, "estimate_parts": dict(needs.parts)}


def used(gpus: Sequence[str]) -> int | None:
    """Bytes of the first GPU's memory that are in use, by whomever; None where nvidia-smi does not say."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={gpus[0] if gpus else 0}")
    try:
        return int(subprocess.check_output(query, text=True)) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def prepared(folder: Path, options: argparse.Namespace) -> None:
    """Write the weights to the folder, unless they are there. Exits if it holds another model, or writing fails."""
    if options.tiny:
        shutil.copytree(BUILTIN_MODELS / "tiny-qwen3vl", folder, dirs_exist_ok=True)
        return
    if (folder / "config.json").is_file():
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if read_shape(document) != read_shape(UI_TARS_7B):
            sys.exit(f"{folder} holds another model: name another folder")
        return
    # In a process of its own, which leaves nothing on the GPU; renamed when complete.
    writing = folder.with_name(folder.name + ".writing")
    shutil.rmtree(writing, ignore_errors=True)
    code = "import sys, torch; from pathlib import Path; from benchmarks.gpu import models, weights; "
    code += "weights.write(Path(sys.argv[1]), models.UI_TARS_7B, torch.device('cuda'))"
    if subprocess.run([sys.executable, "-c", code, str(writing)], check=False).returncode:
        sys.exit("the weights could not be written; the lines above say why")
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)


async def measure(options: argparse.Namespace, gpus: Sequence[str], keep: Callable[[str, Result], None]) -> None:
    """`keep` is given each measurement. Memory is told twice: the second time after all the work."""
    config = config_of(options.folder, options)
    before = used(gpus)
    began = time.monotonic()
    engine = await Engine.start(config)
    try:
        taken: Result = {
            "start_seconds": time.monotonic() - began,
            "used_before_bytes": before,
            "used_bytes": used(gpus),
        }
        taken |= memory_of(engine, config, options.folder)
        keep("memory", taken)
        keep("decoding", await decoding(engine, options))
        keep("prompts", await prompts(engine, options))
        for stride in (3, 1):
            keep(f"episodes, stride {stride}", await episodes(engine, options, stride))
        keep("memory", taken | {"used_after_work_bytes": used(gpus)})
    finally:
        await engine.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the model that ships with dart, and small screenshots")
    parser.add_argument("--eager", action="store_true", help="with rollout.enforce_eager")
    parser.add_argument("--fp8", action="store_true", help="with rollout.quantization: fp8")
    parser.add_argument("--encoder-cache-tokens", type=int, help="rollout.encoder_cache_tokens (default: dart's own)")
    parser.add_argument("--episodes", type=int, default=16, help="at once")
    parser.add_argument("--steps", type=int, default=10, help="of each episode")
    parser.add_argument("--folder", type=Path, help="where to write the weights and leave them, or where they are")
    parser.add_argument("--conditions", default="", help="a note for the result file")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    gpus = gpus_here()[:1] if options.device == "cuda" else []
    if options.device == "cuda" and not gpus:
        sys.exit("this machine has no GPU: --device cpu --tiny shows only that everything runs")
    if options.device == "cpu" and not (options.tiny and devices.on_cpu()):
        sys.exit("--device cpu needs --tiny, and a torch without GPU support")
    os.environ |= {VISIBLE: gpus[0]} if gpus else {}
    card = name_of(gpus) if gpus else "cpu"
    path = file_of(options.output, "replica", f"{card}{'-tiny' if options.tiny else ''}")
    what = "real: vLLM and the rollout worker's engine over random weights" + (", tiny" if options.tiny else "")
    about = {"name": "gpu_replica", "real_or_simulated": what, "card": card}
    suffix = (", eager" if options.eager else "") + (", fp8" if options.fp8 else "")
    suffix += f", {options.encoder_cache_tokens} encoded tokens" if options.encoder_cache_tokens else ""

    def keep(name: str, result: Result) -> None:
        print(json.dumps({name + suffix: result}), flush=True)
        record(path, about, name + suffix, result, options.conditions)

    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or Path(folder) / "model"
        prepared(options.folder, options)
        asyncio.run(measure(options, gpus, keep))
    print(path)


if __name__ == "__main__":
    main()
