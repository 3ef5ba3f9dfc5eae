"""Tokens a second and the share of the cards' peak, from a batch and what the trainer told of its update."""

from __future__ import annotations

import pytest
from store_samples import trajectory

from dart.config import Config, parse
from dart.coordinator.training.meter import Meter
from dart.core.curation.batches import ReleasedGroup, samples_of


def _config() -> Config:
    return parse(
        {
            "model": {"path": "builtin:tiny-qwen3vl"},
            "agent": {"resize_multiple": 32, "min_pixels": 1024, "max_pixels": 102400},
            "environment": {"tasks": {"names": ["click-button"]}, "viewport": [160, 224]},
            "trainer": {"ranks": 2},
            "stop": {"updates": 1},
            "evaluation": {"episodes": 0},
        }
    )


def _batch(steps: int) -> list[ReleasedGroup]:
    return [ReleasedGroup.evenly("g", (trajectory("a", "g", steps=steps),), (1.0,))]


def test_tokens_a_second_and_the_share_of_the_cards_peak() -> None:
    batch = _batch(3)
    tokens = sum(sample.tokens for sample in samples_of(batch))
    assert tokens > 0
    told = Meter(_config(), peak=1e9).measured(batch, {"seconds": 2.0, "model_operations": 1.2e9})
    assert told == {"tokens": tokens, "tokens_per_second": tokens / 2, "mfu": pytest.approx(0.3)}, (
        "each rank has a card"
    )


def test_what_is_not_known_is_not_told() -> None:
    batch = _batch(2)
    assert set(Meter(_config()).measured(batch, {"seconds": 1.0, "model_operations": 1e9})) == {
        "tokens",
        "tokens_per_second",
    }
    older = Meter(_config(), 1e9).measured(batch, {"seconds": 1.0})
    assert set(older) == {"tokens", "tokens_per_second"}, "an older trainer does not count operations"
    assert Meter(_config()).measured(batch, {}) == {}, "an update whose answer was lost has no seconds"
    assert Meter(_config()).measured([], {"seconds": 1.0}) == {}
