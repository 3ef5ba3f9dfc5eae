"""Whole updates by the train worker's own `Trainer`, of the whole model: from PNG screenshots to weights for replicas.

A model of 7B fits one card with an adapter (`trainer.lora`), so nothing is extrapolated here.
"""

from __future__ import annotations

import hashlib
import io
import random
import tempfile
import time
from pathlib import Path

import psutil
import torch
from PIL import Image, ImageDraw

from benchmarks.gpu import subject as subjects
from benchmarks.gpu import weights
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.subject import Scale
from benchmarks.gpu.weights import TOKENS
from dart.config import TrainWorkerConfig
from dart.core.capacity import memory
from dart.core.capacity.work import Work
from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.workers.train.trainer import Trainer

MEMORY_FOLDER = Path("/dev/shm")
UPDATES = 3


def update(bench: Bench) -> Result:
    """Updates with the paper's loss (KL to the reference, selection by entropy) on `scale.episodes` episodes, each a
    row of as many steps as it has screenshots; seconds by phase, peak bytes beside the estimate of
    `dart.core.capacity`, and a copy of the merged weights. The median leaves out the first update, which prepares and
    encodes the screenshots."""
    scale = bench.scale
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None) as name:
        folder = Path(name)
        weights.write(folder, subjects.document_of(scale, scale.full_layers, scale.full_blocks), bench.device)
        bench.clear()
        began = time.monotonic()
        trainer = Trainer(_config(bench, folder))
        result: Result = {"load_seconds": round(time.monotonic() - began, 2)}
    bench.clear()
    episodes = [_episode(scale, number) for number in range(scale.episodes)]
    samples = [step for episode in episodes for step in episode]
    told: list[dict[str, float]] = []

    def updates() -> None:
        for _ in range(UPDATES if bench.repeats else 1):
            tokens = sum(len(step.token_ids) for step in samples)
            told.append(trainer.update(samples, len(samples), tokens))

    if bench.on_gpu:
        result["peak_bytes"] = bench.peak_bytes(updates)
    else:
        updates()
    result["estimate_bytes"] = _estimate(scale, trainer)
    counted = sorted(told[1:] or told, key=lambda metrics: metrics["update_seconds"])
    middle = counted[len(counted) // 2]
    seconds = middle["update_seconds"]
    encoded = trainer.encoded.encoded if trainer.encoded else 0
    done = Work(middle["model_operations"], middle["recomputed_operations"])
    result |= {
        "episodes": len(episodes), "steps": len(samples), "tokens": scale.episodes * _row_tokens(scale),
        "screenshots": scale.episodes * scale.screenshots, "encoded": encoded, "seconds": seconds,
        "seconds_of_each": [metrics["update_seconds"] for metrics in told],
        "mfu_of_measured_peak": bench.utilisation(done.model, seconds),
        "hfu_of_measured_peak": bench.utilisation(done.total, seconds),
        "first": told[0], "median": middle,
    }  # fmt: skip
    return result | _copies(trainer)


def _copies(trainer: Trainer) -> Result:
    """Of the weights for replicas, adapter merged: the first makes the host memory that the second uses again."""
    result: Result = {}
    process = psutil.Process()
    before = process.memory_info().rss
    copy: dict[str, torch.Tensor] | None = None
    for name in ("first", "second"):
        began = time.monotonic()
        copy = trainer.snapshot(copy)
        result[f"{name}_snapshot_seconds"] = time.monotonic() - began
    assert copy is not None
    result["snapshot_host_bytes"] = process.memory_info().rss - before
    result["snapshot_bytes"] = sum(one.nbytes for one in copy.values())
    return result


def _config(bench: Bench, folder: Path) -> TrainWorkerConfig:
    return TrainWorkerConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "bfloat16"},
            "trainer": {
                "lora": {}, "learning_rate": 1e-4, "gradient_checkpointing": True,
                "microbatch_tokens": _row_tokens(bench.scale), "fused_kernels": bench.fused,
            },
            "sync": {"transport": "gloo"}, "temperature": 1.0, "seed": 0, "total_updates": None,
        }
    )  # fmt: skip


def _row_tokens(scale: Scale) -> int:
    """Of the row that the steps of an episode make."""
    screenshot = scale.grid[1] * scale.grid[2] // 4 + 2  # what begins it and what ends it
    return scale.system + scale.screenshots * (screenshot + scale.answer)


def _episode(scale: Scale, number: int) -> list[pb.Sample]:
    """Steps of which each continues the one before it, with one screenshot more."""
    rng = random.Random(number)
    tokens = scale.grid[1] * scale.grid[2] // 4
    prompt = [8 + rng.randrange(200) for _ in range(scale.system)]
    images: list[ipb.Image] = []
    steps: list[pb.Sample] = []
    for _ in range(scale.screenshots):
        images.append(_screenshot(scale, rng))
        prompt += [TOKENS["vision_start_token_id"], *[TOKENS["image_token_id"]] * tokens, TOKENS["vision_end_token_id"]]
        answer = [8 + rng.randrange(200) for _ in range(scale.answer)]
        steps.append(
            pb.Sample(
                trajectory_id=f"episode-{number}", group_id="group", step_index=len(steps), advantage=rng.gauss(0, 1),
                prompt_token_ids=prompt, token_ids=answer, logprobs=[-11.0] * len(answer), images=images,
                versions=[tpb.VersionSpan(version=0, start=0, end=len(answer))],
            )
        )  # fmt: skip
        prompt += answer
    return steps


def _screenshot(scale: Scale, rng: random.Random) -> ipb.Image:
    """A PNG of coloured boxes, of the size of the screen."""
    width, height = scale.screen
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(400):
        x, y = rng.randrange(width), rng.randrange(height)
        colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
        draw.rectangle((x, y, x + rng.randrange(2, 200), y + rng.randrange(2, 20)), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    data = file.getvalue()
    return ipb.Image(
        sha256=hashlib.sha256(data).digest(), media_type="image/png", width_pixels=width, height_pixels=height,
        data=data,
    )  # fmt: skip


def _estimate(scale: Scale, trainer: Trainer) -> int:
    """Without what the CUDA runtime takes, which the allocator does not count either."""
    lora = trainer.config.trainer.lora
    assert lora is not None
    set_up = memory.TrainerSetUp(
        checkpointing=True, microbatch_tokens=_row_tokens(scale), runtime=0, lora_rank=lora.rank,
        lora_targets=lora.target_modules, fused=trainer.config.trainer.fused_kernels,
    )  # fmt: skip
    prompts = memory.Prompts(_row_tokens(scale), scale.screenshots, scale.grid[1] * scale.grid[2] // 4)
    return memory.of_rank(subjects.shape_of(scale, scale.full_layers, scale.full_blocks), set_up, prompts).total
