"""The trainer's view of the policy, and turns and transfers as the coordinator would make them, for engine tests."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image as PillowImage
from PIL import ImageDraw

from dart.config import Lora
from dart.core.types import Generation, Image, Markup, PromptPart, Text
from dart.v1 import session_pb2 as pb
from dart.v1 import weights_pb2 as wpb
from dart.wire.channel import free_port
from dart.wire.tokens import vision_token_ids
from dart.workers.rollout.engine import Engine
from dart.workers.rollout.role import RolloutRole
from dart.workers.weights.transfer import Sender, make_sender, spec_of, specs_to_proto

SIZE = (160, 224)
TRANSFER_SECONDS = 4.0
LORA = Lora(rank=5, alpha=20)  # vLLM makes room for 8
ASSISTANT = Markup("<|im_end|>\n<|im_start|>assistant\n")


class Trainer:
    """The model as the trainer has it, and its end of the transfers."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        torch.set_num_threads(1)
        self.torch = torch
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = AutoProcessor.from_pretrained(folder)
        self.banned = list(vision_token_ids(self.processor.tokenizer))
        self.sender: Sender = make_sender("gloo", TRANSFER_SECONDS)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Every placeholder as often as the processor's grid says."""
        grids = iter(self.pixels(images)["image_grid_thw"].prod(-1) // 4)
        pad = self.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        return [copy for token in ids for copy in [token] * (int(next(grids)) if token == pad else 1)]

    def pixels(self, images: Sequence[Image]) -> Any:
        opened = [PillowImage.open(io.BytesIO(image.data)) for image in images]
        return self.processor.image_processor(images=opened, return_tensors="pt")

    def logprobs(self, generation: Generation, images: Sequence[Image], temperature: float = 1.0) -> Any:
        """float[T, V]: of every token at every sampled position, as the policy is defined."""
        torch = self.torch
        ids = torch.tensor([[*generation.prompt_token_ids, *generation.token_ids]])
        pad = self.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        with torch.no_grad():
            logits = self.model(input_ids=ids, mm_token_type_ids=(ids == pad).int(), **self.pixels(images)).logits[0]
        logits = logits[len(generation.prompt_token_ids) - 1 : -1]
        logits[:, self.banned] = -torch.inf
        return (logits / temperature).log_softmax(-1)

    def difference(self, generation: Generation, images: Sequence[Image], temperature: float = 1.0) -> float:
        """Mean absolute difference between the engine's log-probs and the trainer's."""
        torch = self.torch
        theirs = torch.tensor(generation.logprobs)
        mine = self.logprobs(generation, images, temperature)
        return float((mine[range(len(theirs)), list(generation.token_ids)] - theirs).abs().mean())

    def greedy_matches(self, generation: Generation, images: Sequence[Image]) -> int:
        """How many of the tokens are the trainer's most likely ones."""
        best = self.logprobs(generation, images).argmax(-1)
        return int((best == self.torch.tensor(generation.token_ids)).sum())

    def step(self, seed: int) -> None:
        """Change every weight, the vision tower's too."""
        self.torch.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.data += 0.3 * parameter.data.std().clamp(min=0.02) * self.torch.randn_like(parameter)

    def tensors(self) -> list[tuple[str, Any]]:
        return [(name, parameter.data) for name, parameter in self.model.named_parameters()]

    def infos(self) -> list[wpb.TensorInfo]:
        return specs_to_proto(spec_of(*item) for item in self.tensors())


def engine_config(folder: Path) -> str:
    rollout = {"slots": 16, "max_model_len": 2048, "kv_cache_bytes": 128 << 20, "enforce_eager": True}
    return json.dumps({
        "model": {"path": str(folder), "dtype": "float32"},
        "rollout": rollout | {"image_cache_entries": 64},
        "sync": {"transport": "gloo", "timeout_seconds": TRANSFER_SECONDS},
        "max_images": 4,
        "seed": 0,
    })  # fmt: skip


class Adapted(Trainer):
    """Has an adapter, of which alone it sends new versions."""

    def __init__(self, folder: Path) -> None:
        from dart.workers.train.adapters import lora

        super().__init__(folder)
        self.lora = lora
        lora.attach(self.model, LORA, seed=0)

    def step(self, seed: int) -> None:
        self.torch.manual_seed(seed)
        for name, weight in self.model.named_parameters():
            if self.lora.is_adapter(name):
                weight.data = 0.3 * self.torch.randn_like(weight)

    def tensors(self) -> list[tuple[str, Any]]:
        from dart.workers.train.adapters.weights import copied_adapter

        return list(copied_adapter(self.model, self.torch.float32, True, None).items())


def adapter_config(folder: Path, **adapter: Any) -> str:
    told = json.loads(engine_config(folder))
    settings = {"rank": LORA.rank, "alpha": LORA.alpha, "target_modules": LORA.target_modules}
    return json.dumps(told | {"adapter": settings} | adapter)


_count = iter(range(1, 10_000))


def request_id() -> str:
    return f"request-{next(_count)}"


def drawn(seed: int) -> Image:
    draw_from = random.Random(seed)
    picture = PillowImage.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y = draw_from.randrange(SIZE[0] - 40), draw_from.randrange(SIZE[1] - 30)
        colour = tuple(draw_from.randrange(256) for _ in range(3))
        draw.rectangle((x, y, x + draw_from.randrange(8, 40), y + draw_from.randrange(8, 30)), fill=colour)
    data = io.BytesIO()
    picture.save(data, "PNG")
    return Image.of(data.getvalue(), "image/png", *SIZE)


def turn(image: Image) -> list[PromptPart]:
    return [Markup("<|im_start|>user\n<|vision_start|>"), image, Markup("<|vision_end|>"), ASSISTANT]


def first_turn(image: Image, instruction: str = "click red") -> list[PromptPart]:
    return [Markup("<|im_start|>user\n"), Text(instruction), Markup("<|im_end|>\n"), *turn(image)]


async def sync_weights(
    role: RolloutRole, trainer: Trainer, version: int, mode: wpb.PauseMode = wpb.PAUSE_MODE_DRAIN, new: bool = False
) -> pb.WeightsLoaded:
    """Both ends of a transfer, as the coordinator would have them act. `new`: in a new group."""
    group = transfer_group(trainer, new)
    command = pb.LoadWeights(version=version, group=group, pause_mode=mode, tensors=trainer.infos())
    loaded, _ = await asyncio.gather(role.handle(command), asyncio.to_thread(send_weights, trainer, group))
    assert isinstance(loaded, pb.WeightsLoaded)
    assert loaded.version == version
    return loaded


async def overtaken(role: RolloutRole, engine: Engine, trainer: Trainer) -> None:
    """A long turn in the middle of which the next version arrives and serves: it has tokens of both."""
    before = engine.version
    long = asyncio.ensure_future(engine.generate(request_id(), first_turn(drawn(2)), 1.5, 800))
    await in_flight(engine, 1)
    trainer.step(before + 1)
    await sync_weights(role, trainer, before + 1, wpb.PAUSE_MODE_KEEP)
    assert {span.version for span in (await long).versions} == {before, before + 1}


def transfer_group(trainer: Trainer, new: bool = False) -> wpb.TransferGroup:
    group: wpb.TransferGroup | None = getattr(trainer, "group", None)
    if group is None or new:
        port = free_port()
        group = wpb.TransferGroup(group_id=f"{port}", transport="gloo", host="127.0.0.1", port=port, world_size=2)
        trainer.group = group  # type: ignore[attr-defined]
    return group


def send_weights(trainer: Trainer, group: wpb.TransferGroup) -> None:
    trainer.sender.open(group)
    trainer.sender.send(trainer.tensors())


async def in_flight(engine: Engine, count: int) -> None:
    """Until that many requests sample tokens."""
    while sum(internal is not None for internal in engine._running.values()) < count:
        await asyncio.sleep(0.01)
    # One that entered after them and is finished: so they have begun.
    await engine.generate(request_id(), [Markup("<|im_start|>"), Text("hello")], 1.0, 4)
