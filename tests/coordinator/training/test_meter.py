"""Tokens a second, operations and the share of the cards' peak, from a batch and its update's seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_samples import trajectory

from dart.agent.parsing import screenshot_tokens
from dart.config import Config, parse
from dart.coordinator.training.meter import Meter
from dart.core.capacity.shape import read_shape
from dart.core.capacity.work import Load, Passes, causal_pairs, forward, update
from dart.core.curation.batches import ReleasedGroup, samples_of


def _config(folder: str = "builtin:tiny-qwen3vl", **trainer: object) -> Config:
    return parse(
        {
            "model": {"path": folder},
            "agent": {"resize_multiple": 32, "min_pixels": 1024, "max_pixels": 102400},
            "environment": {"tasks": {"names": ["click-button"]}, "viewport": [160, 224]},
            "trainer": {"ranks": 2, **trainer},
            "stop": {"updates": 1},
            "evaluation": {"episodes": 0},
        }
    )


def _batch(steps: int) -> list[ReleasedGroup]:
    return [ReleasedGroup.evenly("g", (trajectory("a", "g", steps=steps),), (1.0,))]


def _load(batch: list[ReleasedGroup]) -> Load:
    load = Load(0, 0, 0, 0, 4 * 35)
    for sample in samples_of(batch):
        answer = len(sample.generation.token_ids)
        load += Load(sample.tokens, causal_pairs(sample.tokens), answer, len(sample.images), 0)
    return load


def test_tokens_and_operations_of_an_update() -> None:
    config, batch = _config(loss={"entropy_quantile": 0.2}), _batch(3)
    load = _load(batch)
    assert load.tokens > 0 and load.screenshots > 0
    assert screenshot_tokens(config.agent, config.environment.viewport) == 35
    told = Meter(config, peak=1e9).measured(batch, 2.0)
    shape = read_shape(json.loads((config.model.folder / "config.json").read_text()))
    expected = update(shape, load, Passes(score=True, reference=True, trained_share=0.8)).model
    assert told["tokens"] == load.tokens
    assert told["tokens_per_second"] == load.tokens / 2
    assert told["model_operations"] == pytest.approx(expected)
    assert told["mfu"] == pytest.approx(expected / 2 / 2e9), "two ranks have a peak of 1e9 each"
    assert expected == pytest.approx(forward(shape, load) * (1 + 0.8 + 0.8 + 1.6))


def test_what_is_not_known_is_not_told(tmp_path: Path) -> None:
    batch = _batch(2)
    assert "mfu" not in Meter(_config()).measured(batch, 1.0)
    assert set(Meter(_config(str(tmp_path)), 1e9).measured(batch, 1.0)) == {"tokens", "tokens_per_second"}
    assert Meter(_config()).measured(batch, None) == {}, "an update whose answer was lost has no seconds"
    assert Meter(_config()).measured([], 1.0) == {}
