"""Samples and settings for the tests of the train worker, over the tiny model of `tiny_model`."""

from __future__ import annotations

import hashlib
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from dart.config import TrainWorkerConfig
from dart.core.types import Sample
from dart.v1 import image_pb2 as ipb
from dart.v1 import session_pb2 as pb
from dart.v1 import trajectory_pb2 as tpb
from dart.wire.convert import sample_from_proto

END, START, VISION_START, VISION_END, PAD = 2, 1, 3, 4, 6
"""Of the tiny model's tokenizer."""

same_bits = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU adds gradients up in another order each time, so bits differ"
)


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch compiles, although an engine that another test started in this process may have forbidden it. Afterwards,
    what `fused.speed_up` switches over for a whole module of transformers is switched back."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    names = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.models.qwen")]
    before = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    yield
    for module, name, function in before:
        setattr(module, name, function)


def settings(folder: Path, **trainer: Any) -> TrainWorkerConfig:
    """Small, float32, no reference model and no selection unless asked for."""
    top = {
        key: trainer.pop(key)
        for key in ("temperature", "total_updates", "resume_from", "dtype", "shared_blobs")
        if key in trainer
    }
    loss = {"kl_coefficient": 0.0, "entropy_quantile": 0.0, **trainer.pop("loss", {})}
    return TrainWorkerConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": top.pop("dtype", "float32")},
            "trainer": {"learning_rate": 1e-3, "threads": 1, "microbatch_tokens": 2048, "loss": loss, **trainer},
            "sync": {"transport": "gloo", "timeout_seconds": 20.0},
            "seed": 0,
            "temperature": 1.0,
            "total_updates": None,
            **top,
        }
    )


def screenshot(seed: int, width: int = 64, height: int = 96) -> ipb.Image:
    """64 × 96 is 6 image tokens."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        x, y = rng.randrange(width - 20), rng.randrange(height - 20)
        draw.rectangle([x, y, x + 18, y + 12], fill=tuple(rng.randrange(256) for _ in range(3)))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = file.getvalue()
    digest = hashlib.sha256(data).digest()
    return ipb.Image(sha256=digest, media_type="image/png", width_pixels=width, height_pixels=height, data=data)


def image_tokens(image: ipb.Image) -> int:
    return (image.width_pixels // 32) * (image.height_pixels // 32)


def text(characters: str) -> list[int]:
    """Any ids of single characters do."""
    return [8 + ord(character) % 256 for character in characters]


def sample(
    name: str,
    words: str,
    answer: str,
    advantage: float,
    images: list[ipb.Image],
    logprob: float = -5.0,
    version: int = 0,
    group: str = "g",
) -> pb.Sample:
    prompt = [START]
    for image in images:
        prompt += [VISION_START, *[PAD] * image_tokens(image), VISION_END]
    prompt += [*text(words), END, START]
    response = [*text(answer), END]
    return pb.Sample(
        trajectory_id=name,
        group_id=group,
        advantage=advantage,
        prompt_token_ids=prompt,
        token_ids=response,
        logprobs=[logprob] * len(response),
        versions=[tpb.VersionSpan(version=version, start=0, end=len(response))],
        images=images,
    )


def mixed(groups: int = 3, rollouts: int = 3) -> list[pb.Sample]:
    """Groups that share prompts, of different lengths, with images of two sizes; the last step has two images."""
    rng = random.Random(5)
    samples = []
    for group in range(groups):
        first = screenshot(group, *((64, 96), (96, 64), (32, 32))[group % 3])
        for rollout in range(rollouts):
            answer = "".join(rng.choice("0123456789,.") for _ in range(rng.randrange(2, 9)))
            name = f"{group}-{rollout}"
            advantage = rng.choice([-1.2, 0.4, 1.0])
            samples.append(sample(name, "click red" + "!" * group, answer, advantage, [first], group=str(group)))
        images = [first, screenshot(100 + group)]
        samples.append(sample(f"{group}-last", "then type", "done", 0.7, images, group=str(group)))
    return samples


def following(before: pb.Sample, step: pb.Sample) -> pb.Sample:
    """The step with a prompt that continues the prompt and the response of the one before."""
    made = pb.Sample()
    made.CopyFrom(step)
    del made.prompt_token_ids[:], made.images[:]
    made.prompt_token_ids.extend([*before.prompt_token_ids, *before.token_ids, *step.prompt_token_ids])
    made.images.extend([*before.images, *step.images])
    return made


def episodes(rollouts: int = 3, steps: int = 3) -> list[pb.Sample]:
    """A group of roll-outs whose every step's prompt continues the one before; two begin with the same action."""
    rng = random.Random(9)
    samples = []
    for rollout in range(rollouts):
        for step in range(steps):
            answer = "12" if step == 0 and rollout < 2 else "".join(rng.choices("0123456789", k=3))
            seen = screenshot(200 if step == 0 else 200 + 10 * step + rollout)
            made = sample(f"episode-{rollout}-{step}", "go", answer, rng.choice([-1.0, 1.0]), [seen], group="e")
            samples.append(following(samples[-1], made) if step else made)
    return samples


def totals(samples: list[pb.Sample]) -> tuple[int, int]:
    return len(samples), sum(len(one.token_ids) for one in samples)


def alone(message: pb.Sample, layout: Any) -> Any:
    """A row with nothing else in it."""
    from dart.workers.train.batch import Keyed, Row

    return Row.of([Keyed.of(read(message, layout), {}, layout)])


def read(message: pb.Sample, layout: Any) -> Sample:
    """As the trainer reads it, checked."""
    from dart.workers.train.batch import check

    sample = sample_from_proto(message)
    check(sample, layout)
    return sample
