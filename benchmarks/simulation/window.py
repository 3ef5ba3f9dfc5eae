"""What a window of screenshots costs in tokens, by `agent.history_stride`: `python -m benchmarks.simulation.window`.

Real: the prompts (`dart.agent.prompt`), and the trainer's rows and micro-batches (`dart.workers.train.batch`). Assumed:
an episode of 30 steps with UI-TARS's prompt, 1920 × 1080 screenshots, 60 tokens an answer, four characters of text a
token, and an engine that caches whole blocks of 16 tokens and evicts none of them during the episode. Nothing is timed.
"""

from __future__ import annotations

import argparse
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results import write
from dart.agent.prompt import Conversation, Turn
from dart.config import Agent
from dart.core.types import Generation, Image, Markup, Prompt, Sample, Text, Tokens, VersionSpan
from dart.workers.train.batch import Keyed, Layout, cut, make_rows

RESULT = Path(__file__).parents[1] / "results" / "window.json"
STEPS, ANSWER, CHARACTERS, BLOCK = 30, 60, 4, 16
"""Steps of the episode; tokens of an answer; characters of a token of text; tokens of a block of the prefix cache."""
SCREEN = 69 * 39
"""Tokens of a 1920 × 1080 screenshot, which is resized to 69 × 39 squares of 28 × 28 pixels."""
MICROBATCH_TOKENS = 16_384
"""The default of `trainer.microbatch_tokens`."""
QWEN = Layout(vocab_size=152_064, image_token_id=151_655, merge_size=2, banned=(), pairs_per_token=32_500.0)
"""Qwen2.5-VL-7B: two operations for each of a layer's 233 million weights, and 4 × 3,584 for a pair of tokens."""
STRIDES = (1, 2, 3, 5)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one episode. computed: tokens that the trainer's rows hold, of `prompts_and_answers` without sharing; longest:
    tokens of the longest prompt; cached: share of the prompts' tokens that the engine has in its prefix cache; rows,
    straight: the trainer's rows, and how many of them need no attention mask; screenshots, encodings: distinct
    screenshots, and how often a pass over the micro-batches runs the vision tower on one."""

    stride: int
    shown: tuple[int, int]
    prompts_and_answers: int
    computed: int
    cached: float
    longest: int
    rows: int
    straight: int
    screenshots: int
    encodings: int


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


FULL_HD = Coded(QWEN.image_token_id, SCREEN, ANSWER, 0, 110_000)


def full_hd(name: str) -> Image:
    """A screenshot without a picture."""
    return Image.of(name.encode(), "image/png", 1920, 1080)


def episode(
    agent: Agent,
    name: str = "t",
    steps: int = STEPS,
    coded: Coded = FULL_HD,
    screenshot: Callable[[str], Image] = full_hd,
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


def cost(samples: Sequence[Sample], stride: int) -> Cost:
    rows = make_rows(samples, MICROBATCH_TOKENS, QWEN)
    shown = [len(sample.images) for sample in samples[len(samples) // 2 :]]
    encoded = [{image.sha256 for row in part for image in row.images} for part in cut(rows, MICROBATCH_TOKENS)]
    return Cost(
        stride=stride,
        shown=(min(shown), max(shown)),
        prompts_and_answers=sum(sample.tokens for sample in samples),
        computed=sum(row.length for row in rows),
        cached=round(_cached(samples), 4),
        longest=max(len(sample.generation.prompt_token_ids) for sample in samples),
        rows=len(rows),
        straight=sum(row.straight for row in rows),
        screenshots=len(set().union(*encoded)),
        encodings=sum(map(len, encoded)),
    )


def _cached(samples: Sequence[Sample]) -> float:
    """The share of the prompts' tokens that are in whole blocks of an earlier prompt and its answer."""
    digests: dict[bytes, int] = {}
    keyed = [Keyed.of(sample, digests, QWEN) for sample in samples]
    prompts = [len(sample.generation.prompt_token_ids) for sample in samples]
    hits = [
        max((min(size, one.shared_with(other)) // BLOCK * BLOCK for other in keyed[:number]), default=0)
        for number, (one, size) in enumerate(zip(keyed, prompts, strict=True))
    ]
    return sum(hits) / sum(prompts)


def costs() -> list[Cost]:
    return [cost(episode(Agent(history_stride=stride)), stride) for stride in STRIDES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    write(
        options.out,
        "window",
        "real prompts, rows and micro-batches; a made-up episode; nothing is timed",
        {"steps": STEPS, "windows": [asdict(one) for one in costs()]},
    )
    print(options.out)


if __name__ == "__main__":
    main()
