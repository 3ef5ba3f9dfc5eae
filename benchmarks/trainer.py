"""What sharing prefixes and sorting by length is worth to the trainer: `python -m benchmarks.trainer`.

The same model and the same update, made twice: *plain*, with a row for every step, and micro-batches cut in order of
arrival and padded to their longest row; and *packed*, as in `dart.workers.train.batch`: steps whose prompts begin alike
share a row, a prefix tree, and rows of similar length share a micro-batch. Both run in one process, alternating.

On made-up episodes as on a desktop, 30 steps with five screenshots of 960 x 544 pixels in the prompt. *plain* has a
sliding window (`agent.history_stride: 1`), and here it also encodes a screenshot for each step that shows it; *packed*
has that window and, as *strided*, one that drops three screenshots at once (3), whose steps are chains without a mask.
Seconds of an update are compared in pairs. The weights are those of the built-in tiny policy, and the tower trains.
Writes results/trainer_desktop.json.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import PIL.Image
import torch
from PIL import ImageDraw

from benchmarks.results import write
from benchmarks.trials.inference import estimate
from dart import config
from dart.agent.prompt import Conversation, Turn
from dart.config import TrainWorkerConfig
from dart.core.types import Generation, Image, Markup, Prompt, Sample, Text, Tokens, VersionSpan
from dart.v1 import session_pb2 as pb
from dart.wire.convert import sample_to_proto
from dart.workers.train import batch as batches
from dart.workers.train.screenshots import Processed
from dart.workers.train.trainer import Trainer

RESULT = Path(__file__).parent / "results" / "trainer_desktop.json"
METRICS = ("loss", "gradient_norm", "padding_share", "rows", "microbatches", "computed_tokens", "update_seconds")
MODEL = "builtin:tiny-qwen3vl"
WIDTH, HEIGHT, SQUARE = 960, 544, 32
"""Pixels of a made-up screenshot; a token of it stands for a square of 32 x 32."""
STEPS, CHARACTERS = 30, 4
"""Of an episode; of a token of text."""
STRIDES = {"plain": 1, "packed": 1, "strided": 3}


@dataclass(frozen=True, slots=True)
class Coded:
    """How text and screenshots become tokens: ids of text from `first` to `end`, `screen` placeholders a screenshot,
    `answer` tokens an answer."""

    image_token_id: int
    screen: int
    answer: int
    first: int
    end: int

    def text(self, pieces: Iterable[str]) -> list[int]:
        """Made-up ids, the same for the same piece of text."""
        return [self.first + zlib.crc32(piece.encode()) % (self.end - self.first) for piece in pieces]

    def prompt(self, prompt: Prompt) -> list[int]:
        ids: list[int] = []
        for part in prompt.parts:
            match part:
                case Tokens(sampled):
                    ids += sampled
                case Image():
                    ids += [self.image_token_id] * self.screen
                case Markup(text) | Text(text):
                    ids += self.text(text[start : start + CHARACTERS] for start in range(0, len(text), CHARACTERS))
        return ids


def episode(
    agent: config.Agent,
    name: str,
    coded: Coded,
    screenshot: Callable[[str], Image],
    steps: int = STEPS,
) -> list[Sample]:
    """The samples of an episode in which every screenshot differs."""
    conversation = Conversation(agent, "Change the title of the first slide to 'Results', and save the presentation.")
    samples = []
    for step in range(steps):
        screen = screenshot(f"{name}/{step}")
        prompt = conversation.prompt(screen)
        answer = array("I", coded.text(f"{name}/{step}/{token}" for token in range(coded.answer)))
        spans = (VersionSpan(0, 0, coded.answer),)
        tokens, logprobs = array("I", coded.prompt(prompt)), array("f", [-1.0] * coded.answer)
        generation = Generation(tokens, answer, logprobs, spans, "")
        samples.append(Sample(name, "g", step, prompt.images, generation, 1.0))
        conversation.add(Turn(screen, answer))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6, help="of an episode each; the first is not counted")
    compare(parser.parse_args().batches)


def compare(count: int) -> None:
    """Compare updates on one made-up episode each."""
    told = TrainWorkerConfig(
        model=config.Model(path=MODEL), trainer=config.Trainer(), sync=config.Sync(), temperature=1.0, seed=0,
        total_updates=None,
    )  # fmt: skip
    trainers = {way: Trainer(told) for way in STRIDES}
    layout = trainers["plain"].layout
    coded = Coded(layout.image_token_id, (WIDTH // SQUARE) * (HEIGHT // SQUARE), 20, 8, layout.vocab_size)
    rows: list[dict[str, dict[str, float]]] = []
    for number in range(count):
        row = {}
        for way, trainer in trainers.items():
            agent = config.Agent(history_stride=STRIDES[way])
            steps = episode(agent, f"episode {number}", coded, _screenshot)
            samples = [sample_to_proto(replace(step, advantage=(-1.0) ** index)) for index, step in enumerate(steps)]
            tokens = sum(len(sample.prompt_token_ids) + len(sample.token_ids) for sample in samples)
            totals = len(samples), sum(len(sample.token_ids) for sample in samples)
            with _by_themselves(trainer.token_limit) if way == "plain" else nullcontext():
                row[way] = _timed(trainer, samples, totals, tokens) | {"tokens": tokens}
        rows.append(row)
        print(json.dumps(row), flush=True)
    results: dict[str, Any] = {
        f"{way}_over_plain_update_seconds": asdict(
            estimate([row[way]["update_seconds"] / row["plain"]["update_seconds"] for row in rows[1:] or rows])
        )
        for way in ("packed", "strided")
    }
    what, versions = "real: the trainer; made up: episodes and screenshots", {"torch": str(torch.__version__)}
    write(RESULT, "trainer_desktop", what, results | {"batches": rows}, versions=versions)
    print(json.dumps(results), RESULT)


def _screenshot(name: str) -> Image:
    """One of its own, with as much detail as a desktop: windows full of short dark strokes."""
    rng = random.Random(name)
    picture = PIL.Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(picture)
    for _ in range(2_000):
        x, y = rng.randrange(WIDTH), rng.randrange(HEIGHT)
        draw.rectangle((x, y, x + rng.randrange(2, 30), y + 2), fill=(rng.randrange(160),) * 3)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return Image.of(written.getvalue(), "image/png", WIDTH, HEIGHT)


@contextmanager
def _plain_rows(token_limit: int) -> Iterator[None]:
    def make_rows(samples: Iterable[Sample], _limit: int, layout: batches.Layout) -> list[batches.Row]:
        return [batches.Row.of([batches.Keyed.of(sample, {}, layout)]) for sample in samples]

    def cut(rows: Iterable[batches.Row], _limit: int) -> list[list[batches.Row]]:
        parts: list[list[batches.Row]] = []
        longest = 0
        for row in rows:
            longest = max(longest, row.length)
            if parts and (len(parts[-1]) + 1) * longest <= token_limit:
                parts[-1].append(row)
            else:
                parts.append([row])
                longest = row.length
        return parts

    with patch.object(batches, "make_rows", make_rows), patch.object(batches, "cut", cut):
        yield


@contextmanager
def _by_themselves(token_limit: int) -> Iterator[None]:
    """Plain rows, none of which shares a screenshot with another."""
    collate = batches.collate

    def apart(
        rows: Sequence[batches.Row], images: dict[bytes, Processed], layout: batches.Layout
    ) -> batches.MicroBatch:
        shown = [image.sha256 for row in rows for image in row.images]
        return replace(
            collate(rows, images, layout),
            pixel_values=torch.cat([images[digest].patches for digest in shown]),
            image_grid_thw=torch.tensor([images[digest].grid for digest in shown]),
            image_digests=tuple(shown),
            image_index=tuple(range(len(shown))),
        )

    with _plain_rows(token_limit), patch.object(batches, "collate", apart):
        yield


def _timed(trainer: Trainer, samples: list[pb.Sample], totals: tuple[int, int], tokens: int) -> dict[str, float]:
    metrics = trainer.update(samples, *totals)
    return {name: metrics[name] for name in METRICS} | {"tokens_per_second": tokens / metrics["update_seconds"]}


if __name__ == "__main__":
    main()
