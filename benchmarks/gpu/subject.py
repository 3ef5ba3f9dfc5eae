"""What is measured: a model with random weights, and batches of full-HD screenshots as the trainer makes them.

Everything that these benchmarks use of the train worker is used here.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.gpu.models import UI_TARS_7B
from dart.config import BUILTIN_MODELS
from dart.core.capacity.shape import Shape, read_shape
from dart.core.types import Generation, Image, Sample, VersionSpan
from dart.workers.train import batch as batches
from dart.workers.train import model as train_model
from dart.workers.train import policy, vision
from dart.workers.train.kernels import fused
from dart.workers.train.screenshots import Processed


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is. `layers`, `blocks`: of decoder and tower, (few, many); a model of the full width has
    more than a card holds with its optimiser, so two depths are measured and extrapolated."""

    document: dict[str, Any]
    layers: tuple[int, int]
    blocks: tuple[int, int]
    grid: tuple[int, int, int]
    """Patches of a screenshot: time, height, width."""
    screen: tuple[int, int]
    """Pixels of a screenshot, width and height, before the processor makes `grid` of it."""
    system: int
    answer: int
    screenshots: int
    full_layers: int
    full_blocks: int
    matrix: int
    episodes: int
    """Of an update."""


def full() -> Scale:
    """UI-TARS-1.5-7B's width; a prompt of five full-HD screenshots with an answer has 15,0xx tokens."""
    document = cast("dict[str, Any]", copy.deepcopy(UI_TARS_7B))
    return Scale(
        document=document, layers=(4, 8), blocks=(16, 32), grid=(1, 78, 138), screen=(1920, 1080),
        system=1000, answer=130, screenshots=5, full_layers=28, full_blocks=32, matrix=8192,
        episodes=4,
    )  # fmt: skip


def tiny() -> Scale:
    """The model that ships with dart, and screenshots of 64×64: to see that everything runs."""
    document = json.loads((BUILTIN_MODELS / "tiny-qwen3vl" / "config.json").read_text(encoding="utf-8"))
    return Scale(
        document=document, layers=(1, 2), blocks=(2, 3), grid=(1, 4, 4), screen=(64, 64),
        system=10, answer=4, screenshots=3, full_layers=4, full_blocks=4, matrix=64, episodes=2,
    )  # fmt: skip


def document_of(scale: Scale, layers: int, blocks: int) -> dict[str, Any]:
    """The model's config with these depths."""
    made = copy.deepcopy(scale.document)
    made["text_config"]["num_hidden_layers"] = layers
    made["vision_config"]["depth"] = blocks
    return made


class Subject(torch.nn.Module):  # type: ignore[misc]
    """The trainer's forward pass as one module: log-probabilities float32 [T] of a micro-batch's response tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        device = next(model.parameters()).device
        self.policy = policy.Policy(model, 1.0, torch.empty(0, dtype=torch.int64, device=device))

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    def freeze_vision(self, frozen: bool) -> None:
        """A frozen tower runs without gradient, as the trainer runs it; here in every pass, because nothing is kept."""
        visual = self.model.model.visual
        visual.requires_grad_(not frozen)
        forward = type(visual).forward.__get__(visual)
        visual.forward = torch.no_grad()(forward) if frozen else forward

    def forward(self, batch: batches.MicroBatch) -> torch.Tensor:
        logprobs, _ = self.policy(batch)
        return logprobs


def build(
    scale: Scale, layers: int, blocks: int, device: torch.device, *, checkpointing: bool = True, fuse: bool = True
) -> Subject:
    """Float32 weights at random, made on the device."""
    config = AutoConfig.for_model(**document_of(scale, layers, blocks))
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    vision.speed_up(model)
    if fuse and device.type == "cuda":
        fused.speed_up(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return Subject(model.to(device))


def shape_of(scale: Scale, layers: int, blocks: int) -> Shape:
    return read_shape(document_of(scale, layers, blocks))


def steps(scale: Scale, number: int = 1) -> list[Sample]:
    """Steps of an episode, each of which continues the one before it; the last shows all of `scale.screenshots`."""
    tokens = scale.grid[1] * scale.grid[2] // 4
    pad = _image_token(scale)
    ids = [8 + i % 200 for i in range(scale.system)]
    images: list[Image] = []
    samples = []
    for shown in range(1, scale.screenshots + 1):
        images.append(Image(hashlib.sha256(bytes([shown])).digest(), "image/png", 1, 1))
        ids += [pad] * tokens
        answer = [8 + (shown + i) % 200 for i in range(scale.answer)]
        if shown > scale.screenshots - number:
            samples.append(_sample(shown, tuple(ids), answer, tuple(images)))
        ids += answer
    return samples


def _image_token(scale: Scale) -> int:
    return int(AutoConfig.for_model(**scale.document).image_token_id)


def _sample(index: int, prompt: tuple[int, ...], answer: Sequence[int], images: tuple[Image, ...]) -> Sample:
    logprobs = [-1.0] * len(answer)
    generation = Generation(prompt, tuple(answer), logprobs, (VersionSpan(0, 0, len(answer)),), "")
    return Sample("one", "group", index, images, generation, 1.0)


def micro_batch(scale: Scale, subject: Subject, samples: Sequence[Sample], device: torch.device) -> batches.MicroBatch:
    """On the device."""
    layout = batches.Layout(
        vocab_size=int(scale.document["text_config"]["vocab_size"]),
        image_token_id=_image_token(scale),
        merge_size=2,
        banned=(),
        pairs_per_token=train_model.pairs_per_token(subject.model),
    )
    rows = batches.make_rows(samples, 1 << 20, layout)
    values = 3 * 2 * int(scale.document["vision_config"]["patch_size"]) ** 2
    count = scale.grid[1] * scale.grid[2]
    digests = {image.sha256 for sample in samples for image in sample.images}
    images = {digest: Processed(torch.randn(count, values), None, scale.grid, count // 4) for digest in digests}
    return batches.collate(rows, images, layout).to(device)


def forward_backward(subject: torch.nn.Module, batch: batches.MicroBatch) -> None:
    """One pass with gradients: the ratio to itself times the advantage, as in the first minibatch of an update."""
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16):
        new = subject(batch)
    (-((new - new.detach()).exp() * batch.advantages).mean()).backward()
