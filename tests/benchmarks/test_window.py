"""What a window of screenshots costs: the real prompts through the trainer's real rows and micro-batches.

Assumed: an episode of 30 steps with UI-TARS's prompt, 1920 × 1080 screenshots, 60 tokens an answer, four characters of
text a token, and an engine that caches whole blocks of 16 tokens and evicts none of them during the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from benchmarks.trainer import Coded, episode  # noqa: E402
from dart.config import Agent  # noqa: E402
from dart.core.types import Image, Sample  # noqa: E402
from dart.workers.train.batch import Keyed, Layout, cut, make_rows  # noqa: E402

ANSWER, BLOCK = 60, 16
"""Tokens of an answer; tokens of a block of the prefix cache."""
SCREEN = 69 * 39
"""Tokens of a 1920 × 1080 screenshot, which is resized to 69 × 39 squares of 28 × 28 pixels."""
MICROBATCH_TOKENS = 16_384
"""The default of `trainer.microbatch_tokens`."""
QWEN = Layout(vocab_size=152_064, image_token_id=151_655, merge_size=2, banned=(), pairs_per_token=32_500.0)
"""Qwen2.5-VL-7B: two operations for each of a layer's 233 million weights, and 4 × 3,584 for a pair of tokens."""
FULL_HD = Coded(QWEN.image_token_id, SCREEN, ANSWER, 0, 110_000)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one episode. computed: tokens that the trainer's rows hold; longest: tokens of the longest prompt; cached:
    share of the prompts' tokens that the engine has in its prefix cache; rows, straight: the trainer's rows, and how
    many of them need no attention mask; encodings: how often a pass over the micro-batches runs the vision tower on one
    screenshot."""

    shown: tuple[int, int]
    computed: int
    cached: float
    longest: int
    rows: int
    straight: int
    encodings: int


def full_hd(name: str) -> Image:
    """A screenshot without a picture."""
    return Image.of(name.encode(), "image/png", 1920, 1080)


def cost(samples: Sequence[Sample]) -> Cost:
    rows = make_rows(samples, MICROBATCH_TOKENS, QWEN)
    shown = [len(sample.images) for sample in samples[len(samples) // 2 :]]
    encoded = [{image.sha256 for row in part for image in row.images} for part in cut(rows, MICROBATCH_TOKENS)]
    return Cost(
        shown=(min(shown), max(shown)),
        computed=sum(row.length for row in rows),
        cached=round(_cached(samples), 4),
        longest=max(len(sample.generation.prompt_token_ids) for sample in samples),
        rows=len(rows),
        straight=sum(row.straight for row in rows),
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


def test_dropping_three_screenshots_at_a_time_computes_most_tokens_once() -> None:
    sliding, blocks = (cost(episode(Agent(history_stride=one), "t", FULL_HD, full_hd)) for one in (1, 3))
    assert sliding.shown == (5, 5) and blocks.shown == (3, 5)
    assert blocks.longest <= sliding.longest
    assert blocks.computed <= 150_000 and sliding.computed > 2.5 * blocks.computed
    assert blocks.cached > 0.6 and sliding.cached < 0.2
    assert all(one.straight == one.rows for one in (sliding, blocks)), "no row needs a mask"
    # Five steps until something is dropped, then three at a time, of which each has a row.
    assert (blocks.rows, blocks.encodings) == (1 + 9, 5 + 8 * 5 + 3)
